"""Programs whose launches end host processes: after three times they are refused.

A host that dies takes evidence with it, so a program is suspected when one of its launches was first in line on the
host's devices. A launch that succeeds clears it: what runs well now and then is not what kills. So a program that is
launched again and again while hosts are lost for other reasons stays, one that never gets through goes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pathways_ray.errors import Failure

DEATHS = 3
"""A program that was first in line this many times in a row when a host died is refused."""


@dataclass
class Quarantine:
    """Deaths since the last success, and refused programs, by digest."""

    deaths: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, Failure] = field(default_factory=dict)

    def suspect(self, digest: str, name: str, reason: str) -> None:
        """A host died while a launch of the program was first in line."""
        deaths = self.deaths.setdefault(digest, [])
        deaths.append(reason)
        if len(deaths) == DEATHS:
            text = (
                f"program {name!r} is refused: its launches ended a host {DEATHS} times in a row ({'; '.join(deaths)})"
            )
            self.refused[digest] = Failure("ProgramRefused", text)

    def clear(self, digest: str) -> None:
        """A launch of the program succeeded."""
        if self.deaths:
            self.deaths.pop(digest, None)

    def refusal(self, digest: str) -> Failure | None:
        return self.refused.get(digest) if self.refused else None
