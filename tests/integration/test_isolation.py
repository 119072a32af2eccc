"""Tenants with host processes of their own: one of them cannot take another's with it, and nothing of them stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pathways_ray as pw
from pathways_ray.errors import BufferLost, PathwaysError, SessionClosed
from tests.waiting import until

SCRIPT = Path(__file__).parent / "scripts" / "isolated_cluster.py"
TOKENS = {name: f"{name}-token-0123456789" for name in ("alice", "bob")}
V = np.arange(4, dtype=np.float32)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str, str]]:
    table = tmp_path_factory.mktemp("tenants") / "tenants.json"
    table.write_text(json.dumps({"tenants": [{"name": name, "token": token} for name, token in TOKENS.items()]}))
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), str(table)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        found = json.loads(process.stdout.readline())
        with pw.connect(found["url"], found["token"]) as operator:
            yield process, found["url"], found["token"]
            pids = [pid for pids in processes(operator).values() for pid in pids]
        process.communicate("", timeout=60)
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), within_s=10)


def processes(session: pw.Session) -> dict[str, list[int]]:
    """The processes of each tenant's hosts, as a session sees them."""
    found: dict[str, list[int]] = {}
    for island in session.status()["islands"]:
        found.setdefault(island["tenant"], []).extend(host["pid"] for host in island["hosts"])
    return found


def double(session: pw.Session) -> tuple[Any, Any]:
    """A function on a slice of a session, and a result of it."""
    compiled = pw.compiled(lambda x: 2 * x, slice=session.virtual_slice((2,), island=0))
    result = compiled(V)
    np.testing.assert_array_equal(result, 2 * V)
    return compiled, result


@pytest.mark.slow
def test_each_tenant_has_processes_and_the_death_of_one_is_its_own(cluster: tuple[Any, str, str]) -> None:
    _, url, token = cluster
    with (
        pw.connect(url, token) as operator,
        pw.connect(url, TOKENS["alice"]) as alice,
        pw.connect(url, TOKENS["bob"]) as bob,
    ):
        (f, _), (_, kept) = double(alice), double(bob)
        double(operator)
        assert {island["tenant"] for island in bob.status()["islands"]} == {"bob"}
        pids = processes(operator)
        assert sorted(pids) == ["", "alice", "bob"]
        assert len({pid for own in pids.values() for pid in own}) == 3
        os.kill(pids["alice"][0], signal.SIGKILL)
        np.testing.assert_array_equal(kept, 2 * V)

        def works_again() -> bool:
            try:
                return bool((np.asarray(f(V)) == 2 * V).all())
            except PathwaysError:
                return False

        until(works_again, within_s=30)
        np.testing.assert_array_equal(kept, 2 * V)
        assert processes(operator)["bob"] == pids["bob"]


@pytest.mark.slow
def test_what_starts_the_processes_may_die(cluster: tuple[Any, str, str]) -> None:
    """Its islands end with it, and with them what lies there. The sessions that have it end with an error that says so,
    or go on where it is back in time and has started the islands again; a new session finds them."""
    process, url, token = cluster
    with pw.connect(url, token) as operator:
        with pw.connect(url, TOKENS["alice"]) as alice:
            f, _ = double(alice)
            kept = f(f(V)).block_until_ready()
            before = processes(operator)["alice"]
            process.stdin.write("kill\n")
            process.stdin.flush()
            assert any(line == "killed\n" for line in process.stdout)  # Ray prints beside it

            def ended_or_back() -> bool:
                try:
                    result = np.asarray(f(V))
                except SessionClosed:
                    return True
                except PathwaysError:
                    return False
                np.testing.assert_array_equal(result, 2 * V)
                return processes(operator).get("alice", before) != before

            until(ended_or_back, within_s=30)
            with pytest.raises((SessionClosed, BufferLost)):
                np.asarray(kept)
        with pw.connect(url, TOKENS["alice"]) as alice:
            double(alice)
            assert processes(operator)["alice"] != before


@pytest.mark.parametrize(
    ("options", "text"),
    [({"isolation": "vm"}, "'shared' or 'process', not 'vm'"), ({"isolation": "process"}, "needs tenants=FILE")],
)
def test_options_that_make_no_sense(options: dict[str, str], text: str) -> None:
    from pathways_ray.deployment.options import Options

    with pytest.raises(pw.errors.UsageError, match=text):
        Options(**options).check()  # type: ignore[arg-type]
