"""Ray actors, one for each host, each with JAX devices of its own: as a beginner writes them, and as an expert does.

The beginner passes values:

    opbyop-wait     one method call per computation, `ray.get` after each; the value goes through the client
    opbyop          one method call per computation, its future passed to the next call; `ray.get` at the end
    chained         128 calls linked by futures, then `ray.get`

The expert keeps values in the actor and fetches the last one only:

    kept-opbyop     one method call per computation
    kept-chained    128 calls, then `ray.get` of the value
    fused           one method call per 128 computations, which are one loop inside XLA
    list            one method call with a list of 128 computations; no call is waited for

The beginner's methods return the value, as Ray methods do, so the actor waits for its devices and copies from them in
every call. The expert's return nothing, so the devices run on while the next call comes in.
"""

from typing import Any

from benchmarks.peers import jax_host
from benchmarks.peers.protocol import CHAIN, System, for_both_payloads, serve


class Host(jax_host.JaxHost):
    """The actor."""

    def ready(self) -> None:
        """Returns when the constructor has."""


def start_ray(hosts: int) -> Any:
    """Ray for this process alone: no dashboard, and little room for arrays, which do not pass through its store."""
    import ray

    ray.init(
        address="local",
        num_cpus=max(hosts, 2),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=100 << 20,
    )
    return ray


def start_hosts(ray: Any, kind: type, hosts: int, devices: int) -> list[Any]:
    """One actor for each host, all of one gang, when they are up."""
    coordinator = jax_host.free_address()
    remote = ray.remote(num_cpus=0)(kind)
    actors = [remote.remote(host, hosts, devices, coordinator) for host in range(hosts)]
    ray.get([actor.ready.remote() for actor in actors])
    return actors


class RayActors(System):
    packages = ("ray", "jax", "jaxlib", "numpy")
    modes = for_both_payloads("opbyop", "opbyop-wait", "chained", "kept-opbyop", "kept-chained", "fused", "list")

    def configure(self, hosts: int, devices: int) -> None:
        self.payloads = jax_host.payloads(hosts)
        self._ray = start_ray(hosts)
        self._actors = start_hosts(self._ray, Host, hosts, devices)

    def prepare(self, mode: str, payload: str, count: int) -> None:
        for actor in self._actors:
            actor.reset.remote()
        self._values = self._fetch()

    def _fetch(self) -> list[Any]:
        """The values of all actors, after all calls so far."""
        return self._ray.get([actor.fetch.remote() for actor in self._actors])

    def run(self, mode: str, payload: str, count: int) -> list[float]:
        values, chains, get = self._values, count // CHAIN, self._ray.get
        match mode:
            case "opbyop-wait":
                for _ in range(count):
                    values = get(self._linked(payload, values, 1))
            case "opbyop":
                values = get(self._linked(payload, values, count))
            case "chained":
                for _ in range(chains):
                    values = get(self._linked(payload, values, CHAIN))
            case "kept-opbyop":
                values = self._kept("steps", count, payload, 1)
            case "kept-chained":
                for _ in range(chains):
                    values = self._kept("steps", CHAIN, payload, 1)
            case "fused":
                values = self._kept("fused", chains, payload)
            case "list":
                values = self._kept("follow", chains, [payload] * CHAIN)
        return [value for part in values for value in part]

    def _linked(self, payload: str, values: list[Any], count: int) -> list[Any]:
        """The futures of calls of the beginner, each with the future of the one before."""
        for _ in range(count):
            values = [actor.apply.remote(payload, value) for actor, value in zip(self._actors, values, strict=True)]
        return values

    def _kept(self, method: str, count: int, *arguments: Any) -> list[Any]:
        """The values after calls of the expert, which return nothing."""
        methods = [getattr(actor, method) for actor in self._actors]
        for _ in range(count):
            for each in methods:
                each.remote(*arguments)
        return self._fetch()

    def close(self) -> None:
        self._ray.shutdown()


if __name__ == "__main__":
    serve(RayActors())
