"""A controller that is stopped for longer than clients wait for its pings, and then goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import numpy as np
import psutil

import pathways_ray as pw

STOPPED_S = 9.0


def controllers() -> list[int]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ray::Controller" in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


def main() -> None:
    with pw.init(islands=1, hosts_per_island=1, devices_per_host=1) as owner:
        other = pw.connect(owner.url, owner.token)
        held = []
        for session in (owner, other):
            where = session.virtual_slice((1,))
            held.append(pw.put(np.arange(3, dtype=np.float32), where).block_until_ready())
        (stopped,) = controllers()
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(stopped, signal.SIGCONT)
        for array in held:
            assert np.asarray(array).tolist() == [0, 1, 2]
            for left in reversed(range(3)):  # a call on its way may be lost with the controller, and says so
                try:
                    assert np.asarray(array + 1).tolist() == [1, 2, 3]
                    break
                except pw.errors.ControllerLost:
                    assert left, "calls do not reach the controller or its successor"
        there = {one["session"] for one in owner.status()["sessions"]}
        assert len(there) == 2, there
        other.close()
    print("both sessions went on, with their arrays")


if __name__ == "__main__":
    main()
