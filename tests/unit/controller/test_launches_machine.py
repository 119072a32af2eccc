"""Random histories of sessions, launches, frees, reports and losses: every launch ends once, and nothing is left over.

The islands are played by the test. An island reports on launches in any order, and on nothing while one of its hosts is
away. At the end all hosts come back, everything is compiled and reported; then all must have settled.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pathways_ray.controller.cross_island import CrossIslandWindow
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.controller.state import Send, SendClient, SendIsland
from pathways_ray.errors import Failure
from pathways_ray.ir.plan import IslandPlan
from pathways_ray.scheduler.policies import POLICIES, Policy
from pathways_ray.simulation.tables import check_launches
from pathways_ray.transport.messages import (
    BuffersLost,
    Completed,
    Done,
    Enqueued,
    Free,
    HostDown,
    HostUp,
    IslandLaunch,
    IslandLaunchFailed,
    Launch,
    LaunchFailed,
    Program,
    Put,
    Ready,
    Stored,
    ToClient,
    ToIsland,
)
from tests.unit.controller.harness import BOOM, ISLAND_OF_HOST, SLICES, program_over
from tests.unit.helpers import VECTOR
from tests.unit.strategies import repeatable

SHAPES = [(1,), (1, 2), (2, 1), (2, 2), (3, 1, 2), (2, 1, 2)]
PLANNED = [program_over(*slices) for slices in SHAPES]
MAX_IN_FLIGHT = 3
ALL_GANGS = 10**6
ANY = st.integers(0, 10**6)
"""A choice: taken modulo the number of things there are to choose from."""


@dataclass
class Client:
    """What a session has done and heard. `buffers` are all ids it ever made; some are freed."""

    programs: dict[int, PlannedProgram] = field(default_factory=dict)
    launched: int = 0
    buffers: int = 0
    outcomes: dict[int, str] = field(default_factory=dict)

    def new_buffer(self) -> int:
        self.buffers += 1
        return self.buffers


@dataclass
class Island:
    """Launches with an island: up to which gang it was told to go, and up to which it has said that it has gone."""

    limit: dict[int, int] = field(default_factory=dict)
    enqueued: dict[int, int] = field(default_factory=dict)
    plans: dict[int, dict[int, IslandPlan]] = field(default_factory=dict)
    last_sequence: int = 0

    def forget(self, sequence: int) -> None:
        for table in (self.limit, self.enqueued, self.plans):
            table.pop(sequence, None)

    def is_through(self, number: int, sequence: int) -> bool:
        """Whether the island has taken all its steps of a launch."""
        last = max((step.gang for step in self.plans[sequence][number].steps), default=0)
        return self.enqueued[sequence] > last


class LaunchesMachine(RuleBasedStateMachine):
    parallel = True

    @initialize(policy=st.sampled_from(list(POLICIES.values())), window=st.integers(1, 3))
    def start(self, policy: Policy, window: int) -> None:
        self.launches = Launches(self.parallel, MAX_IN_FLIGHT, CrossIslandWindow(policy, window))
        self.clients: dict[int, Client] = {}
        self.sessions_made = self.keys = 0
        self.islands = {island: Island() for island in set(ISLAND_OF_HOST.values())}
        self.epochs = dict.fromkeys(ISLAND_OF_HOST, 0)
        self.up: set[int] = set()
        self.compiling: list[tuple[int, int]] = []
        self.storing: list[Stored] = []
        self.programs: dict[int, PlannedProgram] = {}
        self.plans: dict[int, dict[int, IslandPlan]] = {}  # those of programs lose them with their session
        self.now = 0.0
        for host in ISLAND_OF_HOST:
            self.host_up(host)
        self.open_session()

    # --- what the controller sends ------------------------------------------------------------------------------------

    def apply(self, commands: list[Send]) -> None:
        for command in commands:
            match command:
                case SendIsland(island, message):
                    self.on_island(island, message)
                case SendClient(session, message):
                    assert session in self.clients, "a message for a session that is closed"
                    self.on_client(self.clients[session], message)

    def on_island(self, number: int, message: ToIsland) -> None:
        island = self.islands[number]
        if isinstance(message, IslandLaunch):
            limit = message.first + message.gangs if message.gangs else ALL_GANGS
            if self.parallel:
                assert message.sequence > island.last_sequence, "an island sees launches in the order of the cluster"
                assert limit == ALL_GANGS
            else:
                assert limit > island.limit.get(message.sequence, 0), "gangs come in order, each once"
            island.last_sequence = max(island.last_sequence, message.sequence)
            island.limit[message.sequence] = limit
            island.plans[message.sequence] = self.plans[message.program]
            island.enqueued.setdefault(message.sequence, ALL_GANGS if self.parallel else 0)
        elif isinstance(message, Program):
            hosts = self.programs[message.program].hosts
            self.compiling += [(message.program, h) for h in hosts & self.up if ISLAND_OF_HOST[h] == number]

    def on_client(self, client: Client, message: ToClient) -> None:
        outcomes: list[tuple[int, str]] = []
        if isinstance(message, Completed):
            outcomes = [(launch, "completed") for launch in message.launches]
        elif isinstance(message, LaunchFailed):
            outcomes = [(message.launch, message.failure.kind)]
        elif isinstance(message, BuffersLost):
            assert message.buffers
        for launch, outcome in outcomes:
            assert 0 < launch <= client.launched, "an outcome of a launch that was never made"
            assert launch not in client.outcomes, "a second outcome"
            client.outcomes[launch] = outcome

    # --- clients ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.clients) < 3)
    @rule()
    def open_session(self) -> None:
        self.sessions_made += 1
        self.clients[self.sessions_made] = Client()
        self.launches.open_session(self.sessions_made)
        for slice in SLICES:
            self.launches.add_slice(self.sessions_made, slice)
        for which in range(3):
            self.register(len(self.clients) - 1, which)

    @rule(who=ANY, which=ANY, compiled=st.sampled_from([True, True, False]))
    def register(self, who: int, which: int, compiled: bool = True) -> None:
        session, client = self.client(who)
        self.keys += 1
        like = PLANNED[which % len(PLANNED)]
        messages = {i: msgspec.structs.replace(m, program=self.keys) for i, m in like.messages.items()}
        program = dataclasses.replace(like, key=self.keys, session=session, messages=messages)
        self.programs[self.keys] = client.programs[len(client.programs) + 1] = program
        self.plans[self.keys] = dict(program.plans)
        self.apply(self.launches.register(session, len(client.programs), program))
        while compiled and self.compiling:
            self.compiled(0, refused=False)

    @rule(who=ANY, which=ANY, arguments=st.lists(ANY, min_size=1, max_size=4))
    def launch(self, who: int, which: int, arguments: list[int]) -> None:
        """Launches a program a few times, mostly with new results of launches before."""
        session, client = self.client(who)
        number = which % len(client.programs) + 1
        for choice in arguments:
            argument = self.argument(session, client.programs[number], choice)
            client.launched += 1
            message = Launch(client.launched, number, (argument,), client.new_buffer())
            self.apply(self.launches.admission.call(self.launches.sessions[session], message))

    def argument(self, session: int, program: PlannedProgram, choice: int) -> int:
        """A buffer that fits, else a new one; now and then any number, freed or not yet made."""
        client = self.clients[session]
        if choice % 8 == 7:
            return choice % (client.buffers + 2)
        (wanted,) = program.arguments
        fitting = [n for n, b in self.launches.sessions[session].buffers.items() if b.type == wanted and not b.failure]
        if not fitting:
            put = Put(client.new_buffer(), wanted.slice, VECTOR, ())
            self.apply(self.launches.admission.call(self.launches.sessions[session], put))
            placed = next(placed for placed in SLICES if placed.mesh.id == wanted.slice)
            arriving = [Stored(host, session, put.buffer, wanted.slice, VECTOR, ()) for host in placed.hosts]
            self.storing += [message for message in arriving if message.host in self.up]
            return put.buffer
        return fitting[-1 - choice % min(len(fitting), 2)]

    @precondition(lambda self: self.storing)
    @rule(which=ANY)
    def store(self, which: int) -> None:
        """An upload arrives on a host."""
        self.apply(self.launches.stored(self.storing.pop(which % len(self.storing))))

    @rule(who=ANY, which=ANY)
    def free(self, who: int, which: int) -> None:
        session, client = self.client(who)
        self.apply(
            self.launches.admission.call(self.launches.sessions[session], Free((max(client.buffers - which % 4, 1),)))
        )

    @precondition(lambda self: len(self.clients) > 1)
    @rule(who=ANY)
    def close_session(self, who: int) -> None:
        session, _ = self.client(who)
        del self.clients[session]
        self.apply(self.launches.close_session(session))

    def client(self, who: int) -> tuple[int, Client]:
        return sorted(self.clients.items())[who % len(self.clients)]

    # --- islands ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.compiling)
    @rule(which=ANY, refused=st.sampled_from([False] * 9 + [True]))
    def compiled(self, which: int, refused: bool) -> None:
        program, host = self.compiling.pop(which % len(self.compiling))
        failure = Failure("CompileError", "refused", host=host) if refused else None
        self.apply(self.launches.ready(Ready(host, program, 0, failure)))

    @precondition(lambda self: self.able())
    @rule(choices=st.lists(ANY, min_size=1, max_size=6), failed=st.booleans(), in_order=st.booleans())
    def reports(self, choices: list[int], failed: bool, in_order: bool) -> None:
        for choice in choices:
            able = self.able()
            if able:
                self.report(able[0 if in_order else choice % len(able)], failed)

    def report(self, of: tuple[int, int], failed: bool) -> None:
        number, sequence = of
        island = self.islands[number]
        if island.enqueued[sequence] < island.limit[sequence]:
            island.enqueued[sequence] = island.limit[sequence]
            self.apply(self.launches.enqueued(number, Enqueued(sequence, island.limit[sequence] - 1)))
            return
        island.forget(sequence)
        if failed:
            self.apply(self.launches.run_failed(number, IslandLaunchFailed(sequence, BOOM)))
        else:
            self.apply(self.launches.done(number, Done((sequence,))))

    def able(self) -> list[tuple[int, int]]:
        """(island, launch) pairs on which there is something to report."""
        return [
            (number, sequence)
            for number, island in sorted(self.islands.items())
            if all(host in self.up for host, home in ISLAND_OF_HOST.items() if home == number)
            for sequence in island.limit
            if island.enqueued[sequence] < island.limit[sequence] or island.is_through(number, sequence)
        ]

    @precondition(lambda self: self.up)
    @rule(which=ANY)
    def host_goes(self, which: int) -> None:
        """A host is lost, and with it all hosts of its island: they restart together."""
        lost = ISLAND_OF_HOST[sorted(self.up)[which % len(self.up)]]
        members = [host for host, island in ISLAND_OF_HOST.items() if island == lost and host in self.up]
        self.up.difference_update(members)
        self.compiling = [(program, host) for program, host in self.compiling if host in self.up]
        self.storing = [message for message in self.storing if message.host in self.up]
        for sequence in list(self.islands[lost].limit):
            self.islands[lost].forget(sequence)
        for host in members:
            self.apply(self.launches.host_down(HostDown(host, self.epochs[host], "killed")))

    @precondition(lambda self: len(self.up) < len(ISLAND_OF_HOST))
    @rule(which=ANY)
    def host_comes_back(self, which: int) -> None:
        away = sorted(ISLAND_OF_HOST.keys() - self.up)
        self.host_up(away[which % len(away)])

    def host_up(self, host: int) -> None:
        self.epochs[host] += 1
        self.up.add(host)
        message = HostUp(host, self.epochs[host], "t", "d", 2, 1)
        self.apply(self.launches.host_up(ISLAND_OF_HOST[host], message))

    @rule(seconds=st.sampled_from([1.0, 20.0, 40.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.apply(self.launches.tick(self.now))

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def tables_agree(self) -> None:
        check_launches(self.launches)
        for session, client in self.clients.items():
            state = self.launches.sessions[session]
            assert state.in_flight <= MAX_IN_FLIGHT
            assert set(state.buffers) <= set(range(1, client.buffers + 1))

    def teardown(self) -> None:
        if not hasattr(self, "launches"):
            return
        for host in ISLAND_OF_HOST.keys() - self.up:
            self.host_up(host)
        for _ in range(2):
            while self.compiling or self.storing or self.able():
                if self.compiling:
                    self.compiled(0, refused=False)
                elif self.storing:
                    self.store(0)
                else:
                    self.report(self.able()[0], failed=False)
            self.tick(40.0)  # uploads to a host that was down never come
        assert self.launches.in_flight == {}
        assert not any(island.limit for island in self.islands.values())
        for session, client in self.clients.items():
            assert set(client.outcomes) == set(range(1, client.launched + 1)), "a launch without an outcome"
            state = self.launches.sessions[session]
            assert not self.launches.backlog(session)
            self.apply(
                self.launches.admission.call(self.launches.sessions[session], Free(tuple(range(1, client.buffers + 1))))
            )
            assert state.buffers == {}


class SequentialMachine(LaunchesMachine):
    parallel = False


TestParallel = LaunchesMachine.TestCase
TestParallel.settings = repeatable(150, stateful_step_count=40)
TestSequential = SequentialMachine.TestCase
TestSequential.settings = repeatable(150, stateful_step_count=40)
