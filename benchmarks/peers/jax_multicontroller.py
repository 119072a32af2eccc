"""Multi-controller JAX: every host process runs the same program and calls its own devices, without a coordinator.

This process only selects the program that the host processes run, and collects their values: two messages a run.

    opbyop         one call of a jitted function per computation, none waited for
    opbyop-wait    the same, each waited for before the next
    fused          one call per 128 computations: a loop inside the jitted function
"""

from typing import Any

from benchmarks.peers import jax_host
from benchmarks.peers.protocol import CHAIN, System, for_both_payloads, serve
from benchmarks.workers import Worker, answers, ask_all


class HostProcess(jax_host.JaxHost):
    """The object in a host process."""

    def restart(self, payload: str) -> None:
        self.prepare(payload)
        self.reset()
        self.wait()

    def run(self, mode: str, payload: str, count: int) -> list[float]:
        if mode == "opbyop":
            self.steps(payload, count)
        elif mode == "opbyop-wait":
            for _ in range(count):
                self.steps(payload, 1)
                self.wait()
        else:
            for _ in range(count // CHAIN):
                self.fused(payload)
        found: list[float] = self.fetch().tolist()
        return found


class MultiController(System):
    packages = ("jax", "jaxlib", "numpy")
    modes = for_both_payloads("opbyop", "opbyop-wait", "fused")
    host: type[HostProcess] = HostProcess

    def configure(self, hosts: int, devices: int) -> None:
        self.payloads = jax_host.payloads(hosts)
        coordinator = jax_host.free_address()
        self._hosts = [Worker(self.host, host, hosts, devices, coordinator) for host in range(hosts)]
        answers(self._hosts)

    def prepare(self, mode: str, payload: str, count: int) -> None:
        self._ask("restart", payload)

    def run(self, mode: str, payload: str, count: int) -> list[float]:
        return [value for part in self._ask("run", mode, payload, count) for value in part]

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of all hosts. Where one fails or has ended the others may wait for it without end, so this
        process ends too: who measures starts it again."""
        try:
            return ask_all(self._hosts, method, *arguments)
        except (OSError, RuntimeError) as error:
            raise SystemExit(str(error)) from None

    def close(self) -> None:
        for host in self._hosts:
            host.kill()


if __name__ == "__main__":
    serve(MultiController())
