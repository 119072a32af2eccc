"""This runtime, as a peer among peers: its client in a process of its own, its cluster on a Ray of its own.

    opbyop         one call of a compiled function per computation; handles are made by the client, none waited for
    opbyop-wait    the same, each value waited for before the next call
    chained        a `@pw.program` of 128 nodes, each one computation
    fused          one call of a function that is one loop of 128 computations

`python -m benchmarks.peers.pathways --no-fusion` runs each launch and each node on its own: no fusing of nodes, no
batching of small launches.
"""

import contextlib
import functools
import sys
from typing import Any

import numpy as np

from benchmarks.peers import jax_host
from benchmarks.peers.protocol import ALLREDUCE, CHAIN, NOOP, START, WORK, System, for_both_payloads, serve


class Pathways(System):
    """
    Args:
        fusion: of the runtime that is started; without it launches are not coalesced either.
        session: runs on the session that is open instead; it must have enough free devices.
    """

    packages = ("jax", "jaxlib", "ray", "grpcio", "numpy")
    modes = for_both_payloads("opbyop", "opbyop-wait", "chained", "fused")

    def __init__(self, fusion: bool = True, session: bool = False) -> None:
        self._fusion, self._session = fusion, session

    def configure(self, hosts: int, devices: int) -> None:
        import jax
        from jax.sharding import PartitionSpec as P

        import pathways_ray as pw

        self.payloads = jax_host.payloads(hosts)
        n = hosts * devices
        self._stack = contextlib.ExitStack()
        if not self._session:
            started = pw.init(
                hosts_per_island=hosts, devices_per_host=devices, fusion=self._fusion, coalesce=self._fusion
            )
            self._stack.enter_context(started)
        where = self._stack.enter_context(pw.virtual_slice((n,), ("x",)))

        def gang(function: Any, payload: str) -> Any:
            one_device = functools.partial(function, payload=payload, n=n)
            spread = jax.shard_map(one_device, mesh=where.mesh, in_specs=P("x"), out_specs=P("x"))
            return pw.compiled(spread, slice=where, in_specs=P("x"), out_specs=P("x"))

        def chain_of(step: Any) -> Any:
            @pw.program
            def chain(v: Any) -> Any:
                for _ in range(CHAIN):
                    v = step(v)
                return v

            return chain

        self._gang = gang
        step = {payload: gang(jax_host.computation, payload) for payload in (ALLREDUCE, NOOP)}
        self._programs = {
            "opbyop": step,
            "opbyop-wait": step,
            "chained": {payload: chain_of(step[payload]) for payload in step},
            "fused": {payload: gang(jax_host.chain_of_computations, payload) for payload in step},
        }
        self._start = pw.put(np.full(n, START, np.float32), slice=where, spec=P("x"))

    def prepare(self, mode: str, payload: str, count: int) -> None:
        if payload.startswith(WORK) and payload not in self._programs["opbyop"]:
            step = self._programs["opbyop"][payload] = self._gang(jax_host.computation, payload)
            np.asarray(step(self._start))

    def run(self, mode: str, payload: str, count: int) -> list[float]:
        program, wait = self._programs[mode][payload], mode == "opbyop-wait"
        v = self._start
        for _ in range(count if mode.startswith("opbyop") else count // CHAIN):
            v = program(v)
            if wait:
                v.block_until_ready()
        return np.asarray(v).tolist()

    def close(self) -> None:
        self._start.delete()
        self._stack.close()


if __name__ == "__main__":
    serve(Pathways(fusion="--no-fusion" not in sys.argv))
