"""Costs of a step: seconds of each stage, bytes of messages, links, and bytes of stashes.

Stages may differ: the first has the embedding, the last the logits, and either may have fewer layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_ptdp.schedules.actions import Action, Entry, ScheduleError


@dataclass(frozen=True)
class Link:
    """A connection from one device to another, in one direction, for one message at a time, first come, first served.

    A message of n bytes holds the link for n / bytes_per_second and is there `latency_s` later.

    Attributes:
        latency_s: seconds
        bytes_per_second: of the payload
        name: pairs of devices whose links have the same name share one link. Left empty, each pair has its own.
    """

    latency_s: float = 0.0
    bytes_per_second: float = math.inf
    name: str = ""


@dataclass(frozen=True)
class Costs:
    """One value per stage, in the order of the stages; of the messages, one per pair of neighbouring stages.

    Attributes:
        forward: seconds of an F
        input_grad: seconds of an I
        weight_grad: seconds of a W
        backward: seconds of a B; left empty, those of I and W together
        pair: the time of an overlapped pair over that of its F and B one after the other
        stash: bytes that a forward leaves for its backward
        kept: bytes of the stash that stay between I and W; left empty, all of it
        message: bytes of the activation from stage s to s + 1, and of the gradient that comes back; empty for none
        link: joins any two devices that `links` does not name
        links: from (source device, target device)
        overlap: messages go beside the computation. Otherwise a device computes nothing while it sends.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    backward: tuple[float, ...] = ()
    pair: float = 1.0
    stash: tuple[float, ...] = ()
    kept: tuple[float, ...] = ()
    message: tuple[float, ...] = ()
    link: Link = Link()
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    overlap: bool = True

    @classmethod
    def uniform(
        cls,
        stages: int,
        forward: float = 1.0,
        input_grad: float = 1.0,
        weight_grad: float = 1.0,
        message: float = 0.0,
    ) -> Costs:
        """Equal costs for all stages; times in any unit."""
        return cls(
            (forward,) * stages, (input_grad,) * stages, (weight_grad,) * stages, message=(message,) * (stages - 1)
        )

    def filled(self, stages: int) -> Costs:
        """With nothing left empty, and every value looked at.

        Raises:
            ScheduleError: a field has another number of values than there are stages, or a negative or odd value.
        """
        backward = self.backward or tuple(i + w for i, w in zip(self.input_grad, self.weight_grad, strict=False))
        stash = self.stash or (1.0,) * stages
        full = replace(
            self, backward=backward, stash=stash, kept=self.kept or stash, message=self.message or (0.0,) * (stages - 1)
        )
        for name in ("forward", "input_grad", "weight_grad", "backward", "stash", "kept"):
            _require(name, getattr(full, name), stages)
        _require("message", full.message, stages - 1)
        _require("pair", (full.pair,), 1)
        for link in (full.link, *full.links.values()):
            if not (0 <= link.latency_s < math.inf and link.bytes_per_second > 0):
                raise ScheduleError(f"a link takes 0 s or more and carries more than 0 bytes a second, not {link}")
        return full

    def seconds(self, entries: Iterable[Entry]) -> list[float]:
        """The time of each of these steps of a device; `self` as `filled` gives it."""
        times = {"F": self.forward, "B": self.backward, "I": self.input_grad, "W": self.weight_grad}
        return [
            times[entry.kind][entry.stage]
            if isinstance(entry, Action)
            else self.pair * sum(times[kind][stage] for stage, kind, _ in entry.parts)
            for entry in entries
        ]

    def link_of(self, source: int, target: int) -> Link:
        return self.links.get((source, target), self.link)


def _require(name: str, values: Sequence[float], size: int) -> None:
    if len(values) != size:
        raise ScheduleError(f"the costs have {len(values)} values for {name!r}, but {size} are needed")
    for place, value in enumerate(values):
        if not 0 <= value < math.inf:
            raise ScheduleError(f"value {place} for {name!r} is {value}: it must be finite and not below 0")
