"""Predictions: what a program is expected to do on each host, to be drawn beside what it did.

Who plans a program knows more of it than the runtime: `pathways-train` writes the schedule of its step, simulated, as
such a file, and `pathways trace --predicted` draws it under each launch of the program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

MAX_SPANS = 20_000
"""Spans of a prediction; a longer file is refused, since it is drawn once for each launch."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One thing that a host is expected to do, in seconds from the start of the launch."""

    name: str
    start: float
    end: float


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The expected course of each launch of a program: its seconds, and for each host its spans.

    Raises:
        ValueError: a time is negative or infinite, or there are too many spans.
    """

    program: str
    seconds: float
    hosts: dict[int, list[Span]]

    def __post_init__(self) -> None:
        spans = [span for found in self.hosts.values() for span in found]
        if len(spans) > MAX_SPANS:
            raise ValueError(f"{len(spans)} spans, of at most {MAX_SPANS}")
        for span in spans:
            if not 0 <= span.start <= span.end < math.inf:
                raise ValueError(f"span {span.name!r} from {span.start} to {span.end}")
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"{self.seconds} seconds")

    def at(self, start: float) -> Iterator[tuple[int, Span]]:
        """Hosts and spans of a launch that began at `start`."""
        for host, found in self.hosts.items():
            for span in found:
                yield host, Span(span.name, start + span.start, start + span.end)


PREDICTION: msgspec.json.Decoder[Prediction] = msgspec.json.Decoder(Prediction)
"""Raises `msgspec.MsgspecError` for what is no prediction."""
