"""Everything at once, for a page or a terminal: what the controller adds to its status for those who look closely.

Made once for all who look (`looks`), from the tables, and bounded: the oldest launches, the busiest programs, the last
events. What costs time to find of a program (its graph, what it moves between hosts) is found once, for few programs
at a time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from pathways_ray.controller.launches import Launches
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.ir.exchange import exchange
from pathways_ray.ir.plan import Execute, IslandPlan, Receive, Regroup, Reshard, Return, Send, Step
from pathways_ray.ir.types import item_bytes

MAX_LAUNCHES = 100
MAX_PROGRAMS = 100
MAX_EVENTS = 100
MAX_NODES = 64
"""Nodes of a program that its drawing has."""

MAX_INPUTS = 1024
"""Inputs of a node that are followed to where they come from. A legal program of 64 nodes may have half a million."""

MAX_NEW_PROGRAMS = 4
"""Programs that are looked at for the first time in one overview."""

MAX_EDGE_DEVICES = 4096
"""Devices of both ends of an edge beyond which its bytes are not counted: that takes milliseconds."""


class Details:
    """The graph of a program, and the bytes that a launch of it moves from host to host."""

    def __init__(self, program: PlannedProgram) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.edges: list[dict[str, Any]] = []
        self.moved: dict[tuple[int, int], int] = {}
        self.program = program
        self._made_by: dict[tuple[int, int], int] = {}
        self._sent: dict[int, list[int]] = {}
        left = {island: deque(plan.steps) for island, plan in program.plans.items()}
        walked = True
        while walked:
            walked = False
            for island, steps in left.items():
                walked |= self._walk(program.plans[island], steps)
        for plan in program.plans.values():
            self._count(plan)

    @property
    def moved_bytes(self) -> int:
        """Bytes between hosts of all launches so far."""
        return sum(self.moved.values()) * self.program.launches

    def _walk(self, plan: IslandPlan, steps: deque[Step]) -> bool:
        """Adds the nodes of an island up to what has to come from another one first; False: it was there already."""
        made_by, island, before = self._made_by, plan.island, len(steps)
        while steps:
            match steps[0]:
                case Execute(inputs=inputs, outputs=outputs) | Return(inputs=inputs, outputs=outputs):
                    number = self._node(island, *_labelled(plan, steps[0]), inputs)
                    made_by.update({(island, slot): number for slot in outputs})
                case Regroup(gang=gang, sources=sources, target=target):
                    made_by[island, target] = self._node(island, "regroup", gang, sources)
                case Reshard(sources=sources, targets=targets):
                    for source, target in zip(sources, targets, strict=True):
                        made_by[island, target] = made_by.get((island, source), -1)
                case Send(sources=sources, bundle=bundle):
                    self._sent[bundle] = [made_by.get((island, source), -1) for source in sources]
                case Receive(bundle=bundle, targets=targets):
                    if bundle not in self._sent:
                        break
                    made_by.update({(island, t): n for t, n in zip(targets, self._sent[bundle], strict=True)})
            steps.popleft()
        return len(steps) < before

    def _node(self, island: int, name: str, gang: int, inputs: Sequence[int]) -> int:
        """Draws a node, with an edge from each that its inputs come from; -1 for one beyond those that are drawn."""
        number = len(self.nodes)
        if number >= MAX_NODES:
            return -1
        self.nodes.append({"id": number, "name": name[:80], "island": island, "gang": gang})
        sources = dict.fromkeys(self._made_by.get((island, slot), -1) for slot in inputs[:MAX_INPUTS])
        self.edges += [{"from": source, "to": number} for source in sources if source >= 0]
        return number

    def _count(self, plan: IslandPlan) -> None:
        """Adds what an island's hosts receive from other hosts."""
        for step in plan.steps:
            if not isinstance(step, Receive):
                continue
            bundle = plan.bundles[step.bundle]
            source, target = plan.placed(bundle.source), plan.placed(bundle.target)
            if len(source.devices) + len(target.devices) > MAX_EDGE_DEVICES:
                continue
            for edge in bundle.edges:
                item = item_bytes(edge.type.dtype)
                for (sender, receiver), parcels in exchange(edge, source, target).parcels.items():
                    if sender != receiver:
                        found = sum(math.prod(parcel.shape) for parcel in parcels) * item
                        self.moved[sender, receiver] = self.moved.get((sender, receiver), 0) + found


class Overview:
    """The overviews of a controller's tables."""

    def __init__(self, launches: Launches) -> None:
        self.launches = launches
        self._details: dict[int, Details] = {}
        self._gone_bytes = 0  # of programs that are no more

    def made(self, mine: frozenset[int] | None = None) -> dict[str, Any]:
        """The overview as JSON has it.

        Args:
            mine: the sessions of a tenant; None shows those of all.
        """
        launches, now = self.launches, self.launches.tables.now
        programs = [p for p in launches.programs.values() if mine is None or p.session in mine]
        programs.sort(key=lambda program: program.launches, reverse=True)
        self._look_at(programs[:MAX_PROGRAMS])
        events = (e for e in reversed(launches.story.lifecycle) if mine is None or e.session in mine)
        flying = (r for r in launches.in_flight.values() if mine is None or r.session in mine)
        return {
            "now": now,
            "programs": [self._program(program) for program in programs[:MAX_PROGRAMS]],
            "launches": [
                {
                    "sequence": record.sequence,
                    "session": record.session,
                    "launch": record.launch,
                    "tenant": record.usage.tenant,
                    "program": record.program.name,
                    "state": str(record.state),
                    "islands": sorted(record.pending),
                }
                for record in islice(flying, MAX_LAUNCHES)
            ]
            + list(islice(self._waiting(mine), MAX_LAUNCHES)),
            "transfers": self._transfers(programs),
            "events": [
                {
                    "age_s": now - e.at,
                    "event": e.event,
                    "detail": e.detail if mine is None or not e.private else "",
                    "cause": e.cause if mine is None or not e.private else "",
                    "session": e.session,
                    "host": e.host,
                }
                for e in islice(events, MAX_EVENTS)
            ],
        }

    def _waiting(self, mine: frozenset[int] | None) -> Iterator[dict[str, Any]]:
        """The first launch of each session that has not been admitted."""
        for session in self.launches.sessions.values():
            backlog = self.launches.admission.backlogs[session.id]
            call = backlog.first() if mine is None or session.id in mine else None
            if call is not None:
                program = session.programs.get(call.message.program)
                yield {
                    "sequence": 0,
                    "session": session.id,
                    "launch": call.message.launch,
                    "tenant": session.tenant.name,
                    "program": program.name if program is not None else "",
                    "state": f"{call.state}, with {backlog.size - 1} calls behind it",
                    "islands": list(program.islands) if program is not None else [],
                }

    def _look_at(self, programs: Iterable[PlannedProgram]) -> None:
        """Finds the details of some programs that have none, and forgets those of programs that are no more."""
        for key, found in list(self._details.items()):
            if key not in self.launches.programs:
                del self._details[key]
                self._gone_bytes += found.moved_bytes
        new = 0
        for program in programs:
            if program.key not in self._details and program.launches and new < MAX_NEW_PROGRAMS:
                self._details[program.key] = Details(program)
                new += 1

    def moved_bytes(self) -> int:
        """Bytes that launches have moved, or will have, from host to host, as far as somebody looked at their programs
        while these were there."""
        self._look_at(self.launches.programs.values())
        return self._gone_bytes + sum(found.moved_bytes for found in self._details.values())

    def details(self) -> dict[int, Details]:
        """The details that are known so far, by program."""
        return dict(self._details)

    def _program(self, program: PlannedProgram) -> dict[str, Any]:
        details = self._details.get(program.key)
        return {
            "key": program.key,
            "name": program.name,
            "session": program.session,
            "islands": list(program.islands),
            "devices": program.devices,
            "hosts": len(program.hosts),
            "ready": len(program.hosts) - len(program.unready),
            "launches": program.launches,
            "in_flight": program.in_flight,
            "failure": program.failure.message if program.failure is not None else "",
            "nodes": details.nodes if details is not None else [],
            "edges": details.edges if details is not None else [],
        }

    def _transfers(self, programs: Iterable[PlannedProgram]) -> list[tuple[int, int, int]]:
        """Bytes from host to host that the launches of live programs have moved, or will have."""
        found: dict[tuple[int, int], int] = {}
        for program in programs:
            if (details := self._details.get(program.key)) is not None:
                for pair, moved in details.moved.items():
                    found[pair] = found.get(pair, 0) + moved * program.launches
        return [(sender, receiver, moved) for (sender, receiver), moved in sorted(found.items())]


def _labelled(plan: IslandPlan, step: Execute | Return) -> tuple[str, int]:
    """Name and gang of a computation, or of a host function."""
    name = plan.labels[step.node].name if step.node < len(plan.labels) else f"node {step.node}"
    return f"{name} (Python)" if isinstance(step, Return) else name, step.gang
