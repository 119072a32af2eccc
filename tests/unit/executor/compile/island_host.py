"""One host of an island of two, which compiles computations and compares both ways to call them, bit by bit.

    python -m tests.unit.executor.compile.island_host HOST DEVICES PORT DIRECTORY

Started by `test_over_hosts.py`, once for each host. Prints what it has found, as JSON.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pathways_ray.executor.compile.by_device import ByDevice
from pathways_ray.executor.compile.compiler import Compiler
from pathways_ray.executor.compile.platforms import backend_of
from pathways_ray.executor.data.device_transfer import DeviceTransfer
from pathways_ray.executor.data.partners import Partners
from pathways_ray.transport import neighbours
from pathways_ray.transport.messages import Peer
from tests.unit.executor.compile.test_by_device import WHOLE, XY, Case, X, any_bits, drawn_step, numbers, per_device
from tests.waiting import until

HOST, DEVICES, PORT = (int(text) for text in sys.argv[1:4])
SECRET = "the link secret"


def joined() -> Compiler:
    """The compiler of this host, which has joined the group of the island and knows its peer."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_enable_x64", True)
    backend_of("cpu").before_group("127.0.0.1")
    jax.distributed.initialize(f"127.0.0.1:{PORT}", 2, HOST)
    island = {host: [d for d in jax.devices() if d.process_index == host] for host in (0, 1)}
    compiler = Compiler(HOST, jax.local_devices(), island)
    transfer = DeviceTransfer(HOST, jax.local_devices()[0].client, "127.0.0.1", SECRET, neighbours.machine())
    directory = Path(sys.argv[4])
    (directory / f"{HOST}.new").write_text(transfer.address)
    (directory / f"{HOST}.new").rename(directory / f"{HOST}")
    until(lambda: all((directory / str(host)).exists() for host in (0, 1)), within_s=60.0)
    addresses = [(directory / str(host)).read_text() for host in (0, 1)]
    transfer.set_peers([Peer(k, 1, one, machine=neighbours.machine()) for k, one in enumerate(addresses)])
    compiler.meet = Partners(HOST, transfer, SECRET).meet
    return compiler


class OverHosts(Case):
    """The same on both hosts of the island, whose calls have numbers."""

    calls_made = 0

    def __init__(self, name: str, *functions: Any, **how: Any) -> None:
        super().__init__(*functions, **how)
        self.name = hashlib.blake2b(name.encode(), digest_size=16).digest()

    def found(self, *others: Any, away: bool = False) -> dict[str, Any]:
        """How it is called, and whether all shards have the bits of one call. `away`: of every third call host 1 has
        no arguments yet."""
        made = self.compiled()
        if not isinstance(made, ByDevice):
            return {"by_device": False, "over": False, "same": True}
        one, same = self.as_one(), []
        for number, given in enumerate((self.given, *others)):
            arguments = self.placed(given)
            if made.over is not None:
                OverHosts.calls_made += 1
                made.over.agreement.at(OverHosts.calls_made, 0)
            if made.over is not None and away and HOST == 1 and number % 3 == 0:
                made.over.agreement.leave()
                results = made._whole(*arguments)
            else:
                results = made(*arguments)
            for a, b in zip(results[:-1], one(*arguments)[:-1], strict=True):
                shards = [[np.asarray(s.data).tobytes() for s in value.addressable_shards] for value in (a, b)]
                same.append(shards[0] == shards[1] and (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding))
        return {"by_device": True, "over": made.over is not None, "same": all(same)}


def total(v: Any) -> Any:
    return jax.lax.psum(v, "x") * 0.7 + v


def cases(compiler: Compiler) -> dict[str, dict[str, Any]]:
    """Computations by name, and what was found of each."""
    many = functools.partial(OverHosts, compiler=compiler)
    shape = (2 * DEVICES,) if DEVICES == 1 else (2, DEVICES)
    axes = X if DEVICES == 1 else XY
    lies = "x" if DEVICES == 1 else "x+y"
    found: dict[str, dict[str, Any]] = {}
    for dtype in ("float32", "float64", "int32", "uint64"):
        v = numbers((2 * DEVICES, 9), dtype)
        step = per_device(lambda v: jax.lax.psum(v, "x"), [axes], axes)
        given = [[v], [v[::-1].copy()], [np.roll(v, 1, 1)]]
        case = many(dtype, step, given=given[0], layouts=[lies], results=[lies], shape=shape)
        found[dtype] = case.found(*given[1:])
    for seed in range(9):
        given = [[any_bits((2 * DEVICES, 1 + seed * 3), seed * 5 + k)] for k in range(4)]
        step = per_device(total, [axes], axes)
        case = many(f"bits {seed}", step, given=given[0], layouts=[lies], results=[lies], shape=shape)
        found[f"bits {seed}"] = case.found(*given[1:], away=True)
    if DEVICES == 1:
        for seed in range(40):
            given = [
                [any_bits((2, 5), seed + k), numbers((2, 5)) + k, np.full((1, 5), 0.7, np.float32)] for k in range(3)
            ]
            case = many(
                f"drawn {seed}", drawn_step(seed), given=given[0], layouts=["x", "x", ""], results=["x"], shape=shape
            )
            found[f"drawn {seed}"] = case.found(*given[1:])
        given = [[any_bits((2, 13), seed)] for seed in range(6)]
        found["in another order"] = many(
            "order", per_device(total, [X], X), given=given[0], shape=shape, hosts=[1, 0]
        ).found(*given[1:])
        v = numbers((2, 3))
        step = per_device(lambda v: jax.lax.psum(v, "x"), [X], WHOLE)
        found["the same on all"] = many("same", step, given=[v], results=[""], shape=shape).found([v + 1], [v + 2])
    else:
        v = any_bits((4, 7), 3)
        how = {"layouts": ["x+y"], "results": ["x+y"], "shape": (2, 2)}
        for name, axis in (("within hosts", "y"), ("between them", "x"), ("four devices", ("x", "y"))):
            step = per_device(lambda v, axis=axis: jax.lax.psum(v, axis) + v, [XY], XY)
            found[name] = many(name, step, given=[v], **how).found([v[::-1].copy()])
        given = [[any_bits((2, 13), seed)] for seed in range(6)]
        step = per_device(total, [X], X)
        alone = many("one host", step, given=given[0], shape=(2,), hosts=[HOST])
        found["one host"] = alone.found(*given[1:])
    return found


if __name__ == "__main__":
    print(json.dumps(cases(joined())), flush=True)
