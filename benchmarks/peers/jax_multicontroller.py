"""Multi-controller JAX: every host process runs the same program and calls its own devices; nobody coordinates them.

This process only tells the host processes which program to run and collects their values. It costs two messages a run.

    opbyop         one call of a jitted function per computation, none waited for
    opbyop-wait    the same, each waited for before the next
    fused          one call per 128 computations: a loop inside the jitted function
"""

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.peers import jax_host
from benchmarks.peers.protocol import CHAIN, for_both_payloads, serve

MODES = ("opbyop", "opbyop-wait", "fused")


def host_process(host: int, hosts: int, devices: int, coordinator: str, orders: Connection) -> None:
    """Body of a host process."""
    here = jax_host.JaxHost(host, hosts, devices, coordinator)
    orders.send("ready")
    while True:
        try:
            mode, payload, count = orders.recv()
        except EOFError:
            return
        if mode == "reset":
            here.prepare(payload)
            here.reset()
            here.wait()
            orders.send("ready")
            continue
        if mode == "opbyop":
            here.steps(payload, count)
        elif mode == "opbyop-wait":
            for _ in range(count):
                here.steps(payload, 1)
                here.wait()
        else:
            for _ in range(count // CHAIN):
                here.fused(payload)
        orders.send(here.fetch().tolist())


class MultiController:
    packages = ("jax", "jaxlib", "numpy")
    modes = for_both_payloads(MODES)

    def configure(self, hosts: int, devices: int) -> None:
        self.payloads = jax_host.payloads(hosts)
        spawn = multiprocessing.get_context("spawn")
        coordinator = jax_host.free_address()
        self._orders: list[Connection] = []
        self._processes = []
        for host in range(hosts):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=host_process, args=(host, hosts, devices, coordinator, theirs), daemon=True)
            process.start()
            theirs.close()
            self._orders.append(ours)
            self._processes.append(process)
        self._collect()

    def _collect(self) -> list[Any]:
        return [orders.recv() for orders in self._orders]

    def _all(self, *order: Any) -> list[Any]:
        for orders in self._orders:
            orders.send(order)
        return self._collect()

    def prepare(self, mode: str, payload: str, count: int) -> None:
        self._all("reset", payload, 0)

    def run(self, mode: str, payload: str, count: int) -> list[float]:
        return [value for part in self._all(mode, payload, count) for value in part]

    def release(self, mode: str, payload: str) -> None:
        pass

    def close(self) -> None:
        for process in self._processes:
            process.kill()  # jax.distributed catches SIGTERM
        for process in self._processes:
            process.join()


if __name__ == "__main__":
    serve(MultiController)
