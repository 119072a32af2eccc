"""Programs whose launches end host processes: after three times they are refused.

A program is suspected when one of its launches was first in line on the devices of a host that died. How much that
says depends on how the host died:

- By a signal that a process brings on itself (a bad address, an assertion of XLA's), or because the launch kept its
  devices for longer than the limit: that was the program. Three times, and it is refused.
- Otherwise it may have been anything: an operator, the kernel short of memory, a cable. Programs that run while such
  things happen must not be refused for it, so this counts only for a program of which no launch ever succeeded.

Of a signal the controller hears when the host is back, from what the process wrote as it died.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pathways_ray.errors import Failure

DEATHS = 3
"""A program that is held responsible for this many deaths is refused."""


@dataclass
class CircuitBreaker:
    """What is known of programs, by digest.

    `proven` had a success, `guilty` and `unclear` are the reasons of deaths of either kind. `last` has, by host, who
    was suspected at its last death, as long as nobody knows how it died.
    """

    proven: set[str] = field(default_factory=set)
    guilty: dict[str, list[str]] = field(default_factory=dict)
    unclear: dict[str, list[str]] = field(default_factory=dict)
    last: dict[int, dict[str, str]] = field(default_factory=dict)
    refused: dict[str, Failure] = field(default_factory=dict)

    def suspect(self, programs: Mapping[str, str], hosts: Iterable[int], failure: Failure) -> None:
        """An island's hosts died while launches of these programs (digest: name) were first in line."""
        for digest, name in programs.items():
            if failure.kind == "LaunchTimeout":
                self._blame(digest, name, self.guilty.setdefault(digest, []), failure.message)
            elif digest not in self.proven:
                self._blame(digest, name, self.unclear.setdefault(digest, []), failure.message)
        for host in hosts:
            self.last[host] = {} if failure.kind == "LaunchTimeout" else dict(programs)

    def crashed(self, host: int, how: str) -> None:
        """A host is back and knows that its last process died of itself."""
        for digest, name in self.last.pop(host, {}).items():
            if digest in self.proven:  # else this death was counted when it happened
                self._blame(digest, name, self.guilty.setdefault(digest, []), f"host {host} died of {how}")

    def _blame(self, digest: str, name: str, reasons: list[str], reason: str) -> None:
        reasons.append(reason)
        if len(reasons) == DEATHS:
            text = f"program {name!r} is refused: its launches ended a host {DEATHS} times ({'; '.join(reasons)})"
            self.refused[digest] = Failure("ProgramRefused", text)

    def clear(self, digest: str) -> None:
        """A launch of the program succeeded."""
        if digest not in self.proven:
            self.proven.add(digest)
            self.unclear.pop(digest, None)

    def refusal(self, digest: str) -> Failure | None:
        return self.refused.get(digest) if self.refused else None
