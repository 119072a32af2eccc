"""Monarch actors: one process for each host, in one mesh; a call goes to all of them at once.

    opbyop-wait    `call` with the value, per computation, and `get` of the result: the value goes through the client
    opbyop         `call` per computation, values kept in the actors, none waited for but the last
    chained        127 `broadcast`s, which return nothing, and one `call`, whose result is waited for
    fused          one `call` per 128 computations, which are one loop inside XLA
    list           one `call` with a list of 128 computations

Monarch's tensor engine has no all-reduce without GPUs, so the actors run JAX, as those of Ray do. An actor
executes one call after the other, in order.
"""

from typing import Any

from monarch.actor import Actor, current_rank, endpoint, this_host

from benchmarks.peers import jax_host
from benchmarks.peers.protocol import CHAIN, System, for_both_payloads, serve


class Host(Actor):
    """The actor: `JaxHost` with endpoints."""

    def __init__(self, hosts: int, devices: int, coordinator: str) -> None:
        self._here = jax_host.JaxHost(current_rank().rank, hosts, devices, coordinator)

    @endpoint
    def reset(self) -> list[float]:
        self._here.reset()
        return self._here.fetch().tolist()

    @endpoint
    def fetch(self) -> list[float]:
        return self._here.fetch().tolist()

    @endpoint
    def apply(self, payload: str, value: list[float]) -> list[float]:
        return self._here.apply(payload, value).tolist()

    @endpoint
    def step(self, payload: str) -> None:
        self._here.steps(payload, 1)

    @endpoint
    def fused(self, payload: str) -> None:
        self._here.fused(payload)

    @endpoint
    def follow(self, orders: list[str]) -> None:
        self._here.follow(orders)


class Monarch(System):
    packages = ("torchmonarch", "jax", "jaxlib", "numpy")
    modes = for_both_payloads("opbyop", "opbyop-wait", "chained", "fused", "list")

    def configure(self, hosts: int, devices: int) -> None:
        self.payloads = jax_host.payloads(hosts)
        self._processes = this_host().spawn_procs({"hosts": hosts})
        self._actors = self._processes.spawn("hosts", Host, hosts, devices, jax_host.free_address())
        self._actors.fetch.call().get()

    def prepare(self, mode: str, payload: str, count: int) -> None:
        self._actors.reset.call().get()

    def run(self, mode: str, payload: str, count: int) -> list[float]:
        actors, chains = self._actors, count // CHAIN
        match mode:
            case "opbyop-wait":
                answer = actors.fetch.call().get()
                for _ in range(count):
                    # One value for all: after an all-reduce it is the same everywhere, and so is the start.
                    value = next(part for _, part in answer.items())
                    answer = actors.apply.call(payload, value).get()
            case "opbyop":
                self._call(actors.step, count, payload)
            case "chained":
                for _ in range(chains):
                    for _ in range(CHAIN - 1):
                        actors.step.broadcast(payload)
                    actors.step.call(payload).get()
            case "fused":
                self._call(actors.fused, chains, payload)
            case "list":
                self._call(actors.follow, chains, [payload] * CHAIN)
        if mode != "opbyop-wait":
            answer = actors.fetch.call().get()
        # Of all actors, in order of rank; `items` is the quick way through an answer.
        return [value for _, part in answer.items() for value in part]

    def _call(self, method: Any, count: int, argument: Any) -> None:
        """Calls all actors, and waits for the last call."""
        futures = [method.call(argument) for _ in range(count)]
        futures[-1].get()

    def close(self) -> None:
        self._processes.stop().get()


if __name__ == "__main__":
    serve(Monarch())
