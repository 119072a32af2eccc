"""Looks: requests about why something waits, and for everything at once, gathered from the islands.

Nothing is gathered while nobody looks. A look asks the schedulers that can tell more (`Inspect`), at most for
`LOOK_LIMIT_S`; one that does not answer is named. All who look at everything share one gathering, which is told again
for `ALL_AGE_S`: a page in many browsers costs the controller what one costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import msgspec

from pathways_ray.controller.clients import Clients
from pathways_ray.controller.events import AnswerCall, Command
from pathways_ray.controller.examinations import CODE, COST, Examinations
from pathways_ray.controller.inspection import launch_view, oldest
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.overview import Overview
from pathways_ray.controller.state import SendIsland
from pathways_ray.errors import Failure
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.observe import scope
from pathways_ray.observe.views import ISLAND_VIEW, IslandView, LaunchView, encode
from pathways_ray.observe.why import Explanation, Link, Why, arriving_link, explain, for_text
from pathways_ray.transport import messages as wire

LOOK_LIMIT_S = 1.0
"""A look waits this long for a scheduler; that is looked at with each tick."""

STATUS_LIMIT_S = 3.0
"""A look waits this long for the resource manager, and goes on without it: those who look wait for 5 s."""

MAX_ROUNDS = 4
"""Times that a look asks the islands again, each time about launches that the answers before have named."""

MAX_LOOKS = 64
"""Looks that wait at once; more are refused."""

ALL_AGE_S = 0.9
"""A gathering of everything is told again for this long, so that a page that asks each second gets a fresh one."""

Views: TypeAlias = Mapping[int, bytes]


@dataclass
class Told:
    """The last gathering of everything that a tenant was told, when that was, and who waits for the next one. The
    status for it was `asked` for then, and has not come yet, unless that is infinite."""

    text: str = ""
    since: float = -math.inf
    asked: float = math.inf
    calls: list[int] = field(default_factory=list)


@dataclass
class Gathering:
    """Islands that were asked, and what they said so far; `then` goes on with it."""

    deadline: float
    missing: set[int]
    then: Callable[[Views], list[Command]]
    found: dict[int, bytes] = field(default_factory=dict)


class Looks:
    """The looks that wait.

    `connected` gives the islands whose schedulers are connected; `leaving` says why slices have to leave an island, see
    `Moves.leaving`.
    """

    def __init__(self, launches: Launches, clients: Clients) -> None:
        self.launches = launches
        self.clients = clients
        self.connected: Callable[[], set[int]] = set
        self.leaving: Callable[[int], str] = lambda island: ""
        self.overview = Overview(launches)
        self.examinations = Examinations(launches)
        self.gatherings: dict[int, Gathering] = {}
        self.told: dict[str, Told] = {}
        self.made = 0

    # --- gathering ----------------------------------------------------------------------------------------------------

    def gather(self, wanted: Mapping[int, set[int]], then: Callable[[Views], list[Command]]) -> list[Command]:
        """Asks islands for their views, each about some launches; `then` gets those that came in time, as JSON."""
        asked = {island: launches for island, launches in wanted.items() if island in self.connected()}
        if not asked or len(self.gatherings) >= MAX_LOOKS:
            return then({})
        self.made += 1
        self.gatherings[self.made] = Gathering(self.launches.tables.now + LOOK_LIMIT_S, set(asked), then)
        return [
            SendIsland(island, wire.Inspect(self.made, tuple(sorted(launches)))) for island, launches in asked.items()
        ]

    def inspected(self, message: wire.Inspected) -> list[Command]:
        """An island has answered."""
        gathering = self.gatherings.get(message.look)
        if gathering is None or message.island not in gathering.missing:
            return []
        gathering.missing.discard(message.island)
        gathering.found[message.island] = message.view
        if gathering.missing:
            return []
        del self.gatherings[message.look]
        return gathering.then(gathering.found)

    def tick(self, now: float) -> list[Command]:
        """Goes on without the islands that do not answer."""
        commands = self.examinations.tick(now)
        for number, gathering in list(self.gatherings.items()):
            if now >= gathering.deadline:
                del self.gatherings[number]
                commands += gathering.then(gathering.found)
        for viewer, told in self.told.items():
            if now - told.asked >= STATUS_LIMIT_S:
                commands += self._status_made(viewer, "null")
        return commands

    # --- everything ---------------------------------------------------------------------------------------------------

    def all(
        self, call: int, viewer: str, status: Callable[[Callable[[str], list[Command]]], list[Command]]
    ) -> list[Command]:
        """Answers with everything that a tenant, or the operator (""), may see: `{"status", "islands", "overview"}`.

        Args:
            status: has the status made, and gives its JSON to a continuation.
        """
        told = self.told.setdefault(viewer, Told())
        if told.text and self.launches.tables.now - told.since < ALL_AGE_S:
            return [AnswerCall(call, wire.StatusReply(told.text))]
        told.calls.append(call)
        if len(told.calls) > 1:
            return []
        told.asked = self.launches.tables.now
        return status(partial(self._status_made, viewer))

    def _status_made(self, viewer: str, text: str) -> list[Command]:
        told = self.told[viewer]
        if told.asked == math.inf:
            return []  # it came too late
        told.asked = math.inf
        return self.gather({island: set() for island in self.connected()}, partial(self._gathered, viewer, text))

    def _gathered(self, viewer: str, text: str, found: Views) -> list[Command]:
        mine: frozenset[int] | None = None
        if viewer:
            mine = frozenset(s.id for s in self.launches.sessions.values() if s.tenant.name == viewer)
            scoped = {i: scope.for_tenant(ISLAND_VIEW.decode(view), mine) for i, view in found.items()}
            found = {island: encode(view) for island, view in scoped.items()}
        # Joined as texts: what schedulers and the resource manager said is not read here.
        islands = ",".join(f'"{island}":{view.decode()}' for island, view in sorted(found.items()))
        made = msgspec.json.encode(self.overview.made(mine)).decode()
        told = self.told[viewer]
        told.text = f'{{"status":{text},"islands":{{{islands}}},"overview":{made}}}'
        told.since = self.launches.tables.now
        calls, told.calls = told.calls, []
        return [AnswerCall(call, wire.StatusReply(told.text)) for call in calls]

    # --- why ----------------------------------------------------------------------------------------------------------

    def why(self, call: int, viewer: str, request: wire.Look) -> list[Command]:
        """Answers a tenant, or the operator (""), why a launch, a slice or a session waits. A tenant learns of what is
        its own."""
        if viewer and request.of and not self._is_of(request.of, viewer):
            return self._refuse(call, f"session {request.of} is not one of tenant {viewer!r}")
        if request.subject == "launch":
            return self._why_launch(call, viewer, request)
        if request.subject == "session":
            return self._why_session(call, viewer, request.of)
        if request.subject == "slice":
            return self._why_slice(call, viewer, request)
        if request.subject == "upload":
            return self._why_upload(call, request)
        if request.subject in (COST, CODE):
            return self.examinations.ask(call, request)
        return self._refuse(call, f"there is no subject {request.subject[:20]!r}: launch, slice or session")

    def _why_launch(self, call: int, viewer: str, request: wire.Look) -> list[Command]:
        view = self._find(request.of, request.number)
        name = f"launch {request.of}.{request.number}" if request.of else f"launch {request.number}"
        if view is None or (viewer and view.tenant != viewer):
            return self._story(call, name, request, viewer)
        return self._explain(call, name, view, viewer, {}, {}, 0)

    def _explain(
        self,
        call: int,
        name: str,
        view: LaunchView,
        viewer: str,
        known: Mapping[int, IslandView],
        asked: Mapping[int, set[int]],
        rounds: int,
    ) -> list[Command]:
        made = explain(view, self._find, known, viewer)
        wanted = {
            island: launches | asked.get(island, set())
            for island, launches in made.wanted.items()
            if island not in asked or not launches <= asked[island]
        }
        if not wanted or rounds >= MAX_ROUNDS:
            return self._answer(call, Why(name, tuple(made.links), self._silent(made, known)))

        def go_on(found: Views) -> list[Command]:
            again = self._find(view.session, view.launch)
            if again is None:
                return self._answer(call, Why(name, (Link(f"{name} has ended just now"),)))
            more = {island: ISLAND_VIEW.decode(text) for island, text in found.items()}
            return self._explain(call, name, again, viewer, {**known, **more}, {**asked, **wanted}, rounds + 1)

        return self.gather(wanted, go_on)

    def _silent(self, made: Explanation, known: Mapping[int, IslandView]) -> tuple[str, ...]:
        silent = sorted(set(made.wanted) - set(known))
        return tuple(f"the scheduler of island {island} did not say in {LOOK_LIMIT_S:.0f} s" for island in silent)

    def _story(self, call: int, name: str, request: wire.Look, viewer: str) -> list[Command]:
        """The last events of a launch that is over, or never was."""
        number, now = request.number, self.launches.tables.now
        entries = [e for e in self.launches.story.steps() if e.launch == number]
        mine = not viewer or any(self._is_of(e.session, viewer) for e in entries if e.session)
        if request.of or not entries or not mine:
            text = f"{name} is over, or has not come to the controller"
            return self._answer(call, Why(name, (Link(text),)))
        lines = self.launches.story.lines(now, launch=number)
        return self._answer(call, Why(name, (Link(f"{name} is over"),), lines))

    def _why_session(self, call: int, viewer: str, session: int) -> list[Command]:
        view, name = oldest(self.launches, self.clients.turns, session), f"session {session}"
        state = self.launches.sessions.get(session)
        if state is None:
            return self._answer(call, Why(name, (Link(f"{name} is not open"),)))
        if view is None and state.suspended:
            other = self.launches.preemption.to(session)
            whose = f"session {other}" if not viewer or self._is_of(other, viewer) else "one of another tenant"
            until = f"for {whose}, until its turn comes" if other else "until its client resumes it"
            return self._answer(call, Why(name, (Link(f"{name} is suspended, {until}"),)))
        if view is None:
            moving = [self._must_move(session, placed) for placed in state.slices.values()]
            links = tuple(link for found in moving for link in found)
            return self._answer(call, Why(name, links or (Link(f"{name} waits for nothing"),)))
        return self._explain(call, f"the oldest launch of session {session}", view, viewer, {}, {}, 0)

    def _why_upload(self, call: int, request: wire.Look) -> list[Command]:
        state, number = self.launches.sessions.get(request.of), request.number
        name = f"upload {request.of}.{number}"
        arriving = state.arriving.get(number) if state is not None else None
        if state is None or not arriving:
            return self._answer(call, Why(name, (Link(f"the controller knows of no upload of array {number}"),)))
        island = state.places[state.buffers[number].type.slice].island

        def said(found: Views) -> list[Command]:
            view = ISLAND_VIEW.decode(found[island]) if island in found else None
            arriving = view.uploads if view is not None else ()
            there = [one for one in arriving if (one.upload.session, one.upload.buffer) == (request.of, number)]
            return self._answer(call, Why(name, tuple(map(arriving_link, there))))

        return self.gather({island: set()}, said)

    def _why_slice(self, call: int, viewer: str, request: wire.Look) -> list[Command]:
        state = self.launches.sessions.get(request.of)
        placed = state.slices.get(request.number) if state is not None else None
        name = f"slice {request.of}.{request.number}"
        if placed is None:
            away = " while it is suspended" if state is not None and state.suspended else ""
            return self._answer(call, Why(name, (Link(f"session {request.of} has no slice {request.number}{away}"),)))
        return self.gather({placed.island: set()}, partial(self._slice_said, call, name, placed, viewer))

    def _slice_said(self, call: int, name: str, placed: PlacedSlice, viewer: str, found: Views) -> list[Command]:
        island = placed.island
        devices = {str(device) for device in placed.devices}
        if island not in found:
            return self._answer(call, Why(name, (Link(f"the scheduler of island {island} does not answer"),)))
        view = ISLAND_VIEW.decode(found[island])
        links = [Link(f"{name} is on island {island}, devices {' '.join(sorted(devices))}", island=island)]
        links += self._must_move(0, placed)
        if view.absent:
            links.append(Link(f"island {island} starts nothing until hosts {view.absent} have joined", island=island))
        on_them = [one for one in view.dispatched if devices & set(one.devices)]
        for one in on_them:
            whose = one.tenant if not viewer or one.tenant == viewer else "another tenant"
            text = f"launch {one.sequence} of program {one.program!r}" if whose == one.tenant else "a launch"
            links.append(Link(f"{text} ({whose}) is on them{for_text(one.age_s)}", one.sequence * (not viewer)))
        waiting = [queue for queue in view.queues if devices & set(queue.devices)]
        if waiting:
            text = f"{sum(q.launches for q in waiting)} launches of {len(waiting)} sessions wait for them"
            links.append(Link(text, island=island))
        elif not on_them and not view.absent:
            links.append(Link("nothing waits for it and nothing runs on it", island=island))
        return self._answer(call, Why(name, tuple(links)))

    def _must_move(self, session: int, placed: PlacedSlice) -> list[Link]:
        """The reason for which a slice has to leave its island, if it has. The session is named unless it is 0."""
        if not (reason := self.leaving(placed.island)):
            return []
        name = f"slice {session}.{placed.mesh.id}" if session else "it"
        text = f"{name} has to leave island {placed.island}, which {reason}: its client moves it when it finds room"
        return [Link(text, island=placed.island)]

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _find(self, session: int, number: int) -> LaunchView | None:
        return launch_view(self.launches, self.clients.turns, session, number)

    def _is_of(self, session: int, tenant: str) -> bool:
        state = self.launches.sessions.get(session)
        return state is not None and state.tenant.name == tenant

    def _answer(self, call: int, answer: Why) -> list[Command]:
        return [AnswerCall(call, wire.StatusReply(encode(answer).decode()))]

    def _refuse(self, call: int, text: str) -> list[Command]:
        return [AnswerCall(call, wire.Refused(Failure("UsageError", text)))]
