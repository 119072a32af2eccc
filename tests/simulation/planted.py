"""Bugs planted into the pure classes, to see that the checker sees them: what nobody catches, nobody tests.

Each is a small change that somebody could make by mistake, with the number of seeds in which the checker must see it.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from pathways_ray.client import coalesce
from pathways_ray.client.coalesce import Coalescer
from pathways_ray.client.core import ClientCore
from pathways_ray.controller import buffers, refusals
from pathways_ray.controller.admission import Admission
from pathways_ray.controller.backlog import WaitingLaunch
from pathways_ray.controller.cancellation import CANCELLED, Cancellation
from pathways_ray.controller.circuit_breaker import CircuitBreaker
from pathways_ray.controller.cross_island import CrossIslandWindow
from pathways_ray.controller.distribution import Distribution
from pathways_ray.controller.donations import Donations
from pathways_ray.controller.events import ReportToManager
from pathways_ray.controller.hosts import Hosts
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.outcomes import Outcomes
from pathways_ray.controller.preparation import Preparation
from pathways_ray.controller.state import SendClient
from pathways_ray.controller.turns import Turns
from pathways_ray.controller.watch import SCHEDULER_ABSENCE_LIMIT_S, Watch
from pathways_ray.errors import Failure
from pathways_ray.executor.data.buffer_store import BufferStore
from pathways_ray.executor.run import core as host_core
from pathways_ray.executor.run import host_plan
from pathways_ray.executor.run.active_launch import ActiveLaunch
from pathways_ray.executor.run.barriers import InputBarrier
from pathways_ray.executor.run.core import HostCore
from pathways_ray.executor.run.driver import HostDriver
from pathways_ray.executor.run.forwarding import Producers
from pathways_ray.executor.run.host_plan import HostPlan
from pathways_ray.executor.run.instructions import Copy, InputsArrived
from pathways_ray.executor.run.prepared import PreparedProgram
from pathways_ray.executor.run.steps import ReceiveStep
from pathways_ray.ir import plan
from pathways_ray.ir.passes import plan_islands
from pathways_ray.liveness import Liveness
from pathways_ray.resource_manager.allocation import Inventory
from pathways_ray.resource_manager.controllers import Controllers
from pathways_ray.resource_manager.core import ManagerCore
from pathways_ray.scheduler import order, restart, withdrawals
from pathways_ray.scheduler.core import SchedulerCore
from pathways_ray.scheduler.deadlines import Deadlines, first_in_line
from pathways_ray.scheduler.events import Kill, ToController, ToHosts
from pathways_ray.scheduler.order import IslandOrder
from pathways_ray.scheduler.restart import Restart
from pathways_ray.simulation import faults, parts
from pathways_ray.simulation import host as simulation_host
from pathways_ray.simulation.devices import Devices
from pathways_ray.simulation.host import SimulatedHost
from pathways_ray.simulation.parts import SimulatedParts
from pathways_ray.simulation.transfer import Transfer
from pathways_ray.transport.messages import (
    BarrierReleased,
    Begun,
    CancelLaunch,
    Compiling,
    Completed,
    Done,
    Drop,
    Heartbeat,
    HostDown,
    IslandLaunch,
    Running,
)

Patch = pytest.MonkeyPatch
Original = Callable[..., Any]


@dataclass(frozen=True)
class Planted:
    """A bug. `faults` is what the runs get of them; some bugs need none, some show only under many. It must show in one
    of `seeds` runs; that of the seed `shown` is the first that is looked at. `settings` replaces some of those that the
    seed draws."""

    name: str
    plant: Callable[[Patch], None]
    faults: int = 5
    seeds: int = 60
    shown: int = 0
    settings: dict[str, Any] = field(default_factory=dict)


BUGS: list[Planted] = []

LOOPING: dict[str, Any] = {
    "islands": {0: [0]},
    "clients": 1,
    "fusion": True,
    "window": 128,
    "max_in_flight": 1024,
    "loops": 1.0,
    "launches": (40, 40),
}
"""One user with one loop, on one host: runs are long and many."""

CROWDED: dict[str, Any] = {
    "islands": {0: [0, 1], 1: [2]},
    "clients": 4,
    "slices": 3,
    "poison": 0.0,
    "window": 128,
    "max_in_flight": 1024,
    "launches": (40, 40),
}
"""Many programs on slices of all sizes, of which some lie on one host of an island only."""

APART: dict[str, Any] = CROWDED | {"islands": {0: [0, 1]}, "devices": 1, "slices": 4, "apart": 0.5}
"""The same with calls on both hosts that take nothing from elsewhere."""

PAIRS: dict[str, Any] = {"islands": {0: [0, 1], 1: [2, 3]}, "clients": 4}
"""Islands of two hosts."""


SINGLES: dict[str, Any] = {"islands": {0: [0], 1: [1], 2: [2]}}
"""Islands of one host, which no other one of its group misses."""


def bug(
    faults: int = 5, seeds: int = 60, shown: int = 0, **settings: Any
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Enters a function into the table, under its name in words. Hosts run functions beside their devices, programs
    route rows, launches begin early wherever they may, and carry arguments, loops look at each value, and users ask for
    values alone, only where the bug asks for it."""
    settings = {
        **dict.fromkeys(("calls", "routes", "waits", "inline", "serves"), 0.0),
        "eager": False,
        "keeps": False,
    } | settings

    def enter(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BUGS.append(Planted(plant.__name__.replace("_", " "), plant, faults, seeds, shown, settings))
        return plant

    return enter


def wrapped(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replaces `owner.name` by `change(original, self, *arguments)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def changed(*arguments: Any) -> Any:
        return change(original, *arguments)

    patch.setattr(owner, name, changed)


# --- one outcome ------------------------------------------------------------------------------------------------------


@bug()
def a_completion_is_lost(patch: Patch) -> None:
    """Of several that come together, the controller looks at all but the last."""

    def done(original: Original, self: Launches, island: int, message: Done) -> Any:
        kept = message.sequences[:-1] if message.sequences[-1] % 7 == 0 else message.sequences
        return original(self, island, Done(kept, message.device_us))

    wrapped(patch, Launches, "done", done)


@bug()
def a_launch_completes_twice(patch: Patch) -> None:
    def settle(original: Original, self: Outcomes, records: Any) -> Any:
        settled = original(self, records)
        again = [c for c in settled.commands if isinstance(c.message, Completed) and c.message.launches[0] % 5 == 0]
        return settled._replace(commands=settled.commands + again)

    wrapped(patch, Outcomes, "settle", settle)


@bug(shown=11)
def a_failed_launch_is_reported_as_complete(patch: Patch) -> None:
    def fail(original: Original, self: Outcomes, session: Any, record: Any, failure: Failure) -> Any:
        original(self, session, record, failure)
        return SendClient(session.id, Completed((record.launch,)))

    wrapped(patch, Outcomes, "_fail", fail)


@bug(faults=12, seeds=150, impatient=0.0, **PAIRS)
def the_loss_of_a_host_ends_no_launches(patch: Patch) -> None:
    def down(original: Original, self: Hosts, message: HostDown) -> Any:
        kept, self.tables.in_flight = self.tables.in_flight, {}
        settled = original(self, message)
        self.tables.in_flight = kept
        return settled

    wrapped(patch, Hosts, "down", down)


@bug(faults=12, seeds=150, impatient=0.0, **PAIRS)
def the_scheduler_keeps_the_loss_of_a_host_to_itself(patch: Patch) -> None:
    def lose_host(self: Restart, *arguments: Any, **options: Any) -> Any:
        commands = original(self, *arguments, **options)
        return [c for c in commands if not (isinstance(c, ToController) and isinstance(c.message, HostDown))]

    original = Restart.lose_host
    patch.setattr(Restart, "lose_host", lose_host)


@bug(faults=12, seeds=150, shown=42, impatient=0.0, **PAIRS)
def a_host_that_comes_back_gets_no_programs(patch: Patch) -> None:
    def up(original: Original, self: Hosts, island: int, message: Any) -> Any:
        kept, self.tables.programs = self.tables.programs, {}
        commands = original(self, island, message)
        self.tables.programs = kept
        return commands

    wrapped(patch, Hosts, "up", up)


@bug()
def room_on_a_set_of_devices_is_never_given_back(patch: Patch) -> None:
    def over(original: Original, self: IslandOrder, record: Any) -> None:
        original(self, record)
        record.program.devices.add(1.0, 1)

    wrapped(patch, IslandOrder, "_over", over)


@bug(shown=2, seeds=150, parallel=False)
def a_gang_that_was_enqueued_does_not_let_the_next_one_go(patch: Patch) -> None:
    def enqueued(original: Original, self: Launches, island: int, message: Any) -> Any:
        return [] if message.first == 1 else original(self, island, message)

    wrapped(patch, Launches, "enqueued", enqueued)


# --- one order, no circular wait --------------------------------------------------------------------------------------


@bug(faults=0, shown=16, changes=0, moves=0.0, **PAIRS)
def hosts_put_launches_into_an_order_of_their_own(patch: Patch) -> None:
    def handle_batch(original: Original, self: HostDriver, messages: list[Any], now: float) -> None:
        launches = [m for m in messages if isinstance(m, IslandLaunch)]
        if self.core.host % 2 and len({launch.session for launch in launches}) > 1:
            order = iter(sorted(launches, key=lambda launch: -launch.session))
            messages = [next(order) if isinstance(m, IslandLaunch) else m for m in messages]
        original(self, messages, now)

    wrapped(patch, HostDriver, "handle_batch", handle_batch)


@bug(faults=0, seeds=400, shown=179, cross_island_window=1024, window=2, policy="arbitrary")
def a_policy_reorders_launches_over_several_islands(patch: Patch) -> None:
    """The scheduler takes the launch that the policy wants, whether or not it is the first of the cross-island ones."""

    def start(original: Original, self: IslandOrder, queue: Any, commands: list[Any]) -> None:
        run = queue.head
        if self.queues.program_of(run).cross_island:
            self.cross_island.remove((run.sequence, run.session))
            self.cross_island.appendleft((run.sequence, run.session))
        original(self, queue, commands)

    patch.setattr(IslandOrder, "_leading", lambda self, queue: queue)
    wrapped(patch, IslandOrder, "_start", start)


@bug(faults=0, seeds=500, shown=405, moves=0.0, changes=0, **CROWDED)
def a_host_waits_only_for_results_that_are_its_own(patch: Patch) -> None:
    """Hosts of one island then stop at different launches."""

    arguments = HostPlan.arguments.func  # type: ignore[attr-defined]
    only_here = property(lambda self: tuple(given for given in arguments(self) if given[2]))
    patch.setattr(HostPlan, "arguments", only_here)


@bug(faults=0, seeds=300, shown=84, **CROWDED | {"parallel": False, "islands": {0: [0, 1]}, "slices": 4, "programs": 3})
def a_host_with_nothing_left_to_do_ends_a_launch_early(patch: Patch) -> None:
    """It does not wait for the gangs that it has no part in."""
    patch.setattr(HostPlan, "last_gang", property(lambda self: -1))


@bug(faults=0, seeds=150, shown=2)
def a_launch_does_not_wait_for_results_to_come(patch: Patch) -> None:
    patch.setattr(Producers, "announce", lambda self, active: None)


# --- whole gang or none -----------------------------------------------------------------------------------------------


@bug(seeds=150, shown=23)
def hosts_pass_input_barriers_by_themselves(patch: Patch) -> None:
    def barriers(original: Original, *arguments: Any) -> Any:
        return tuple(
            step._replace(rendezvous=False) if isinstance(step, InputBarrier) and step.bundles else step
            for step in original(*arguments)
        )

    wrapped(patch, host_plan, "with_barriers", barriers)


@bug(faults=0, seeds=150, shown=16, **APART)
def hosts_have_no_rendezvous_before_a_gang_of_several(patch: Patch) -> None:
    def barriers(original: Original, *arguments: Any) -> Any:
        steps = original(*arguments)
        return tuple(step for step in steps if not (isinstance(step, InputBarrier) and step.number % 2))

    wrapped(patch, host_plan, "with_barriers", barriers)


@bug(faults=0, seeds=150, **APART)
def hosts_have_no_rendezvous_at_the_end(patch: Patch) -> None:
    def barriers(original: Original, *arguments: Any) -> Any:
        steps = original(*arguments)
        last = steps[-1] if steps else None
        return steps[:-1] if isinstance(last, InputBarrier) and last.rendezvous else steps

    wrapped(patch, host_plan, "with_barriers", barriers)


@bug(faults=0, seeds=150, **APART)
def gangs_of_several_hosts_go_on_before_the_launch_before_has_ended_on_all(patch: Patch) -> None:
    patch.setattr(ActiveLaunch, "goes_early", property(lambda self: not self.launch.gangs))


@bug(faults=0, seeds=150, shown=16)
def the_first_host_to_arrive_opens_the_gate(patch: Patch) -> None:
    def reach_barrier(original: Original, record: Any, message: Any, hosts: Any) -> Any:
        return original(record, message, frozenset({message.host}))

    wrapped(patch, order, "reach_barrier", reach_barrier)


@bug(faults=0, seeds=150, shown=2)
def gangs_do_not_wait_for_their_inputs(patch: Patch) -> None:
    """Whatever a host waits for at a barrier has arrived at once."""
    patch.setattr(
        SimulatedHost,
        "await_inputs",
        lambda self, sequence, barrier, values: InputsArrived(sequence, barrier, None),
    )


@bug(faults=20, seeds=600, shown=55, **PAIRS)
def a_gate_forgets_what_did_not_arrive(patch: Patch) -> None:
    """One host got a failure; the others enter the collective all the same."""

    def reach_barrier(original: Original, *arguments: Any) -> Any:
        release = original(*arguments)
        return release and BarrierReleased(release.sequence, release.barrier)

    wrapped(patch, order, "reach_barrier", reach_barrier)


@bug(seeds=150, shown=6, lost_after_s=math.inf)
def survivors_of_a_group_are_left_alone(patch: Patch) -> None:
    def lose_host(self: Restart, *arguments: Any, **options: Any) -> Any:
        commands = original(self, *arguments, **options)
        self.condemned.clear()
        return [c for c in commands if not isinstance(c, Kill)]

    original = Restart.lose_host
    patch.setattr(Restart, "lose_host", lose_host)


# --- liveness ---------------------------------------------------------------------------------------------------------


@bug(faults=12, seeds=150, shown=9, **SINGLES)
def the_resource_manager_waits_for_a_controller_that_is_stopped(patch: Patch) -> None:
    patch.setattr(Controllers, "silent", lambda self, now, slowness: [])


@bug(faults=12, seeds=150, shown=1, lost_after_s=math.inf, **SINGLES)
def a_host_that_is_stopped_is_taken_for_one_that_has_ended(patch: Patch) -> None:
    """Its link breaks before its silence is over, as on a machine that is slow."""

    def init(original: Original, self: SchedulerCore, *arguments: Any) -> None:
        original(self, *arguments)
        self.liveness.limit_s = math.inf

    def lose_host(original: Original, self: Restart, *arguments: Any, **options: Any) -> Any:
        return original(self, *arguments, **{**options, "kill": False})

    wrapped(patch, SchedulerCore, "__init__", init)
    wrapped(patch, Restart, "lose_host", lose_host)


@bug(faults=20, seeds=600, shown=384, lost_after_s=math.inf, **SINGLES)
def a_new_scheduler_waits_for_a_host_that_is_stopped(patch: Patch) -> None:
    patch.setattr(ManagerCore, "_expect_hosts", lambda self, name, address, now: None)


# --- values do not depend on scheduling -------------------------------------------------------------------------------


@bug(shown=8, faults=0)
def transfers_of_different_launches_have_one_name(patch: Patch) -> None:
    patch.setattr(parts, "transfer_id", lambda launch, edge, receiver: plan.transfer_id(launch % 3, edge, receiver))


@bug(faults=0, seeds=600, shown=541)
def what_peers_still_read_is_overwritten(patch: Patch) -> None:
    patch.setattr(Transfer, "own", lambda self, array: array)


@bug(faults=0, seeds=600, shown=170)
def what_an_earlier_launch_still_needs_is_overwritten(patch: Patch) -> None:
    def handle(original: Original, self: HostCore, *event: Any) -> Any:
        return [made for made in original(self, *event) if not isinstance(made, Copy)]

    wrapped(patch, HostCore, "handle", handle)


@bug(faults=0)
def a_slot_is_dropped_before_its_last_use(patch: Patch) -> None:
    def with_drops(original: Original, steps: list[Any], kept: set[int]) -> Any:
        marked = original(steps, kept)
        first = next((k for k, step in enumerate(marked) if isinstance(step, plan.Execute)), None)
        if first is None:
            return marked
        early = msgspec.structs.replace(marked[first], drops=tuple({*marked[first].inputs}))
        return (*marked[:first], early, *marked[first + 1 :])

    wrapped(patch, plan_islands, "_with_drops", with_drops)
    patch.setattr(plan_islands, "verify_plan", lambda plan: plan)  # it would refuse the plan


@bug()
def a_free_overtakes_the_launch_that_waits_for_an_upload(patch: Patch) -> None:
    def free(original: Original, self: ClientCore, buffer: Any) -> Any:
        waiting, self.queue = self.queue, deque()
        try:
            return original(self, buffer)
        finally:
            self.queue = waiting

    wrapped(patch, ClientCore, "free", free)


@bug(faults=20, seeds=150, shown=66)
def a_launch_leaves_although_its_upload_failed(patch: Patch) -> None:
    def head(original: Original, self: ClientCore, now: float) -> Any:
        commands = original(self, now)
        return commands if commands is None else (self.queue[0].message,)

    wrapped(patch, ClientCore, "head", head)


@bug(faults=0, seeds=150, **LOOPING)
def a_run_takes_the_same_argument_again(patch: Patch) -> None:
    """What a launch gives is not fed to the next one of the run."""
    wrapped(patch, coalesce, "repeated", lambda original, graph, times, *_: original(graph, times, ()))


@bug(faults=0, seeds=150, shown=30, **LOOPING)
def a_run_swallows_values_that_somebody_keeps(patch: Patch) -> None:
    patch.setattr(coalesce, "kept_of", lambda shape, launches, gone: [])


@bug(faults=0, seeds=150, shown=4, **LOOPING)
def what_left_with_another_launch_does_not_end_with_it(patch: Patch) -> None:
    patch.setattr(Coalescer, "take_covered", lambda self, launch: ())


@bug(faults=0, seeds=150, shown=63, **LOOPING)
def a_program_stands_for_a_run_of_another_length(patch: Patch) -> None:
    def prepared(original: Original, self: Coalescer, program: int) -> None:
        if program in self._registered:
            repetition, _ = self._registered[program]
            self._registered[program] = (repetition, 4)
        original(self, program)

    wrapped(patch, Coalescer, "prepared", prepared)


@bug(faults=0)
def results_are_stored_under_the_next_number(patch: Patch) -> None:
    results = HostPlan.results.func  # type: ignore[attr-defined]

    def rotated(self: HostPlan) -> Any:
        slots = [slot for slot, _ in results(self)]
        return tuple((slots[k - 1], number) for k, (_, number) in enumerate(results(self)))

    patch.setattr(HostPlan, "results", property(rotated))


@bug(faults=0, shown=10)
def a_receiver_takes_pieces_of_the_wrong_edge(patch: Patch) -> None:
    def run(original: Original, self: ReceiveStep, slots: Any) -> None:
        if len(slots.pulled) > 1 and slots.launch.sequence % 3 == 0:
            first, second = list(slots.pulled)[:2]
            slots.pulled[first], slots.pulled[second] = slots.pulled[second], slots.pulled[first]
        original(self, slots)

    wrapped(patch, ReceiveStep, "run", run)


# --- ownership --------------------------------------------------------------------------------------------------------


@bug()
def a_session_that_ends_frees_nothing_on_hosts(patch: Patch) -> None:
    patch.setattr(BufferStore, "drop_session", lambda self, session: None)


@bug(seeds=250, shown=53)
def results_of_a_session_that_ended_are_kept(patch: Patch) -> None:
    def put(original: Original, self: BufferStore, *what: Any) -> bool:
        ended, self._ended = self._ended, {}
        asked: bool = original(self, *what)
        self._ended = ended
        return asked

    wrapped(patch, BufferStore, "put_all", put)


@bug()
def slices_are_not_released(patch: Patch) -> None:
    patch.setattr(Inventory, "release_session", lambda self, session: 0)


@bug(faults=0)
def handles_that_go_free_nothing(patch: Patch) -> None:
    patch.setattr(buffers, "free", lambda tables, session, numbers: [])


@bug(faults=0)
def one_dropped_buffer_takes_its_neighbour_along(patch: Patch) -> None:
    """A double free of a kind: the buffer with the next number goes too."""

    def drop(original: Original, self: BufferStore, session: int, buffers: tuple[int, ...]) -> None:
        original(self, session, (*buffers, buffers[-1] + 1))

    wrapped(patch, BufferStore, "drop", drop)


@bug(faults=0)
def drops_overtake_the_launches_before_them(patch: Patch) -> None:
    def from_controller(original: Original, self: IslandOrder, message: Any) -> Any:
        return [ToHosts(message)] if isinstance(message, Drop) else original(self, message)

    wrapped(patch, IslandOrder, "from_controller", from_controller)


@bug(faults=0, seeds=250)
def a_session_can_name_buffers_of_others(patch: Patch) -> None:
    def arguments_unfit(original: Original, tables: Any, session: Any, program: Any, launch: Any) -> Any:
        mine = dict(session.buffers)
        for other in tables.sessions.values():
            for number, buffer in other.buffers.items():
                session.buffers.setdefault(number, buffer)
        failure = original(tables, session, program, launch)
        if failure is not None and failure.kind != "BufferDeleted":
            failure = None
        if failure is not None:
            session.buffers = mine
        return failure

    wrapped(patch, refusals, "arguments_unfit", arguments_unfit)


# --- bounds -----------------------------------------------------------------------------------------------------------


@bug(faults=0)
def the_window_of_an_island_is_not_kept(patch: Patch) -> None:
    def init(original: Original, self: IslandOrder, *arguments: Any) -> None:
        original(self, *arguments)
        self.window = 1 << 20

    wrapped(patch, IslandOrder, "__init__", init)


@bug(faults=0)
def the_window_of_a_session_is_not_kept(patch: Patch) -> None:
    def init(original: Original, self: Admission, *arguments: Any) -> None:
        original(self, *arguments)
        self.max_in_flight = 1 << 20

    wrapped(patch, Admission, "__init__", init)


@bug(faults=0, shown=7)
def the_window_of_crossing_launches_is_not_kept(patch: Patch) -> None:
    patch.setattr(CrossIslandWindow, "_has_room", lambda self, islands: True)


# --- epochs -----------------------------------------------------------------------------------------------------------


@bug(seeds=150)
def every_epoch_has_the_same_number(patch: Patch) -> None:
    def join(original: Original, self: Inventory, hosts: Any) -> int:
        original(self, hosts)
        for host in hosts:
            host.epoch = 1
        return 1

    wrapped(patch, Inventory, "join", join)


# --- clients that flood -----------------------------------------------------------------------------------------------


@bug(shown=29)
def functions_are_not_sent_again_to_hosts_that_restarted(patch: Patch) -> None:
    patch.setattr(Distribution, "restart", lambda self, island: None)


@bug(faults=0)
def messages_of_a_turn_overtake_those_that_wait(patch: Patch) -> None:
    patch.setattr(Turns, "put", lambda self, session, messages: False)


@bug(faults=0)
def a_session_whose_program_is_planned_is_forgotten(patch: Patch) -> None:
    patch.setattr(Turns, "release", lambda self, session, hold: None)


# --- cancelled launches -----------------------------------------------------------------------------------------------


@bug(shown=27, faults=0, cancels=0.3, window=2)
def a_cancelled_launch_is_forgotten(patch: Patch) -> None:
    def cancel(*arguments: Any) -> list[Any]:
        found = withdrawals.cancel(*arguments)
        return [c for c in found if isinstance(c, ToController) and isinstance(c.message, Begun)]

    patch.setitem(withdrawals.WITHDRAWALS, CancelLaunch, cancel)


@bug(faults=0, cancels=0.3)
def a_cancelled_launch_is_not_taken_out_of_the_queue(patch: Patch) -> None:
    def cancel(original: Original, self: Cancellation, session: Any, message: Any) -> Any:
        backlog = self.admission.backlogs[session.id]
        for call in (*backlog.deferred, *backlog.waiting):
            if isinstance(call, WaitingLaunch) and call.message.launch == message.launch:
                return self.admission.outcomes.refuse(session, call.message, CANCELLED)
        return original(self, session, message)

    wrapped(patch, Cancellation, "cancel", cancel)


# --- donated arrays ---------------------------------------------------------------------------------------------------


@bug(seeds=300, shown=2, poison=0.4)
def a_failed_launch_gives_back_what_it_took(patch: Patch) -> None:
    patch.setattr(PreparedProgram, "consumed", lambda self, slots: ())


@bug(faults=0, shown=17, poison=0.4)
def a_failure_goes_unseen_when_its_result_was_donated(patch: Patch) -> None:
    def finish(original: Original, self: PreparedProgram, slots: Any) -> list[Any]:
        original(self, slots)
        return [slots.values[slot] for slot in self.plan.awaited]

    def failure(original: Original, values: list[Any]) -> Failure | None:
        return original([v for v in values if isinstance(v, Failure) or not v.deleted])

    wrapped(patch, PreparedProgram, "finish", finish)
    wrapped(patch, simulation_host, "failure_of", failure)


@bug(faults=0)
def what_was_donated_is_never_freed(patch: Patch) -> None:
    patch.setattr(Donations, "consumed", lambda self, session, numbers, over=False: [])


# --- processes that say nothing ---------------------------------------------------------------------------------------


@bug(faults=12, seeds=150, shown=68)
def a_silent_scheduler_is_left_alone(patch: Patch) -> None:
    patch.setattr(Watch, "silent_schedulers", lambda self, now, slowness: [])
    patch.setattr(Watch, "absent_schedulers", lambda self, now, slowness: [])


@bug(faults=0, starved_s=30.0)
def what_is_slow_counts_as_dead(patch: Patch) -> None:
    patch.setattr(faults, "STARVED_SLOWNESS", 1.0)


@bug(faults=12, seeds=150)
def a_silent_resource_manager_is_left_alone(patch: Patch) -> None:
    patch.setattr(Watch, "tick", lambda self, now, slowness: [ReportToManager()])


@bug(faults=12, seeds=300, shown=136)
def a_scheduler_that_does_not_join_is_left_alone(patch: Patch) -> None:
    """It was stopped when the controller died that would have missed it."""

    def silent(original: Original, self: Liveness[Any], now: float, slowness: float) -> list[Any]:
        return [] if self.limit_s == SCHEDULER_ABSENCE_LIMIT_S else original(self, now, slowness)

    wrapped(patch, Liveness, "silent", silent)


# --- nothing is for ever ----------------------------------------------------------------------------------------------


@bug(faults=12, seeds=300, shown=105, launches=(30, 30), **SINGLES)
def survivors_are_not_told_of_launches_that_have_ended(patch: Patch) -> None:
    patch.setattr(Outcomes, "_abort", lambda self, record, failure: [])
    patch.setattr(host_core, "lost_sender", lambda active, host, peers: None)


@bug(faults=12, seeds=300, shown=274, launches=(30, 30), **SINGLES)
def what_nobody_pulls_stays_offered(patch: Patch) -> None:
    patch.setattr(PreparedProgram, "take_back", lambda self, launch, failure: None)


@bug(faults=0, seeds=60, shown=1, **PAIRS)
def uploads_are_taken_on_the_word_of_their_client(patch: Patch) -> None:
    def put(original: Original, tables: Any, session: Any, message: Any) -> Any:
        commands = original(tables, session, message)
        session.arriving.pop(message.buffer, None)
        return commands

    wrapped(patch, buffers, "put", put)


@bug(faults=0, shown=4, **(PAIRS | {"devices": 1, "launches": (40, 40)}))
def uploads_that_differ_between_hosts_are_taken(patch: Patch) -> None:
    def stored(original: Original, session: Any, message: Any) -> Any:
        return original(session, msgspec.structs.replace(message, digests={}))

    wrapped(patch, buffers, "stored", stored)


@bug(faults=0, divergent=0.5, **PAIRS)
def collectives_that_a_host_may_miss_are_compiled(patch: Patch) -> None:
    patch.setattr(SimulatedParts, "refusal", lambda self: "")


@bug(faults=0, divergent=0.5, **PAIRS)
def a_program_that_one_host_refuses_is_launched_on_the_others(patch: Patch) -> None:
    def ready(original: Original, self: Launches, message: Any, *rest: Any) -> Any:
        return original(self, msgspec.structs.replace(message, failure=None), *rest)

    wrapped(patch, Launches, "ready", ready)


@bug(faults=20, seeds=300, shown=11, lost_after_s=math.inf, **SINGLES)
def a_kill_that_is_lost_is_not_repeated(patch: Patch) -> None:
    """Neither by the scheduler, nor by the resource manager for a scheduler that is new."""
    patch.setattr(restart, "KILL_PERIOD_S", math.inf)


@bug(faults=0, seeds=60, outages=1, impatient=0.0, **SINGLES)
def launches_wait_for_hosts_that_never_joined(patch: Patch) -> None:
    """The controller's predecessor knew a host whose machine has vanished since."""
    patch.setattr(Hosts, "expect", lambda self, islands: None)


# --- blame ------------------------------------------------------------------------------------------------------------

FLAWED: dict[str, Any] = {
    "flaws": 0.5,
    "clients": 3,
    "programs": 3,
    "slices": 2,
    "launches": (20, 30),
    "impatient": 0.0,
    "decisions": 0.0,
}
"""Programs that never end, or whose compiler crashes or never ends, beside good ones."""


@bug(faults=0, shown=2, **FLAWED)
def a_host_does_not_say_what_it_compiles(patch: Patch) -> None:
    def send(original: Original, self: SimulatedHost, message: Any) -> None:
        if not isinstance(message, Compiling):
            original(self, message)

    wrapped(patch, SimulatedHost, "send", send)


@bug(faults=0, shown=2, **FLAWED)
def a_compilation_has_no_limit(patch: Patch) -> None:
    def init(original: Original, self: Deadlines, *arguments: Any) -> None:
        original(self, *arguments)
        self.compile_limit_s = math.inf

    wrapped(patch, Deadlines, "__init__", init)


@bug(faults=0, shown=2, **FLAWED)
def a_launch_has_no_limit(patch: Patch) -> None:
    def init(original: Original, self: Deadlines, *arguments: Any) -> None:
        original(self, *arguments)
        self.limit_s = math.inf

    wrapped(patch, Deadlines, "__init__", init)


@bug(faults=0, shown=2, **FLAWED)
def all_launches_that_are_first_are_blamed_for_one_over_its_limit(patch: Patch) -> None:
    def causes(original: Original, self: Restart, host: int, decided: Any) -> Any:
        return original(self, host, decided) if decided is None else (first_in_line(self.order.outstanding), ())

    wrapped(patch, Restart, "_causes", causes)


@bug(faults=0, seeds=150, shown=71, **FLAWED)
def the_time_in_a_device_queue_counts(patch: Patch) -> None:
    def heartbeat(original: Original, self: Devices, slowness: float, sequence_of: Any) -> Heartbeat:
        found = original(self, slowness, sequence_of)
        longest = max((entry.ms for entry in found.running), default=0)
        behind = tuple(Running(sequence, longest + 1000) for sequence in found.queued)
        return Heartbeat(found.host, slowness, (*found.running, *behind))

    wrapped(patch, Devices, "heartbeat", heartbeat)


@bug(faults=0, seeds=400, shown=215, **FLAWED)
def all_candidates_are_blamed_for_a_crash(patch: Patch) -> None:
    """And nobody becomes a suspect, to be tried alone."""

    def died(original: Original, self: CircuitBreaker, host: int, candidates: Any, *rest: Any) -> Any:
        return [struck for one in candidates for struck in original(self, host, [one], *rest)]

    wrapped(patch, CircuitBreaker, "died", died)
    patch.setattr(CircuitBreaker, "_has_shown", lambda self, candidate: False)
    patch.setattr(CircuitBreaker, "is_suspect", lambda self, culprit: False)


@bug(shown=13, faults=0, **FLAWED)
def a_program_that_ends_hosts_is_never_refused(patch: Patch) -> None:
    patch.setattr(CircuitBreaker, "refusal", lambda self, culprit: None)


@bug(faults=0, seeds=250, shown=19, **FLAWED)
def suspects_do_not_wait_for_each_other(patch: Patch) -> None:
    patch.setattr(Preparation, "must_wait", lambda self, program: False)


@bug(faults=0, shown=4, **FLAWED)
def programs_are_compiled_again_without_a_launch(patch: Patch) -> None:
    """Whoever has not been refused yet, as soon as its host is back."""

    def up(original: Original, self: Hosts, island: int, message: Any) -> Any:
        commands = original(self, island, message)
        patch.setattr(self.preparation, "must_wait", lambda program: False)
        for program in self.tables.programs.values():
            if island in program.messages:
                program.retry_at = 0.0
                commands += self.preparation.asked(program, self.tables.now)
        return commands

    wrapped(patch, Hosts, "up", up)
