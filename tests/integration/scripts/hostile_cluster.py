"""A cluster with a hostile tenant beside one that works; it prints what became of both, as JSON.

Arguments: the table of tenants, the hostile tenant's token, seconds of peace, seconds of the flood.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil

import pathways_ray as pw

CLIENT = Path(__file__).with_name("hostile_client.py")
table, token, peace, flood = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])


def launches(seconds: float) -> list[float]:
    """Seconds that each launch takes, from the call to the value."""
    took, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        start = time.monotonic()
        assert np.asarray(step(np.ones(4, np.float32))).tolist() == [2.0] * 4
        took.append(time.monotonic() - start)
    return took


with pw.init(islands=2, devices_per_host=2, tenants=table) as session:
    where = session.virtual_slice((2,), ("x",), island=1)
    step = pw.compiled(lambda v: v + 1.0, slice=where)
    status = session.status()
    pids = {"controller": status["controller"]["pid"]}
    for process in psutil.process_iter():
        if "ResourceManager" in " ".join(process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else []):
            pids["manager"] = process.pid
    hosts = sorted(host["pid"] for island in status["islands"] for host in island["hosts"])
    quiet = launches(peace)
    before = {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}
    client = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", str(CLIENT), session.url, token, str(flood)],
        stdout=subprocess.PIPE,
        text=True,
    )
    took: list[float] = []
    most = dict(before)
    limit = time.monotonic() + flood + 40.0
    while client.poll() is None:
        if time.monotonic() > limit:
            client.send_signal(signal.SIGABRT)
            sys.exit("the hostile client did not end")
        took += launches(0.5)
        for name, pid in pids.items():
            most[name] = max(most[name], psutil.Process(pid).memory_info().rss)
    assert client.stdout is not None
    report = json.loads(client.stdout.read())
    after = session.status()
    print(
        json.dumps(
            {
                "client": report,
                "client_status": client.returncode,
                "quiet_p99": float(np.percentile(quiet, 99)),
                "flooded_p99": float(np.percentile(took, 99)),
                "launches": [len(quiet), len(took)],
                "grown": {name: most[name] - before[name] for name in pids},
                "alive": after["controller"]["pid"] == pids["controller"]
                and hosts == sorted(host["pid"] for island in after["islands"] for host in island["hosts"]),
                "sessions": len(after["sessions"]),
            }
        )
    )
