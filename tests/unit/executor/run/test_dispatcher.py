"""The threads of a host, without the rest of a runtime: messages in, computations on real devices, reports out."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import cloudpickle
import jax
import msgspec
import numpy as np
import pytest
from jax import export

from pathways_ray.controller.programs import plan_program
from pathways_ray.errors import Failure, ProgramRefused
from pathways_ray.executor.actor import HostExecutor
from pathways_ray.executor.compile import compiler as compiler_module
from pathways_ray.executor.compile.compiler import Compiler
from pathways_ray.executor.data.buffer_store import BufferStore
from pathways_ray.executor.data.device_transfer import DeviceTransfer
from pathways_ray.executor.profiling.profiler import LaunchTrace
from pathways_ray.executor.run import dispatcher as dispatcher_module
from pathways_ray.executor.run.dispatcher import NOTED_AFTER_S, Dispatcher
from pathways_ray.executor.run.instructions import Called, Handed, InputsArrived
from pathways_ray.executor.run.parts import Keeps
from pathways_ray.executor.run.prepared import BRIEF_S, LONG_WAIT_S
from pathways_ray.executor.run.watchers import Watched, Watcher
from pathways_ray.ir.plan import Device
from pathways_ray.ir.types import ArrayType
from pathways_ray.limits import MAX_DEVICE_COMPUTATIONS
from pathways_ray.transport.capabilities import tenant_mark
from pathways_ray.transport.messages import (
    AllowEarly,
    Compiling,
    Decided,
    Done,
    Drop,
    DropProgram,
    DropSession,
    Heartbeat,
    IslandLaunch,
    IslandLaunchFailed,
    LaunchEarly,
    Message,
    Peer,
    Peers,
    Program,
    Ready,
    ServeCall,
    ServedCalls,
    ToHost,
)
from pathways_ray.transport.messages import Served as ServedOnes
from tests.unit.helpers import SCALAR, Sketch
from tests.waiting import until

LIMIT_S = 60.0


class Served:
    """A dispatcher with its scheduler. All hosts of these tests are on one device."""

    def __init__(self, host: int = 0, members: tuple[int, ...] = ()) -> None:
        self.sent: queue.SimpleQueue[Message] = queue.SimpleQueue()
        devices = jax.local_devices()[:1]
        self.store = BufferStore()
        self.transfer = DeviceTransfer(host, devices[0].client, "127.0.0.1", "the link secret")
        compiler = Compiler(host, devices, {host: devices})
        self.dispatcher = Dispatcher(host, compiler, self.store, self.transfer, self.sent.put, members or (host,))
        self.dispatcher.start()
        self.store.put(1, 1, jax.device_put(np.uint64(1), devices[0]))

    def receive(self, *messages: ToHost) -> None:
        self.dispatcher.take(list(messages))

    def next(self) -> Any:
        """The next message, but for those that say that a program is being compiled."""
        while isinstance(message := self.sent.get(timeout=LIMIT_S), Compiling):
            pass
        return message

    def ended(self, count: int) -> list[int]:
        """The next launches that are done."""
        found: list[int] = []
        while len(found) < count:
            message = self.next()
            assert isinstance(message, Done)
            found += message.sequences
        return found


def exported(function: Any) -> bytes:
    """A function of a scalar."""
    return bytes(export.export(jax.jit(function))(jax.ShapeDtypeStruct((), np.uint64)).serialize())


def exported_sum() -> bytes:
    """The sum of two scalars, as a function."""
    kind = jax.ShapeDtypeStruct((), np.uint64)
    return bytes(export.export(jax.jit(lambda x, y: (x + y,)))(kind, kind).serialize())


def program(number: int, function: Any, digest: str = "f", donated: tuple[int, ...] = ()) -> Program:
    """A call of a function on device 0.0."""
    sketch = Sketch()
    here = sketch.slice("0.0")
    result = sketch.call(digest, sketch.argument(here, type=SCALAR), slice=here, outputs=(SCALAR,), donated=donated)
    plan = sketch.planned(result).plans[0]
    return Program(number, msgspec.msgpack.encode(plan), {digest: exported(function)})


def program_of(plan: SimpleNamespace) -> Any:
    """A prepared program, as far as those who watch its launches know it."""
    return SimpleNamespace(plan=plan, computations=1, watcher=None, took=lambda seconds: None)


def programs_of_two_islands(number: int) -> list[Program]:
    """`f(f(x))` for islands of one host each: the first call on host 0, the second on host 1."""
    sketch = Sketch()
    first, second = sketch.slice("0.0", island=0), sketch.slice("1.0", island=1)
    between = sketch.call("f", sketch.argument(first, type=SCALAR), slice=first, outputs=(SCALAR,))
    plans = sketch.planned(sketch.call("f", between, slice=second, outputs=(SCALAR,))).plans
    functions = {"f": exported(lambda x: (x + 1,))}
    return [Program(number, msgspec.msgpack.encode(plans[island]), functions) for island in (0, 1)]


@pytest.fixture(scope="module", autouse=True)
def wide_types() -> Iterator[None]:
    """Hosts have 64-bit types."""
    before = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture(scope="module")
def host(wide_types: None) -> Served:
    made = Served()
    made.receive(Peers(()), program(1, lambda x: (x + 1,)))
    ready = made.next()
    assert isinstance(ready, Ready)
    assert ready.failure is None
    return made


def test_a_chain_of_launches_gives_its_values_and_one_report_each(host: Served) -> None:
    host.receive(*[IslandLaunch(k, 1, 1, (1 if k == 10 else k - 1,), k) for k in range(10, 20)])
    assert host.ended(10) == list(range(10, 20))
    assert np.asarray(host.store.get(1, 19)) == 11
    host.receive(Drop(1, tuple(range(10, 20))), IslandLaunch(20, 1, 1, (1,), 20))
    assert host.ended(1) == [20]
    assert host.store.get(1, 19) is None


def test_launches_that_end_within_the_call_are_reported_by_the_length_of_their_queue(
    host: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their scheduler sends them long before their turn comes: it can wait for the report of some of them as well."""
    kept: list[float] = []
    done = host.dispatcher.reports.done

    def noted(sequence: int, us: int, behind: int, under_way_s: float = 0.0, later: bool = False) -> None:
        kept.append(under_way_s)
        done(sequence, us, behind, under_way_s, later)

    monkeypatch.setattr(host.dispatcher.reports, "done", noted)
    with host.dispatcher.inbox.turn:  # another thread is at work
        host.receive(*(IslandLaunch(k, 1, 1, (1,), k) for k in (304, 305, 306)))
        time.sleep(0.3)
    assert host.ended(3) == [304, 305, 306]
    host.receive(Drop(1, (304, 305, 306)))
    assert all(0.3 <= one < LIMIT_S for one in kept), kept


def test_launches_are_reported_behind_the_last_batch_though_that_reports_nothing(
    host: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing comes behind it with which they could be reported, and they may be kept for long."""
    monkeypatch.setattr("pathways_ray.executor.run.reports.MOST_GATHERED_S", 10 * LIMIT_S)
    monkeypatch.setattr("pathways_ray.executor.run.reports.UNDER_WAY_PART", 1000 * LIMIT_S)
    with host.dispatcher.inbox.turn:  # another thread is at work
        host.receive(*(IslandLaunch(k, 1, 1, (1,), k) for k in (307, 308, 309)))
        host.receive(Drop(1, (307,)), Drop(1, (308, 309)))
    assert host.ended(3) == [307, 308, 309]


def test_an_argument_comes_with_its_launch(host: Served) -> None:
    host.receive(IslandLaunch(300, 1, 1, (0,), 300, inline=((0, np.uint64(41).tobytes()),)))
    assert host.ended(1) == [300]
    assert np.asarray(host.store.get(1, 300)) == 42


def test_a_call_that_is_handed_over_runs_in_the_thread_that_reads_it(host: Served) -> None:
    """
    1. The dispatcher has nothing to do: the call is over when it is handed over.
    2. The dispatcher is at work: the call waits for its turn.
    3. Both are reported as they are sent.
    """
    host.receive(AllowEarly(tenant_mark("")), IslandLaunch(310, 1, 1, (1,), 310))
    host.ended(1)
    calls = [Handed(1, tenant_mark(""), LaunchEarly(1, (1,), number)) for number in (311, 312)]
    deadline = time.monotonic() + LIMIT_S
    while host.dispatcher.inbox.at_work:
        assert time.monotonic() < deadline
    assert host.dispatcher.hand(calls[0])
    assert host.store.get(1, 311) is not None
    with host.dispatcher.inbox.turn:
        host.receive(Drop(1, ()))
        while not host.dispatcher.inbox.at_work:
            assert time.monotonic() < deadline
        assert host.dispatcher.hand(calls[1])
        assert host.store.get(1, 312) is None
    host.receive(IslandLaunch(311, 1, 1, (1,), 311), IslandLaunch(312, 1, 1, (1,), 312))
    assert host.ended(2) == [311, 312]
    assert np.asarray(host.store.get(1, 312)) == 2
    host.receive(AllowEarly(""))


def test_the_thread_that_reads_calls_is_not_kept_for_long(host: Served) -> None:
    """
    1. How long a program takes is not known, varies, or was long: the dispatcher has it.
    2. It is usually brief, or never keeps a thread that calls: the thread that reads has it.
    """
    number, made = itertools.count(330), host.dispatcher.driver.programs[1]
    host.receive(AllowEarly(tenant_mark("")), IslandLaunch(329, 1, 1, (1,), 329))
    host.ended(1)
    runs, here = queue.SimpleQueue[str](), threading.current_thread().name
    run, made.run = made.run, lambda *given: (runs.put(threading.current_thread().name), run(*given))  # type: ignore[method-assign,assignment]

    def runs_in() -> str:
        deadline = time.monotonic() + LIMIT_S
        while host.dispatcher.inbox.at_work or not host.dispatcher.inbox.empty():
            assert time.monotonic() < deadline
        k = next(number)
        assert host.dispatcher.hand(Handed(1, tenant_mark(""), LaunchEarly(1, (1,), k)))
        thread = runs.get(timeout=LIMIT_S)
        host.receive(IslandLaunch(k, 1, 1, (1,), k))
        assert host.ended(1) == [k]
        return thread

    found = list[tuple[str, ...]]()
    for keeps, usual in [
        (Keeps.BRIEFLY, 0.0),
        (Keeps.ALIKE, 0.0),
        (Keeps.ALIKE, BRIEF_S / 2),
        (Keeps.ALIKE, BRIEF_S * 2),
        (Keeps.VARYING, BRIEF_S / 2),
    ]:
        made.keeps, made._usual = keeps, usual
        found.append((keeps.name, runs_in()))
    made.keeps, made.computations = Keeps.BRIEFLY, MAX_DEVICE_COMPUTATIONS + 1
    found.append(("more than a device takes without a wait", runs_in()))
    made.computations, made.run = 1, run  # type: ignore[method-assign]
    assert [thread for _, thread in found] == [here, "dispatch", here, "dispatch", "dispatch", "dispatch"]
    host.receive(AllowEarly(""))


def test_launches_that_wait_for_a_core_say_nothing_of_what_is_usual(host: Served) -> None:
    """1. The first launches are long; then seven of ten wait for a core, and the others are brief. 2. All are long."""
    made = host.dispatcher.driver.programs[1]
    made.keeps, made._usual = Keeps.ALIKE, 0.0
    brief = list[bool]()
    for took in [5 * BRIEF_S] * 5 + ([LONG_WAIT_S] * 7 + [BRIEF_S / 3] * 3) * 20 + [2 * BRIEF_S] * 20:
        made.took(took)
        brief.append(made.is_brief)
    made.keeps = Keeps.BRIEFLY
    assert brief[:5] == [False] * 5
    assert brief[105:206] == [True] * 101
    assert brief[-1] is False


def test_what_was_long_is_not_brief_however_often_its_like_was_counted_as_brief(host: Served) -> None:
    """Of two launches on a device that run beside each other, the second counts from the end of the first."""
    made = host.dispatcher.driver.programs[1]
    made.keeps, made._usual = Keeps.ALIKE, 0.0
    brief = set[bool]()
    for took in [10.0, 0.0001] * 100:
        made.took(took)
        brief.add(made.is_brief)
    made.keeps = Keeps.BRIEFLY
    assert brief == {False}


def test_a_call_is_answered_with_its_values_and_is_no_launch(host: Served) -> None:
    """
    1. Calls come faster than they are computed, and one whose argument is not there. Each is answered or left.
    2. What they took is said, and nothing else: they are not reported, nor among the launches that ran.
    """
    dispatcher, answers = host.dispatcher, queue.SimpleQueue[tuple[int, Any]]()
    dispatcher.answer_call = lambda call, _, values: answers.put((call.number, int(values[0])))
    dispatcher.leave_call = lambda call: answers.put((call.number, None))
    host.receive(AllowEarly(tenant_mark("")), IslandLaunch(320, 1, 1, (1,), 320))
    host.ended(1)
    calls = [ServeCall(1, (1,), (7,), ((0,),))] * 19 + [ServeCall(1, (99,), (7,), ((0,),))]
    for number, message in enumerate(calls):
        assert dispatcher.hand(Called(1, tenant_mark(""), message, number))
    found = dict(answers.get(timeout=LIMIT_S) for _ in calls)
    assert found == dict.fromkeys(range(19), 2) | {19: None}
    told, deadline = list[ServedOnes](), time.monotonic() + LIMIT_S
    while sum(one.calls for one in told) < 19:
        assert time.monotonic() < deadline
        dispatcher.reports.say_served(0)
        while not host.sent.empty():
            message = host.next()
            assert isinstance(message, ServedCalls), "nothing else is said"
            told += message.served
    assert all((one.session, one.program) == (1, 1) and one.device_us >= 0 for one in told)
    assert dispatcher.ran.records()[-1][0] == 320
    host.receive(AllowEarly(""))


def test_a_launch_whose_value_is_asked_for_is_reported_behind_its_answer(host: Served) -> None:
    """1. Somebody asks for the result of the first launch, and nobody for that of the second.
    2. Both are reported, in order, and the first also where no other follows."""
    answered = list[int]()
    for numbers in ((30, 31), (32,)):
        host.store.when_present(1, numbers[0], lambda _: answered.append(host.sent.qsize()))
        for number in numbers:
            host.receive(IslandLaunch(number, 1, 1, (1,), number))
        assert host.ended(len(numbers)) == list(numbers)
    assert answered == [0, 0]
    host.receive(Drop(1, (30, 31, 32)))


def test_who_asks_for_a_value_that_is_not_computed_is_answered_by_who_waits_for_it(host: Served) -> None:
    """What was put off is done once the launch is over, or has failed; all of it, also where some of it raises."""
    slow = (lambda x: ((jax.numpy.ones((900, 900)) @ jax.numpy.full((900, 900), x, float)).sum().astype(x.dtype),),)
    host.receive(program(20, *slow, "slow"))
    assert isinstance(host.next(), Ready)
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def ask(buffer: int) -> None:
        def computed() -> None:
            value: Any = host.store.get(1, buffer)
            answers.put(isinstance(value, Failure) or value.is_ready())
            raise RuntimeError("the stream has ended")

        def present(later: list[Callable[[], None]] | None) -> None:
            assert later is not None
            later.extend((computed, computed))

        host.store.when_present(1, buffer, present)

    for number, argument, report in ((21, 1, Done), (22, 999, IslandLaunchFailed)):
        ask(number)
        host.receive(IslandLaunch(number, 1, 20, (argument,), number))
        assert isinstance(host.next(), report)
        assert [answers.get(timeout=LIMIT_S) for _ in range(2)] == [True, True]
    host.receive(Drop(1, (21, 22)), DropProgram(1, 20))


class Gate:
    """A value that is ready once it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.is_ready = self.opened.is_set

    def block_until_ready(self) -> None:
        assert self.opened.wait(LIMIT_S)


@pytest.mark.parametrize(
    ("members", "watchers", "before", "answered"),
    [
        ((0, 1), 64, (), False),
        ((0,), 1, (Device(0, 7),), False),
        ((0,), 64, (Device(0, 7),), True),
        ((0,), 64, (Device(0, 0),), True),
    ],
    ids=["of several hosts", "shared thread", "own thread", "same device"],
)
def test_who_asks_for_a_value_waits_for_no_launch_on_other_devices(
    members: tuple[int, ...],
    watchers: int,
    before: tuple[Device, ...],
    answered: bool,
    monkeypatch: pytest.MonkeyPatch,
    wide_types: None,
) -> None:
    """
    1. Nothing is under way: the thread that waits for a launch answers, on every island.
    2. It waits for another launch: it answers only where that is on the same devices.
    """
    monkeypatch.setattr(dispatcher_module, "MAX_WATCHERS", watchers)
    host, gate = Served(members=members), Gate()
    host.receive(Peers(()), program(1, lambda x: (x + 1,)))
    assert isinstance(host.next(), Ready)
    given: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def is_answered(number: int) -> bool:
        host.store.when_present(1, number, given.put)
        host.receive(IslandLaunch(number, 1, 1, (1,), number))
        return given.get(timeout=LIMIT_S) is not None

    assert is_answered(8)
    plan = SimpleNamespace(watched_with=before, own_devices=before, decides=())
    host.dispatcher.watch(9, [gate], program_of(plan), ())
    assert is_answered(10) == answered
    gate.opened.set()
    assert sorted(host.ended(3)) == [8, 9, 10]


def test_a_result_of_one_of_several_gangs_waits_for_no_other(host: Served) -> None:
    sketch = Sketch()
    here = sketch.slice("0.0")
    first = sketch.call("f", sketch.argument(here, type=SCALAR), slice=here, outputs=(SCALAR,))
    second = sketch.call("f", first, slice=here, outputs=(SCALAR,))
    plan = sketch.planned(first, second).plans[0]
    host.receive(Program(25, msgspec.msgpack.encode(plan), {"f": exported(lambda x: (x + 1,))}))
    assert isinstance(host.next(), Ready)
    given = list[object]()
    host.store.when_present(1, 26, given.append)
    host.receive(IslandLaunch(26, 1, 25, (1,), 26))
    host.ended(1)
    assert given == [None]
    host.receive(Drop(1, (26, 27)), DropProgram(1, 25))


def test_a_value_that_decides_is_said_before_the_launch_is_done(host: Served) -> None:
    sketch = Sketch()
    here = sketch.slice("0.0")
    x = sketch.argument(here, type=SCALAR)
    made = sketch.call("f", x, slice=here, outputs=(SCALAR,))
    for number, results in ((40, (made,)), (41, (x,))):  # one that computes it, and one that hands it on
        graph = msgspec.structs.replace(sketch.graph(*results), decides=(0,))
        plan = plan_program(number, 1, graph, {"f": b""}, sketch.placement, False).plans[0]
        host.receive(Program(number, msgspec.msgpack.encode(plan), {"f": exported(lambda x: (x + 1,))}))
        assert isinstance(host.next(), Ready)
    host.receive(IslandLaunch(40, 1, 40, (1,), -1), IslandLaunch(41, 1, 41, (-1,), -2))
    said = [host.next() for _ in range(2)]
    while not isinstance(said[-1], Decided):
        said.append(host.next())
    assert [m for m in said if isinstance(m, Decided)] == [Decided(40, (2,)), Decided(41, (2,))]
    host.ended(2 - sum(len(m.sequences) for m in said if isinstance(m, Done)))
    assert host.store.get(1, -2) is host.store.get(1, -1)  # what lies between parts needs no copy
    host.receive(IslandLaunch(42, 1, 41, (1,), 43))
    assert host.next() == Decided(42, (1,))
    assert host.ended(1) == [42]
    assert host.store.get(1, 43) is not host.store.get(1, 1)
    host.receive(DropProgram(1, 40), DropProgram(1, 41))


def test_an_array_whose_memory_a_launch_has_taken_is_of_no_kind(host: Served) -> None:
    """An early launch must not meet it: a copy of it raises in the thread that serves all tenants."""
    array = jax.numpy.arange(3)
    assert host.dispatcher.kind_of(array) == host.dispatcher.kind_of(array + 1)
    array.delete()
    assert host.dispatcher.kind_of(array) is None


def test_a_lost_argument_fails_the_launch(host: Served) -> None:
    host.receive(IslandLaunch(30, 1, 1, (999,), 30))
    failed = host.next()
    assert isinstance(failed, IslandLaunchFailed)
    assert (failed.sequence, failed.failure.kind) == (30, "BufferLost")


def test_a_launch_that_failed_says_so_though_a_later_one_has_taken_the_memory_of_its_result() -> None:
    """
    1. A launch takes a while. One behind it will ask for a terabyte, and a third one takes the memory of its result.
    2. The second launch has failed, as the third one has that comes of it; a fourth one has not.
    """
    host = Served()

    def slow(x: Any) -> Any:
        return (jax.lax.fori_loop(0, 10**7, lambda _, y: y * 3 + 1, x),)

    def big(x: Any) -> Any:
        return (jax.numpy.sort(jax.numpy.arange(1 << 40, dtype=np.uint64) * x)[0],)

    functions = [(slow, ()), (big, ()), (lambda x: (x + 1,), (0,))]
    for number, (function, donated) in enumerate(functions, 1):
        host.receive(program(number, function, f"f{number}", donated))
        ready = host.next()
        assert isinstance(ready, Ready)
        assert ready.failure is None
    launches = [IslandLaunch(1, 1, 1, (1,), 2), IslandLaunch(2, 1, 2, (2,), 3), IslandLaunch(3, 1, 3, (3,), 4)]
    host.receive(*launches, IslandLaunch(4, 1, 1, (1,), 5))
    assert host.ended(1) == [1]
    failed = [host.next(), host.next()]
    assert [message.sequence for message in failed] == [2, 3]
    assert "emory" in failed[0].failure.message
    assert failed[1].consumed == (3,)
    assert host.ended(1) == [4]


def test_a_program_that_cannot_be_compiled_is_reported(host: Served) -> None:
    wrong = program(2, lambda x: (x + 1,), digest="g")
    host.receive(msgspec.structs.replace(wrong, functions={"g": b"no function"}))
    ready = host.next()
    assert isinstance(ready, Ready)
    assert ready.failure is not None
    assert ready.failure.kind in ("ProgramRefused", "CompileError")


def test_a_program_is_checked_by_whose_it_is(host: Served) -> None:
    """The same program, of a trusted tenant and then of another one: what was compiled for the first is not used."""

    def pivoted(x: jax.Array) -> tuple[jax.Array]:
        square = jax.numpy.eye(3) * x.astype(np.float32)
        return ((x + jax.scipy.linalg.qr(square, pivoting=True)[2].sum().astype(x.dtype)),)  # type: ignore[misc]

    anything = (export.DisabledSafetyCheck.custom_call("ALL"),)
    made = export.export(jax.jit(pivoted), disabled_checks=anything)(jax.ShapeDtypeStruct((), np.uint64))
    for number, trusted in ((6, True), (7, False)):
        message = program(number, lambda x: (x + 1,), digest="pivoted")
        functions = {"pivoted": bytes(made.serialize())}
        host.receive(msgspec.structs.replace(message, functions=functions, trusted=trusted))
        ready = host.next()
        assert isinstance(ready, Ready)
        if trusted:
            assert ready.failure is None
            host.receive(IslandLaunch(60, 1, number, (1,), 60))
            assert host.ended(1) == [60]
            assert np.asarray(host.store.get(1, 60)) == 1 + 0 + 1 + 2
            host.receive(DropProgram(1, number))
        else:
            assert ready.failure is not None
            assert ready.failure.kind == "ProgramRefused"
            assert "geqp3_ffi' is not among those that programs may use" in ready.failure.message


def test_an_observer_sees_the_launches_while_it_is_there(host: Served) -> None:
    trace = LaunchTrace()
    host.dispatcher.observe(trace)
    host.receive(IslandLaunch(40, 1, 1, (1,), 40))
    assert host.ended(1) == [40]
    host.dispatcher.release(trace)
    host.receive(IslandLaunch(41, 1, 1, (1,), 41))
    assert host.ended(1) == [41]
    assert [(ran.sequence, ran.session) for ran in trace.entries] == [(40, 1)]


def test_a_program_that_comes_while_a_host_records_is_recorded(host: Served) -> None:
    """One that was there before, and one that comes; what runs before and afterwards is not."""
    executor: Any = HostExecutor.__new__(HostExecutor)
    executor.dispatcher, executor.timeline = host.dispatcher, None
    host.receive(IslandLaunch(42, 1, 1, (1,), 42))
    assert host.ended(1) == [42]
    executor.record()
    host.receive(program(4, lambda x: (x * 7,), digest="new"))
    assert host.next().failure is None
    host.receive(IslandLaunch(43, 1, 4, (1,), 43), IslandLaunch(44, 1, 1, (1,), 44))
    assert host.ended(2) == [43, 44]
    found = executor.recorded(LIMIT_S)
    host.receive(IslandLaunch(45, 1, 4, (1,), 45))
    assert host.ended(1) == [45]
    assert len(found) == 2
    assert found[0].name == "new"
    assert executor.recorded(0.0) == []
    assert not host.dispatcher.driver.observers
    host.receive(DropProgram(1, 4))


def test_a_heartbeat_says_what_keeps_a_device_and_what_is_behind_it(host: Served) -> None:
    """1. A launch that takes long, and one that is short, come. 2. Both are over: the next heartbeat names none."""
    long = program(3, lambda x: (jax.lax.fori_loop(0, 1 << 30, lambda i, c: c * 3 + x, x),), digest="long")
    host.receive(long)
    ready = host.next()
    assert isinstance(ready, Ready)
    assert ready.failure is None
    host.receive(IslandLaunch(50, 1, 3, (1,), 50), IslandLaunch(51, 1, 1, (1,), 51))
    deadline = time.monotonic() + LIMIT_S
    while not (beat := host.dispatcher.heartbeat()).running:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (running,) = beat.running
    assert running.sequence == 50
    assert running.ms >= 1000 * NOTED_AFTER_S
    assert beat.queued in ((), (51,)), "a device may hold up the thread that enqueues"
    assert host.ended(2) == [50, 51]
    time.sleep(0.1)
    assert host.dispatcher.heartbeat() == Heartbeat(0)
    host.receive(DropProgram(1, 3))


def test_a_launch_that_is_complete_and_waits_to_be_reported_keeps_no_device(host: Served) -> None:
    """Where launches on several sets of devices are watched by one thread, one may be over behind one that is not."""

    class Value:
        def __init__(self, ready: bool) -> None:
            self.is_ready = lambda: ready

    dispatcher = host.dispatcher
    watcher = Watcher()
    long_ago = time.perf_counter() - 100.0
    for sequence, ready in ((1, False), (2, True), (3, False)):
        plan = SimpleNamespace(own_devices=(Device(0, 98 if sequence == 1 else 99),))
        program = program_of(plan)
        watcher._incomplete.append(Watched(sequence, [Value(ready)], program, long_ago + sequence))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "_watchers", {(): watcher})
        beat = dispatcher.heartbeat()
    assert [entry.sequence for entry in beat.running] == [1]
    assert beat.queued == ()


def test_what_is_over_behind_a_launch_that_keeps_its_device_frees_nothing(host: Served) -> None:
    """Or who moves data again and again would keep a device for ever: each would count as its release."""

    class Value:
        def __init__(self, ready: bool) -> None:
            self.is_ready = lambda: ready

    dispatcher, watcher = host.dispatcher, Watcher()
    program = program_of(SimpleNamespace(own_devices=(Device(0, 97),)))
    long_ago = time.perf_counter() - 100.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "_watchers", {(): watcher})
        for sequence in range(1, 4):
            watcher._incomplete.append(Watched(sequence, [Value(sequence > 1)], program, long_ago + sequence))
            beat = dispatcher.heartbeat()
            assert [entry.sequence for entry in beat.running] == [1]
            assert beat.running[0].ms > 90_000


def test_what_passes_a_launch_on_some_of_its_devices_frees_none_of_them(host: Served) -> None:
    """
    1. A launch keeps device 0. Others of devices 0 and 1, which another thread watches, pass it one after the other.
    2. The limit of the first goes on, and it is charged from its beginning. The others are charged once for their time.
    """
    ready = [False]
    value: Any = SimpleNamespace(is_ready=lambda: ready[0])
    one, both = (Device(0, 98),), (Device(0, 98), Device(0, 99))

    def watched(sequence: int, devices: tuple[Device, ...], begun: float, values: list[Any]) -> Watched:
        program = program_of(SimpleNamespace(own_devices=devices, watched_with=devices))
        return Watched(sequence, values, program, begun)

    def taken(launch: Watched, at: float) -> int:
        return dispatcher._taken(launch.sequence, launch.program, launch.begun, at)

    dispatcher, watchers = host.dispatcher, {one: Watcher(), both: Watcher()}
    now = time.perf_counter()
    long = watched(901, one, now - 100, [value])
    watchers[one].add(long)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "_watchers", watchers)
        charged = [taken(watched(902 + k, both, now - 50 + k, []), now - 40 + k) for k in range(3)]
        assert charged == pytest.approx([10e6, 1e6, 1e6])
        beat = dispatcher.heartbeat()
        assert [entry.sequence for entry in beat.running] == [901]
        assert beat.running[0].ms >= 100_000
        ready[0] = True
        assert taken(long, now) == pytest.approx(100e6)
        assert taken(watched(905, both, now - 10, []), now + 1) == pytest.approx(1e6)


@pytest.fixture(scope="module")
def pair(wide_types: None) -> tuple[Served, Served]:
    """Hosts 0 and 1, each an island, with program 1 from `programs_of_two_islands`."""
    hosts = Served(0), Served(1)
    peers = Peers(tuple(Peer(number, 1, one.transfer.address, 0) for number, one in enumerate(hosts)))
    for one, message in zip(hosts, programs_of_two_islands(1), strict=True):
        one.receive(peers, message)
        assert one.next() == Ready(int(one is hosts[1]), 1, 0, queues=False)
    return hosts


def test_launches_wait_at_a_barrier_for_the_data_of_another_host(pair: tuple[Served, Served]) -> None:
    """1. Ten launches come to host 1, which waits for host 0. 2. They come to host 0. 3. All end."""
    sender, receiver = pair
    launches = [IslandLaunch(k, 1, 1, (1,), k) for k in range(10, 20)]
    receiver.receive(*launches)
    sender.receive(*launches)
    assert sorted(receiver.ended(10)) == list(range(10, 20))
    assert sorted(sender.ended(10)) == list(range(10, 20))
    assert [int(np.asarray(receiver.store.get(1, k))) for k in (10, 19)] == [3, 3]


def test_a_launch_that_goes_on_with_what_has_come_is_reported_where_its_value_is_asked_for(
    pair: tuple[Served, Served],
) -> None:
    """Also where nothing else wakes the thread that reports."""
    sender, receiver = pair
    for number in range(40, 46):
        receiver.store.when_present(1, number, lambda _: None)
        receiver.receive(IslandLaunch(number, 1, 1, (1,), number))
        until(lambda: bool(receiver.dispatcher.arrivals._waiting), "it does not wait")
        sender.receive(IslandLaunch(number, 1, 1, (1,), number))
        assert receiver.ended(1) == [number]
        assert sender.ended(1) == [number]


@pytest.mark.parametrize("usual", ["brief", "long"])
def test_only_what_is_brief_goes_on_in_the_thread_that_brought_what_it_waited_for(
    pair: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch, usual: str
) -> None:
    sender, receiver = pair
    driver, threads = receiver.dispatcher.driver, set[str]()
    handle_batch = driver.handle_batch

    def noted(batch: Sequence[Any], now: float) -> None:
        if any(isinstance(event, InputsArrived) for event in batch):
            threads.add(threading.current_thread().name)
        handle_batch(batch, now)

    monkeypatch.setattr(driver, "handle_batch", noted)
    for number in range(46, 58) if usual == "brief" else range(58, 70):
        if usual == "long":
            driver.programs[1]._usual = 100.0
        receiver.receive(IslandLaunch(number, 1, 1, (1,), number))
        until(lambda: bool(receiver.dispatcher.arrivals._waiting), "it does not wait")
        sender.receive(IslandLaunch(number, 1, 1, (1,), number))
        assert receiver.ended(1) == sender.ended(1) == [number]
    assert threads == {"dispatch"} if usual == "long" else threads - {"dispatch"}


def test_what_only_moves_passes_what_keeps_the_device(pair: tuple[Served, Served]) -> None:
    """
    1. A launch of one session, whose program is known to take long, keeps the device of host 0; two arrays of another
       session lie there, and move together.
    2. They are on host 1 while the first launch runs on.
    """
    sender, receiver = pair
    sketch = Sketch()
    here, there = sketch.slice("0.0", island=0), sketch.slice("1.0", island=1)
    x, y = (sketch.argument(here, type=SCALAR) for _ in range(2))
    plans = sketch.planned(sketch.call("add", x, y, slice=there, outputs=(SCALAR,))).plans
    for island, one in enumerate(pair):
        one.receive(Program(4, msgspec.msgpack.encode(plans[island]), {"add": exported_sum()}))
        assert one.next() == Ready(island, 4, 0, queues=False)
    sender.receive(program(5, lambda x: (jax.lax.fori_loop(x - x, x << 24, lambda i, c: c * 3 + x, x),), digest="long"))
    assert isinstance(sender.next(), Ready)
    for session, number, value in ((1, 2, 32), (2, 2, 20), (2, 3, 3)):
        sender.store.put(session, number, jax.device_put(np.uint64(value), jax.local_devices()[0]))
    sender.receive(IslandLaunch(59, 1, 5, (1,), 59))
    assert sender.ended(1) == [59]
    sender.receive(IslandLaunch(60, 1, 5, (2,), 60))
    sender.receive(IslandLaunch(61, 2, 4, (2, 3), 61))
    # Not alone, so that its dispatcher takes it: what this thread enqueues comes behind the first launch.
    receiver.receive(IslandLaunch(61, 2, 4, (2, 3), 61), Drop(2, ()), Drop(2, ()))
    assert receiver.ended(1) == [61]
    assert int(np.asarray(receiver.store.get(2, 61))) == 23
    assert sender.sent.empty()
    assert sender.ended(2) == [60, 61]
    for one in pair:
        one.receive(DropProgram(1, 4), DropSession(2))
    sender.receive(DropProgram(1, 5), Drop(1, (2, 59, 60)))


def test_a_failure_reaches_the_launch_that_waits_for_it_on_another_host(pair: tuple[Served, Served]) -> None:
    for one in reversed(pair):
        one.receive(IslandLaunch(30, 1, 1, (999,), 30))
    failed = pair[1].next()
    assert isinstance(failed, IslandLaunchFailed)
    assert (failed.sequence, failed.failure.kind) == (30, "BufferLost")
    assert "buffer 999 is not on this host" in failed.failure.message


def test_watchers_are_bounded_and_those_that_are_shared_report_all(
    host: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs on many sets of devices, which a client makes at will: threads do not grow with them."""
    monkeypatch.setattr(dispatcher_module, "MAX_WATCHERS", 2)
    dispatcher, many = host.dispatcher, 50
    monkeypatch.setattr(dispatcher, "_watchers", {})
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 1000, lambda _, y: y + jax.numpy.sin(y), x))
    before = threading.active_count()
    (known,) = dispatcher.driver.programs.values()
    for k in range(many):
        plan = SimpleNamespace(watched_with=(Device(0, k),), own_devices=(Device(0, k),), decides=())
        dispatcher.watch(1000 + k, [slow(np.ones(1000))], program_of(plan), ())
    assert sorted(host.ended(many)) == list(range(1000, 1000 + many))
    assert threading.active_count() <= before + 2
    assert known is not None


def test_functions_are_forgotten_once_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last that were used are kept, up to a number of bytes."""
    devices = jax.local_devices()[:1]
    compiler = Compiler(0, devices, {0: devices})
    functions = {f"f{k}": exported(lambda x, k=k: (x + k,)) for k in range(10)}
    monkeypatch.setattr(compiler_module, "MAX_EXPORTED_BYTES", 3 * max(map(len, functions.values())))
    for digest in ("f0", "f1", "f0", "f2", "f3", "f4", "f0"):
        assert compiler._function(digest, functions).nr_devices == 1
    assert list(compiler._exported) == ["f3", "f4", "f0"]
    assert compiler._exported_bytes == sum(len(functions[digest]) for digest in compiler._exported)
    for digest in functions:
        compiler._function(digest, functions)
    assert len(compiler._exported) == 3


def test_computations_are_forgotten_once_they_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions may have 64 MiB of constants each: a thousand of their computations would fill the host."""
    devices = jax.local_devices()[:1]
    compiler = Compiler(0, devices, {0: devices})
    monkeypatch.setattr(compiler_module, "MAX_CACHED_BYTES", 100)
    made: list[str] = []
    for key, size in (("a", 40), ("b", 40), ("a", 40), ("small", 0), ("c", 40), ("huge", 101), ("c", 40)):
        compiler._cached(key.encode(), partial(made.append, key), key, size)
    assert made == ["a", "b", "small", "c", "huge", "c"]
    assert list(compiler._cache) == [b"c"]
    assert compiler._cached_bytes == 40


def test_a_computation_counts_with_the_functions_that_it_was_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = jax.local_devices()[:1]
    compiler = Compiler(0, devices, {0: devices})
    function = exported(lambda x: (x + 1,))
    monkeypatch.setattr(compiler.sandbox, "check", lambda *_: None)
    sketch = Sketch()
    here = sketch.slice("0.0")
    value = sketch.call("f", sketch.argument(here, type=SCALAR), slice=here, outputs=(SCALAR,))
    plan = sketch.planned(value).plans[0]
    (executable,), (placed,) = plan.executables, plan.slices
    compiler.executable(executable, placed, {"f": function})
    assert compiler._cached_bytes == len(function)


def test_a_computation_is_held_against_each_program_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled for one is no answer to one that calls its results smaller, and would be charged for that."""
    devices = jax.local_devices()[:1]
    compiler = Compiler(0, devices, {0: devices})
    monkeypatch.setattr(compiler.sandbox, "check", lambda *_: None)

    def compiled(made: ArrayType) -> Any:
        sketch = Sketch()
        here = sketch.slice("0.0")
        value = sketch.call("f", sketch.argument(here, type=SCALAR), slice=here, outputs=(made,))
        plan = sketch.planned(value).plans[0]
        return compiler.executable(plan.executables[0], plan.slices[0], {"f": exported(lambda x: (x + 1,))})

    assert compiled(SCALAR) is compiled(SCALAR)
    with pytest.raises(ProgramRefused, match="the program says output 0 is"):
        compiled(ArrayType((), "int8"))


def test_a_host_runs_python_of_trusted_programs_alone(host: Served) -> None:
    sketch = Sketch()
    here = sketch.slice("0.0")
    result = sketch.call(
        "h", sketch.argument(here, type=SCALAR), slice=here, outputs=(SCALAR,), host_limit_ms=60_000, where="user.py:7"
    )
    plan = msgspec.msgpack.encode(sketch.planned(result).plans[0])
    functions = {"h": cloudpickle.dumps((lambda v: v + np.uint64(41), ((0,), {}), 0))}
    for number, trusted in ((8, True), (9, False)):
        host.receive(Program(number, plan, functions, trusted=trusted))
        ready = host.next()
        assert isinstance(ready, Ready)
        if trusted:
            assert ready.failure is None
            host.receive(IslandLaunch(80, 1, number, (1,), 80), IslandLaunch(81, 1, number, (80,), 81))
            assert host.ended(2) == [80, 81]
            assert np.asarray(host.store.get(1, 81)) == 1 + 41 + 41
            host.receive(DropSession(1))
        else:
            assert ready.failure is not None
            assert ready.failure.kind == "ProgramRefused"
            assert "only tenants that the operator trusts may run" in ready.failure.message


@pytest.mark.parametrize("members", [(0,), (0, 1)])
def test_a_call_that_may_wait_for_other_hosts_is_left_to_the_dispatcher(members: tuple[int, ...]) -> None:
    """The loop that reads calls serves all clients of a host. A collective within a call waits for the other hosts."""
    served, threads = Served(0, members), queue.SimpleQueue[str]()
    served.dispatcher.driver.handle_batch = lambda *_: threads.put(threading.current_thread().name)  # type: ignore[method-assign]
    assert served.dispatcher.hand(Handed(1, "", LaunchEarly(1, (1,), 100)))
    here = threading.current_thread().name
    assert threads.get(timeout=LIMIT_S) == (here if members == (0,) else "dispatch")
    assert served.dispatcher.hand(Called(1, "", ServeCall(1, (1,), (7,), ((0,),)), 1)) == (members == (0,))
