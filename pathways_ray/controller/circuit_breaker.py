"""The circuit breaker: programs that end host processes are refused after three times.

A program is a *candidate* for the death of a host that compiled it, or on whose devices one of its launches was first
in line. Who is blamed is decided so that a program that only ran beside another one never is:

- A launch or a compilation over its limit: that one, and nobody else. The scheduler says which.
- Otherwise those candidates are in *doubt* that have not shown that they can do what they did: a compilation of a
  program that was never compiled, a launch of one of which no launch ever succeeded. One in doubt gets a *strike*. Of
  several nobody knows which it was: they become *suspects*, of which an island compiles and launches one at a time
  until they succeed, so that the next death has one candidate.
- With none in doubt it may have been anything: an operator, the kernel short of memory, a cable. Only if the process
  died of a signal that it brought on itself (a bad address, an assertion of XLA's), which the controller hears when the
  host is back, and there was one candidate, it gets a strike. Several have to show again that they can run.

A strike of which it is not known that the program was the cause goes when the program has shown that it can do this.
Hosts that die within `TOGETHER_S` count as one such death: a program on several islands would be refused for one cut of
their power.
Programs are told apart by their tenant and by what they compute: another name does not help, and no tenant's deed falls
back on another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from pathways_ray.errors import Failure

MAX_DEATHS = 3
"""A program with this many strikes is refused."""

TOGETHER_S = 10.0
"""Longer than it takes to see that a host is gone. A host that is back by then and dies again counts again."""

MAX_RECORDS = 1 << 16
"""Programs of which something is known, besides those with strikes."""


class Culprit(NamedTuple):
    """A program as the circuit breaker tells it from others."""

    tenant: str
    digest: str

    @property
    def id(self) -> str:
        return hashlib.sha256("\0".join(self).encode()).hexdigest()[:12]


NOBODY = Culprit("", "")


class Candidate(NamedTuple):
    """A program that may have ended a host: as the host was `compiling` it, or running a launch of it."""

    culprit: Culprit
    name: str
    compiling: bool


@dataclass(slots=True)
class Strike:
    """A death that a program is blamed for. `sure` if nothing else can have been its cause; otherwise `hosts` may have
    died with the first one."""

    reason: str
    compiling: bool
    sure: bool
    at: float = 0.0
    hosts: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Record:
    """Evidence about a program: whether it was compiled with success, and what it is blamed for."""

    compiled: bool = False
    strikes: list[Strike] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A program that is refused since time `at`, under the name that it had then."""

    culprit: Culprit
    name: str
    failure: Failure
    at: float


@dataclass
class CircuitBreaker:
    """Evidence about programs. Launches of the `proven` ones have succeeded; `suspects` are those that may have ended a
    host, and of which no launch succeeded since. All of both have a record. `pending` has the candidates for the death
    of each host, until it is back and says, or does not say, how it died."""

    records: dict[Culprit, Record] = field(default_factory=dict)
    proven: set[Culprit] = field(default_factory=set)
    suspects: set[Culprit] = field(default_factory=set)
    refused: dict[Culprit, Refusal] = field(default_factory=dict)
    pending: dict[int, tuple[Candidate, ...]] = field(default_factory=dict)

    def died(
        self, host: int, candidates: Collection[Candidate], reason: str, decided: bool, now: float
    ) -> list[Candidate]:
        """A host died, with its candidates; `decided` if the scheduler ended it for what they did. Returns those that
        get a strike."""
        if decided:
            return [self._strike(one, reason, True, now, host) for one in candidates]
        doubtful = [one for one in candidates if not self._has_shown(one)]
        if len(doubtful) == 1:
            return [self._strike(doubtful[0], reason, False, now, host)]
        for one in doubtful:
            self._suspect(one.culprit)
        if not doubtful:
            self.pending[host] = tuple(candidates)
        return []

    def crashed(self, host: int, signal: str, now: float) -> None:
        """A host is back and knows that its last process died of a signal of its own."""
        candidates = self.pending.pop(host, ())
        if len(candidates) == 1:
            self._strike(candidates[0], f"host {host} died of {signal}", True, now, host)
            return
        for one in candidates:
            record = self._suspect(one.culprit)
            record.compiled = record.compiled and not one.compiling
            self.proven.discard(one.culprit)

    def unexplained(self, host: int) -> None:
        """A host is back, and its last process has left no note: a later crash has nothing to do with that death."""
        self.pending.pop(host, None)

    def compiled(self, culprit: Culprit) -> None:
        """All hosts of the program have compiled it."""
        record = self._record(culprit)
        if not record.compiled:
            record.compiled = True
            record.strikes = [strike for strike in record.strikes if strike.sure or not strike.compiling]

    def succeeded(self, culprit: Culprit) -> None:
        """A launch of the program succeeded."""
        if culprit not in self.proven:
            record = self._record(culprit)
            self.proven.add(culprit)
            self.suspects.discard(culprit)
            record.strikes = [strike for strike in record.strikes if strike.sure]

    def is_watched(self, culprit: Culprit) -> bool:
        """Whether the program may have ended hosts: it is compiled only when somebody wants to launch it."""
        record = self.records.get(culprit)
        return record is not None and (culprit in self.suspects or bool(record.strikes))

    def is_suspect(self, culprit: Culprit) -> bool:
        """Whether the program is one of the suspects."""
        return culprit in self.suspects

    def refusal(self, culprit: Culprit) -> Failure | None:
        refusal = self.refused.get(culprit) if self.refused else None
        return refusal.failure if refusal is not None else None

    def lift(self, refusal: str) -> bool:
        """Forgets what a refused program did; false when no refusal has this id."""
        for culprit in [one for one in self.refused if one.id == refusal]:
            del self.refused[culprit]
            self._forget(culprit)
            return True
        return False

    def _has_shown(self, candidate: Candidate) -> bool:
        if not candidate.compiling:
            return candidate.culprit in self.proven
        record = self.records.get(candidate.culprit)
        return record is not None and record.compiled

    def _record(self, culprit: Culprit) -> Record:
        record = self.records.get(culprit)
        if record is None:
            if len(self.records) >= MAX_RECORDS:
                oldest = next((one for one, known in self.records.items() if not known.strikes), None)
                self._forget(oldest if oldest is not None else next(iter(self.records)))
            record = self.records[culprit] = Record()
        return record

    def _suspect(self, culprit: Culprit) -> Record:
        record = self._record(culprit)
        self.suspects.add(culprit)
        return record

    def _forget(self, culprit: Culprit) -> None:
        self.records.pop(culprit, None)
        self.proven.discard(culprit)
        self.suspects.discard(culprit)

    def _strike(self, candidate: Candidate, reason: str, sure: bool, now: float, host: int) -> Candidate:
        culprit, name, compiling = candidate
        record = self._suspect(culprit)
        last = record.strikes[-1] if record.strikes else None
        if last is not None and not (sure or last.sure) and now - last.at < TOGETHER_S and host not in last.hosts:
            last.hosts.add(host)
            return candidate
        record.strikes.append(Strike(reason, compiling, sure, now, {host}))
        if len(record.strikes) >= MAX_DEATHS and culprit not in self.refused:
            reasons = "; ".join(strike.reason for strike in record.strikes)
            text = (
                f"program {name!r} is refused: compiling or launching it ended a host {MAX_DEATHS} times ({reasons}). "
                f"Change it, or have the operator lift refusal {culprit.id}"
            )
            self.refused[culprit] = Refusal(culprit, name, Failure("ProgramRefused", text), now)
        return candidate
