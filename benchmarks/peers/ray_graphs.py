"""Ray Compiled Graphs: the same actors, their calls compiled into loops that pass values through shared memory.

    opbyop         a graph of one method per actor, executed once per computation; up to 25 executions in flight
    opbyop-wait    the same, each execution's result fetched before the next
    chained        a graph of 128 methods per actor, one after the other
    fused          a graph of one method per actor, which is one loop of 128 computations inside XLA

The all-reduce is inside the method. Values stay in the actors; what goes through the channels is a small integer, and
the last method of a graph returns the value.

While a graph exists, every reader without work polls its channel, the client among them. So each run compiles its graph
before, and tears it down after: or it would take the cores from the system that is measured next. On a machine with
fewer cores than processes the polling also takes them from this system's own all-reduce. With a hundred links between
different actors (a reduction over channels) compiling does not end within minutes, so such graphs are left out.
"""

from typing import Any

from benchmarks.peers import jax_host
from benchmarks.peers.protocol import CHAIN, System, for_both_payloads, serve
from benchmarks.peers.ray_actors import start_hosts, start_ray

IN_FLIGHT = 25
BUFFER_BYTES = 4096  # of a channel; a value is 4 bytes for each device


class Host(jax_host.JaxHost):
    """The actor. Each method takes what the method before it returned, which orders the two."""

    def ready(self) -> None:
        """Returns when the constructor has."""

    def pass_on(self, after: Any, payload: str) -> int:
        """One computation on the value kept here; the next method need not wait for the devices."""
        self.steps(payload, 1)
        return 0

    def last(self, after: Any, payload: str) -> Any:
        """One computation on the value kept here; returns the value."""
        self.steps(payload, 1)
        return self.fetch()

    def loop(self, after: Any, payload: str) -> Any:
        """128 computations in one, on the value kept here; returns the value."""
        self.fused(payload)
        return self.fetch()


class RayGraphs(System):
    packages = ("ray", "jax", "jaxlib", "numpy")
    modes = for_both_payloads("opbyop", "opbyop-wait", "chained", "fused")

    def configure(self, hosts: int, devices: int) -> None:
        self.payloads = jax_host.payloads(hosts)
        self._ray = start_ray(hosts)
        self._actors = start_hosts(self._ray, Host, hosts, devices)
        self._graph: Any = None

    def prepare(self, mode: str, payload: str, count: int) -> None:
        from ray.dag import InputNode, MultiOutputNode

        self._ray.get([actor.reset.remote() for actor in self._actors])
        with InputNode() as begin:
            outputs = []
            for actor in self._actors:
                node = begin
                if mode == "chained":
                    for _ in range(CHAIN - 1):
                        node = actor.pass_on.bind(node, payload)
                outputs.append((actor.loop if mode == "fused" else actor.last).bind(node, payload))
            graph = MultiOutputNode(outputs)
        self._graph = graph.experimental_compile(
            _buffer_size_bytes=BUFFER_BYTES, _max_inflight_executions=IN_FLIGHT + 1
        )

    def run(self, mode: str, payload: str, count: int) -> list[float]:
        executions = count if mode.startswith("opbyop") else count // CHAIN
        in_flight = 1 if mode == "opbyop-wait" else IN_FLIGHT
        waiting: list[Any] = []
        for _ in range(executions):
            if len(waiting) == in_flight:
                self._ray.get(waiting.pop(0))
            waiting.append(self._graph.execute(0))
        for result in waiting:
            parts = self._ray.get(result)
        return [value for part in parts for value in part]

    def release(self, mode: str, payload: str) -> None:
        if self._graph is not None:
            self._graph.teardown()
            self._graph = None

    def close(self) -> None:
        self._ray.shutdown()


if __name__ == "__main__":
    serve(RayGraphs())
