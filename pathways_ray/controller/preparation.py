"""Preparation: which programs hosts get to compile, and when.

A program goes to its hosts as it is registered. Hosts that come back have none of it; they get it again when a launch
asks for it, so that they compile first what somebody waits for, and a program that ends its hosts is not sent to them
without end. For the same reason a program that may have ended a host (`CircuitBreaker.is_watched`) is sent only when a
launch asks, and suspects go one at a time.

A host that could not compile a program may be able to later: the next launch has it tried again.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import msgspec

from pathways_ray import limits
from pathways_ray.controller.circuit_breaker import Candidate
from pathways_ray.controller.distribution import Distribution
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.controller.state import Send, Session, Tables
from pathways_ray.errors import Failure
from pathways_ray.transport.messages import HostDown

RETRY_AFTER_S = 1.0
"""A program that could not be compiled is tried again by a launch that comes at least this much later."""

QUEUE_LIMITS = 5
"""Launches wait for their program to be compiled for as long as this many compilations may take: others are before
it."""

MAX_DROPPED = 4096
"""Programs that are remembered when their session forgets them, since hosts may still compile them."""


class Preparation:
    """Sends programs to islands.

    Args:
        compile_limit_s: seconds that a host may compile one program; its scheduler ends it then.
    """

    def __init__(
        self, tables: Tables, distribution: Distribution, compile_limit_s: float = limits.COMPILE_LIMIT_S
    ) -> None:
        self.tables = tables
        self.distribution = distribution
        self.limit_s = QUEUE_LIMITS * compile_limit_s
        self.dropped: OrderedDict[int, PlannedProgram] = OrderedDict()

    def registered(self, program: PlannedProgram) -> list[Send]:
        """A new program."""
        program.unsent = set(program.messages)
        return [] if self.tables.circuit_breaker.is_watched(program.culprit) else self._send(program)

    def unregistered(self, session: Session, number: int) -> list[Send]:
        """A session drops the program that it has under a number, if it has one."""
        program = session.programs.pop(number, None)
        if program is None:
            return []
        session.count_plans(program, -1)
        self.tables.changed.add(session.id)
        return [command for part in program.parts for command in self.forget(part)]

    def forget(self, program: PlannedProgram) -> list[Send]:
        """The session of a program has ended, or dropped it."""
        if self.tables.programs.pop(program.key, None) is None:
            return []
        self.dropped[program.key] = program
        while len(self.dropped) > MAX_DROPPED:
            self.dropped.popitem(last=False)
        return self.drop(program)

    def drop(self, program: PlannedProgram) -> list[Send]:
        """Has islands drop a program that is forgotten, unless a launch of it is in flight: hosts need it to take back
        what that one offers."""
        if program.in_flight:  # it is sent to nobody any more, and its functions are not counted: their names will do
            program.messages = {
                island: msgspec.structs.replace(message, functions=dict.fromkeys(message.functions, b""))
                for island, message in program.messages.items()
            }
            return []
        commands: list[Send] = [*self.distribution.drop(program)]
        program.messages = {}  # its functions and plans, which nobody counts any more
        vars(program).pop("plans", None)
        return commands

    def asked(self, program: PlannedProgram, since: float) -> list[Send]:
        """A launch that was called at a time asks for a program: sends it to the islands that do not have it."""
        if program.failure is not None and self.tables.now >= program.retry_at:
            program.failure, program.retry_at, program.unsent = None, math.inf, set(program.messages)
        if program.failure is not None or self.tables.circuit_breaker.refusal(program.culprit) is not None:
            return []
        if not program.is_ready:
            self._check_wait(program, since)
        if not program.unsent or program.failure is not None or self.must_wait(program):
            return []
        return self._send(program)

    def _send(self, program: PlannedProgram) -> list[Send]:
        islands, program.unsent = sorted(program.unsent), set()
        return [self.distribution.send(program, island) for island in islands]

    def _check_wait(self, program: PlannedProgram, since: float) -> None:
        """Notes that launches wait for a program, and gives it up when one that was called at a time has waited for too
        long: those that asked before it may be gone."""
        now = self.tables.now
        if self._lacks_hosts(program):
            program.wanted_since = math.inf  # nobody compiles there; that a host is away has a limit of its own
            return
        program.wanted_since = min(program.wanted_since, now)
        if now - max(program.wanted_since, since) > self.limit_s:
            missing = ", ".join(map(str, sorted(program.unready)[:8]))
            text = (
                f"program {program.name!r} was not compiled on host {missing} within {self.limit_s:.0f} s, which may "
            )
            self.failed(program, Failure("CompileError", text + "be for others that it waits for; try again later"))

    def _lacks_hosts(self, program: PlannedProgram) -> bool:
        """Whether a host is away of the islands of a program."""
        hosts = self.tables.hosts
        return any(hosts[host].island in program.islands for host in self.tables.away)

    def must_wait(self, program: PlannedProgram) -> bool:
        """Whether a program is a suspect, and one of its islands compiles or runs another suspect, or lacks a host:
        with that one all are unsent, and what was sent before would be compiled beside what is sent then."""
        tables, breaker = self.tables, self.tables.circuit_breaker
        if not breaker.is_suspect(program.culprit):
            return False
        if self._lacks_hosts(program):
            return True
        compiled = ((p, self._compiling(p)) for p in tables.programs.values() if not (p.is_ready or p.failure))
        launched = ((record.program, set(record.program.islands)) for record in tables.in_flight.values())
        return any(
            other.culprit != program.culprit
            and not islands.isdisjoint(program.islands)
            and breaker.is_suspect(other.culprit)
            for other, islands in (*compiled, *launched)
        )

    def _compiling(self, program: PlannedProgram) -> set[int]:
        """The islands whose hosts compile a program now. One that is away may be so for long, and does not."""
        hosts = self.tables.hosts
        there = (program.unready - self.tables.away) & hosts.keys()  # some islands are ended for good
        return {hosts[one].island for one in there} - program.unsent

    def host_up(self, island: int, host: int) -> None:
        """A host has joined under a new epoch, and has no program."""
        self.distribution.restart(island)
        for program in self.tables.programs.values():
            if island in program.messages:
                if host in program.hosts:
                    program.unready.add(host)
                program.unsent.add(island)
                if program.retry_at < math.inf:
                    program.failure, program.retry_at = None, math.inf

    def failed(self, program: PlannedProgram, failure: Failure) -> None:
        """A host could not compile a program. What the allowlist refuses stays refused."""
        program.failure, program.wanted_since = failure, math.inf
        program.retry_at = math.inf if failure.kind == "ProgramRefused" else self.tables.now + RETRY_AFTER_S

    def host_down(self, message: HostDown, failure: Failure) -> list[PlannedProgram]:
        """Blames those that a host died of. Returns the programs that may have ended it as it compiled them.

        Those that were over their limit are not compiled. Others are tried again when the host is back, as it may have
        died of something else; until they are refused.
        """
        tables = self.tables
        known = {s: record.program for s in message.candidates if (record := tables.in_flight.get(s)) is not None}
        launched = [known.get(s) or tables.failed.get(s) for s in message.candidates]
        compiled = [tables.programs.get(key) or self.dropped.get(key) for key in message.compiling]
        candidates = [Candidate(p.culprit, p.name, True) for p in compiled if p is not None]
        candidates += [Candidate(p.culprit, p.name, False) for p in launched if p is not None]
        blamed = tables.circuit_breaker.died(
            message.host, dict.fromkeys(candidates), failure.message, message.decided, tables.now
        )
        struck = {one.culprit for one in blamed if one.compiling}
        found = [program for program in compiled if program is not None and program.culprit in struck]
        for program in found if message.decided else ():
            own = failure  # of a launch, of which its host alone knew
            if message.kind != "LaunchTimeout":
                text = f"program {program.name!r} was not compiled: {failure.message}"
                own = Failure("CompileError", text, host=message.host)
            self.failed(program, own)
        return found
