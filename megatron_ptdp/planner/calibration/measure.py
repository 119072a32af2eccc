"""Measures a cluster through the runtime, all probes round by round.

All probes are made first, then measured in turn, round by round: what disturbs the machine disturbs all of them alike,
and more rounds are better. Computation is measured with all devices of an island at work at once, as in training.
Nothing here decides; `fit` makes a cluster of the numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

import jax.numpy as jnp

import pathways_ray as pw
from megatron_ptdp.errors import ConfigError
from megatron_ptdp.planner.calibration import probes
from megatron_ptdp.planner.calibration.fit import Measured, MeasuredLevel, Reference, rate_of

PRODUCTS = {"cpu": (64, 128, 256, 512), "gpu": (1024, 2048, 4096, 8192), "tpu": (1024, 2048, 4096, 8192)}
COPIED = {"cpu": 1 << 19, "gpu": 1 << 28, "tpu": 1 << 28}
"""Bytes: on CPUs a microbatch's activations stay in the cache."""
MESSAGES = (1 << 14, 1 << 17, 1 << 20)
REDUCTIONS = (1 << 16, 1 << 20, 1 << 23)
"""Bytes."""

REFERENCES = {
    # layers, hidden, heads, sequence, examples, microbatches
    "cpu": (
        Reference(1, 64, 2, 32, 1, 1),
        Reference(1, 64, 2, 32, 1, 12),
        Reference(6, 64, 2, 64, 2, 4),
        Reference(2, 96, 4, 128, 4, 2),
        Reference(4, 192, 6, 32, 8, 2),
        Reference(2, 256, 8, 64, 4, 2),
    ),
    "gpu": (
        Reference(1, 1024, 16, 256, 1, 1),
        Reference(1, 1024, 16, 256, 1, 8),
        Reference(4, 1024, 16, 1024, 2, 4),
        Reference(2, 4096, 32, 1024, 2, 2),
        Reference(4, 2048, 32, 2048, 2, 2),
    ),
}
REFERENCES["tpu"] = REFERENCES["gpu"]


Link: TypeAlias = tuple[str, tuple[pw.VirtualSlice, pw.VirtualSlice], pw.VirtualSlice | None]
"""A level: its name, two devices that it joins, and a slice of all that it joins in an island."""


class Bench:
    """All probes of the cluster of the open session, prepared.

    Args:
        platform: "cpu", "gpu" or "tpu"
        island: whose devices compute and communicate
        pair: the two islands between which messages are measured; None where there is one
    """

    def __init__(self, platform: str, island: int = 0, pair: tuple[int, int] | None = None) -> None:
        self.platform = platform
        self.devices = probes.devices_of(island)
        self.dtype = jnp.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16)
        self.arrays = 1
        self.probes: dict[Hashable, probes.Probe] = {}
        self.links = self._links(island, pair)
        one = self.devices[0]
        self.probes["launch"] = probes.empty(one)
        self.probes["action"] = probes.action(self.devices)
        for size in PRODUCTS[platform]:
            self.probes["product", size] = probes.product(self.devices, size, self.dtype)
        self.probes["copy"] = probes.copy(self.devices, COPIED[platform])
        for name, (here, there), whole in self.links:
            for size in MESSAGES:
                self.probes["message", name, size] = probes.message(here, there, size, 0)
            self.probes["still", name] = probes.message(here, there, MESSAGES[1], 1)
            if whole is not None:
                for size in REDUCTIONS:
                    self.probes["reduction", name, size] = probes.reduction(whole, size)
        for reference in REFERENCES[platform]:
            steps = probes.Steps(reference, self.devices, self.dtype.name)
            self.probes[reference], self.arrays = probes.Quartile(steps), steps.arrays

    def _links(self, island: int, pair: tuple[int, int] | None) -> list[Link]:
        """The levels of the network, from the inside out."""
        hosts: dict[int, list[pw.VirtualSlice]] = defaultdict(list)
        for one in self.devices:
            hosts[probes.host_of(one)].append(one)
        sizes = {len(devices) for devices in hosts.values()}
        if len(sizes) > 1:
            raise ConfigError(f"the hosts of island {island} have {sorted(sizes)} devices: calibrate with equal hosts")
        found: list[Link] = []
        first = next(iter(hosts.values()))
        if len(first) > 1:
            # A slice of one host's devices; where the island has more hosts, the resource manager takes one host's.
            found.append(("host", (first[0], first[1]), pw.virtual_slice((len(first),), ("x",), island=island)))
        if len(hosts) > 1:
            heads = [devices[0] for devices in hosts.values()]
            whole = pw.virtual_slice((len(self.devices),), ("x",), island=island)
            found.append(("island", (heads[0], heads[1]), whole))
        if pair is not None:
            there = [probes.devices_of(number)[0] for number in pair]
            found.append(("dcn", (there[0], there[1]), None))
        return found

    def round(self) -> None:
        """Measures every probe once."""
        for probe in self.probes.values():
            probe()

    def seen(self) -> Measured:
        """The measurements of all rounds."""
        found = {key: probe.value for key, probe in self.probes.items()}
        hosts = len({probes.host_of(one) for one in self.devices})
        sizes = {"host": len(self.devices) // hosts, "island": len(self.devices), "dcn": 0}
        return Measured(
            name=f"{self.platform} device",
            flops={
                size: rate_of(2.0 * size**3, found["product", size], f"a product of {size} × {size}")
                for size in PRODUCTS[self.platform]
            },
            copy_rate=rate_of(2.0 * COPIED[self.platform], found["copy"], "an elementwise pass"),
            launch=found["launch"],
            action=found["action"],
            levels=[
                MeasuredLevel(
                    name,
                    sizes[name],
                    [(float(size), found["reduction", name, size]) for size in REDUCTIONS if whole is not None],
                    [(float(size), found["message", name, size]) for size in MESSAGES],
                    found["still", name],
                    self.arrays,
                )
                for name, _, whole in self.links
            ],
            steps={reference: found[reference] for reference in REFERENCES[self.platform]},
        )


def measure(
    platform: str, islands: Sequence[int], rounds: int, say: Callable[[str], None] = lambda text: None
) -> Measured:
    """Measures the cluster of the open session: its first island, and links between the first two."""
    bench = Bench(platform, islands[0], (islands[0], islands[1]) if len(islands) > 1 else None)
    for number in range(rounds):
        bench.round()
        say(f"round {number + 1} of {rounds}")
    return bench.seen()
