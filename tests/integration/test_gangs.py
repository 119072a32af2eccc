"""Several clients at once on two islands of two hosts each: programs with collectives, interleaved on all devices.

Every value must have the bits that it has when its client is alone. Without the islands' order it must not work, or the
order would be good for nothing.
"""

from __future__ import annotations

import json

import pytest

from tests.integration.conftest import Scripts

CLIENTS = 4

CLIENT = """
import json, random, sys
import jax, numpy as np
from jax.sharding import PartitionSpec as P
import pathways_ray as pw

url, token, seed, launches = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
pick = random.Random(seed)

def gang(where, kind, factor):
    n = where.mesh.size
    def body(v):
        if kind == 0:
            return v + jax.lax.psum(v.sum(), "x") * factor
        if kind == 1:
            return jax.lax.all_gather(v, "x", tiled=True).reshape(n, -1)[::-1].sum(0) * factor + v
        if kind == 2:
            return jax.lax.ppermute(v, "x", [(i, (i + 1) % n) for i in range(n)]) * factor + 1
        return jax.lax.pmax(v, "x") - v * factor
    cut = P("x")
    inner = jax.shard_map(body, mesh=where.mesh, in_specs=cut, out_specs=cut, check_vma=False)
    return pw.compiled(inner, slice=where, in_specs=cut, out_specs=cut)

with pw.connect(url, token, name=f"client {seed}") as session:
    slices = [pw.virtual_slice((4,), ("x",), island=island) for island in (0, 1)]
    programs = []
    for number in range(4):
        length = pick.randint(1, 4)
        gangs = [gang(pick.choice(slices), pick.randrange(4), pick.choice([0.25, 0.5, 2.0])) for _ in range(length)]
        def steps(v, gangs=gangs):
            for one in gangs:
                v = one(v) * 0.125
            return v
        programs.append(pw.program(steps, name=f"program{number}"))
    x = np.arange(16, dtype=np.float32) + seed

    def outcome(value):
        try:
            return np.asarray(value).tobytes().hex()
        except pw.errors.PathwaysError as error:
            return f"{type(error).__name__}: {error}"

    def run(count):
        order = random.Random(seed)
        values = []
        for _ in range(count):
            # Some launches consume what one before has made, wherever that is by now.
            before = order.choice(values[-4:]) if values and order.random() < 0.3 else x
            values.append(programs[order.randrange(len(programs))](before))
        return [outcome(value) for value in values]

    alone = run(launches)
    for _ in range(2):
        print("ready", flush=True)
        if sys.stdin.readline().strip() != "go":
            break
        together = run(launches)
        wrong = [(a, b) for a, b in zip(alone, together) if a != b]
        texts = [b for _, b in wrong if ":" in b]
        kinds = sorted({text.split(":")[0] for text in texts})
        print(json.dumps({"wrong": len(wrong), "errors": kinds, "example": texts[0] if texts else ""}), flush=True)
"""

CLUSTER = """
import sys
import pathways_ray as pw

options = {"check_order": sys.argv[1] == "checked", "policy": sys.argv[2], "launch_limit_s": float(sys.argv[3])}
with pw.init(islands=2, hosts_per_island=2, devices_per_host=2, **options) as cluster:
    print(cluster.url, cluster.token, flush=True)
    sys.stdin.readline()
"""


def together(python: Scripts, launches: int, check: str, policy: str, limit: float, **environment: str) -> list[dict]:
    """What each of four clients says after `launches` launches at the same time as the others."""
    cluster = python.start(CLUSTER, check, policy, str(limit), **environment)
    assert cluster.stdout is not None
    url, token = cluster.stdout.readline().split()
    clients = []
    for seed in range(CLIENTS):
        client = python.start(CLIENT, url, token, str(seed), str(launches))
        assert client.stdout is not None
        # One after the other: what each computes first, it computes alone.
        if client.stdout.readline().strip() != "ready":
            python.finish(client)  # fails, and says why
        clients.append(client)
    for client in clients:
        assert client.stdin is not None
        client.stdin.write("go\n")
        client.stdin.flush()
    found = [json.loads(client.stdout.readline()) for client in clients if client.stdout is not None]
    for process in [*clients, cluster]:
        python.finish(process)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", ["share"])
def test_two_thousand_launches_of_four_clients_give_the_bits_of_each_alone(python: Scripts, policy: str) -> None:
    """With the order of every host compared as well: one digest, one order."""
    for found in together(python, 500, "checked", policy, 60.0):
        assert found == {"wrong": 0, "errors": [], "example": ""}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_without_one_order_collectives_corrupt_each_other_or_hang(python: Scripts) -> None:
    """A switch for tests makes hosts ignore the order. What hangs is ended by the limit of a launch."""
    found = together(python, 200, "unchecked", "share", 5.0, PATHWAYS_TEST_ONLY_IGNORE_ORDER="1")
    assert sum(client["wrong"] for client in found) > 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_hosts_that_differ_are_found_and_the_two_launches_named(python: Scripts) -> None:
    found = together(python, 200, "checked", "share", 60.0, PATHWAYS_TEST_ONLY_IGNORE_ORDER="1")
    examples = " ".join(client["example"] for client in found)
    assert "OrderMismatch" in examples
    assert "enqueued gangs in different orders: one had gang" in examples


HALF_AN_ARRAY = """
import time
import jax, numpy as np
from jax.sharding import PartitionSpec as P
import pathways_ray as pw

def summed(where):
    inner = jax.shard_map(lambda v: jax.lax.psum(v, "x"), mesh=where.mesh, in_specs=P("x"), out_specs=P())
    return pw.compiled(inner, slice=where, in_specs=P("x"), out_specs=P())

with pw.init(hosts_per_island=2) as cluster:
    honest = summed(pw.virtual_slice((2,), ("x",)))
    x = np.ones(2, np.float32)
    assert np.asarray(honest(x))[0] == 2
    with pw.connect(cluster.url, cluster.token, name="half") as session:
        where = pw.virtual_slice((2,), ("x",))
        gang = summed(where)
        np.asarray(gang(x))
        links = session._data
        links._link(1).outbox.send_all = lambda messages: None  # of this array, host 1 gets nothing
        half = pw.put(x, where, P("x"))
        record = half._buffer.record
        session._driver.uploaded(record, record.upload, 1, None)
        y = gang(half)
        start = time.monotonic()
        try:
            y.block_until_ready()
        except pw.errors.PathwaysError as error:
            print(type(error).__name__, f"after {time.monotonic() - start:.1f} s: {error}")
    del session
    start = time.monotonic()
    while True:
        try:
            again = summed(honest.slice)
            assert np.asarray(again(x))[0] == 2
            break
        except pw.errors.HostLost:
            assert time.monotonic() - start < 30
    print(f"serving after {time.monotonic() - start:.1f} s")
"""


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_gang_that_one_host_cannot_enter_ends_on_the_others(python: Scripts) -> None:
    """A client says that an array is there, and gave one of two hosts nothing: the other one waits in a collective."""
    out = python.run(HALF_AN_ARRAY)
    print(out)
    assert "HostLost after" in out
    assert "host 0 waits in it" in out
    assert "serving after" in out
