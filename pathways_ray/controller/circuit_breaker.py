"""The circuit breaker: programs whose launches end host processes are refused after three times.

A program is a candidate when one of its launches was first in line on the devices of a host that died. How much that
says depends on how the host died:

- By a signal that a process brings on itself (a bad address, an assertion of XLA's), or because the launch kept its
  devices for longer than the limit: that was the program (`confirmed`). Three times, and it is refused.
- Otherwise it may have been anything: an operator, the kernel short of memory, a cable. Programs that run while such
  things happen must not be refused for it, so this (`ambiguous`) counts only for a program of which no launch ever
  succeeded.

Of a signal the controller hears when the host is back, from what the process wrote as it died.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pathways_ray.errors import Failure

MAX_DEATHS = 3
"""A program that is held responsible for this many deaths is refused."""

MAX_KNOWN_GOOD = 1 << 16
"""Programs known to have succeeded. One that is forgotten is suspected again until its next success."""


@dataclass
class CircuitBreaker:
    """Evidence about programs, by digest.

    `known_good` had a success; `confirmed` and `ambiguous` are the reasons of deaths of either kind. `candidates` has,
    by host, the programs (digest: name) at its last death, as long as it is open how it died.
    """

    known_good: dict[str, None] = field(default_factory=dict)
    confirmed: dict[str, list[str]] = field(default_factory=dict)
    ambiguous: dict[str, list[str]] = field(default_factory=dict)
    candidates: dict[int, dict[str, str]] = field(default_factory=dict)
    refused: dict[str, Failure] = field(default_factory=dict)

    def attribute(self, programs: Mapping[str, str], hosts: Iterable[int], failure: Failure) -> None:
        """An island's hosts died while launches of these programs (digest: name) were first in line."""
        for digest, name in programs.items():
            if failure.kind == "LaunchTimeout":
                self._count(digest, name, self.confirmed.setdefault(digest, []), failure.message)
            elif digest not in self.known_good:
                self._count(digest, name, self.ambiguous.setdefault(digest, []), failure.message)
        for host in hosts:
            self.candidates[host] = {} if failure.kind == "LaunchTimeout" else dict(programs)

    def crashed(self, host: int, signal: str) -> None:
        """A host is back and knows that its last process died of a signal of its own."""
        for digest, name in self.candidates.pop(host, {}).items():
            if digest in self.known_good:  # else this death was counted when it happened
                self._count(digest, name, self.confirmed.setdefault(digest, []), f"host {host} died of {signal}")

    def _count(self, digest: str, name: str, reasons: list[str], reason: str) -> None:
        reasons.append(reason)
        if len(reasons) == MAX_DEATHS:
            text = f"program {name!r} is refused: its launches ended a host {MAX_DEATHS} times ({'; '.join(reasons)})"
            self.refused[digest] = Failure("ProgramRefused", text)

    def clear(self, digest: str) -> None:
        """A launch of the program succeeded."""
        if digest not in self.known_good:
            self.known_good[digest] = None
            self.ambiguous.pop(digest, None)
            if len(self.known_good) > MAX_KNOWN_GOOD:
                del self.known_good[next(iter(self.known_good))]

    def refusal(self, digest: str) -> Failure | None:
        return self.refused.get(digest) if self.refused else None
