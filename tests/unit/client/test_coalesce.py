"""Coalescing: a loop leaves as one launch once its composed program is prepared, and nothing else changes."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_ray.client import coalesce
from pathways_ray.client.coalesce import LENGTHS, MAX_CONTENDED_US, MAX_UNCONTENDED_US, Coalescer, Repetition
from pathways_ray.client.launch_loops import Shape
from pathways_ray.ir.graph import Compute, Graph, calls_in
from pathways_ray.simulation.values import made_alone
from pathways_ray.transport.messages import EarlyLaunch, Free, Launch, Message, Put, Register
from tests.unit.helpers import VECTOR, Sketch
from tests.unit.strategies import repeatable

# Arguments and outputs of each program.
PROGRAMS = {1: (1, 1), 2: (2, 1), 3: (2, 2), 4: (1, 1)}


def graph(number: int) -> Graph:
    sketch = Sketch(f"p{number}")
    where = sketch.slice("0.0")
    arguments, outputs = PROGRAMS[number]
    taken = [sketch.argument(where) for _ in range(arguments)]
    made = sketch.call(f"f{number}", *taken, slice=where, outputs=(VECTOR,) * outputs)
    return sketch.graph(*(msgspec.structs.replace(made, output=k) for k in range(outputs)))


def calls_of(made: Graph) -> int:
    """Calls of a program of one node in a composed graph, rounds of loops counted."""
    return sum(calls_in(made.recipes[node.recipe].parts) for node in made.nodes if isinstance(node, Compute))


class Client:
    """A `Coalescer` with the programs above; what it registers is prepared when `prepare` is called."""

    def __init__(self, device_us: float = 10.0, occurrences: int = 1, lengths: tuple[int, ...] = LENGTHS) -> None:
        self.coalescer = Coalescer(itertools.count(100).__next__, occurrences, lengths)
        self.device_us = device_us
        self.contended = False
        self.graphs = {number: graph(number) for number in PROGRAMS}
        for number, made in self.graphs.items():
            self.coalescer.register(number, made)
        self.registered: list[Register] = []
        self.lengths: dict[int, int] = {}

    def sends(self, *messages: Message, begun: Container[int] = ()) -> list[Message]:
        """The messages that leave, without registrations; `begun` are the launches that their hosts have."""
        found = self.coalescer.coalesce(list(messages), lambda launch: launch.launch in begun)
        self.registered += [message for message in found if isinstance(message, Register)]
        return [message for message in found if not isinstance(message, Register)]

    def prepare(self) -> None:
        for message in self.registered:
            made = msgspec.msgpack.decode(message.graph, type=Graph)
            self.graphs[message.program] = made
            self.lengths[message.program] = calls_of(made)
            self.coalescer.prepared(message.program)
        self.registered.clear()

    def ends(self, message: Message) -> tuple[int, ...]:
        """The launches that end when a launch that left ends."""
        if not isinstance(message, Launch):
            return ()
        device_us = round(self.device_us * self.lengths.get(message.program, 1))
        self.coalescer.measure((message.launch,), (device_us,), self.contended)
        return (*self.coalescer.take_covered(message.launch), message.launch)


def loop(first: int, count: int, program: int = 1, start: int = 0) -> list[Message]:
    """y = f(y), `count` times: launch `first` on makes buffer `first` on, of buffer `start`; only the last is kept."""
    made: list[Message] = []
    for number in range(first, first + count):
        made += [Launch(number, program, (start,), number), Free((start,))]
        start = number
    return made


def warm(client: Client, program: int = 1, count: int = 64) -> None:
    """Has a loop measured, registered and compiled."""
    for first in (10_000, 20_000, 30_000):
        for message in client.sends(*loop(first, count, program, first - 1)):
            client.ends(message)
        client.prepare()


def test_launches_of_a_loop_that_leave_one_by_one_need_the_memory_of_one_round() -> None:
    """What is freed between them stays there: behind them all, a loop of big arrays would not fit on its devices."""
    client = Client()
    assert client.sends(*loop(1, 64)) == loop(1, 64), "nothing is compiled"
    client.prepare()
    client.device_us = MAX_UNCONTENDED_US
    assert client.sends(*loop(1_001, 64, start=64)) == loop(1_001, 64, start=64)


def test_what_is_freed_between_segments_stays_there() -> None:
    client = Client(lengths=(8,))
    warm(client)
    found = client.sends(*loop(1, 20))
    segments, rest = found[:4], found[4:]
    assert [m.launch for m in segments if isinstance(m, Launch)] == [8, 16]
    assert segments[1::2] == [Free((0,)), Free((8,))]
    assert rest == loop(17, 4, start=16)


# --- early launches ---------------------------------------------------------------------------------------------------


def handed(messages: list[Message]) -> list[Message]:
    """The same launches, as they are where their host has them already."""
    return [EarlyLaunch(m.launch, m.program, m.arguments, m.results) if isinstance(m, Launch) else m for m in messages]


def freed(messages: list[Message]) -> set[int]:
    return {buffer for message in messages if isinstance(message, Free) for buffer in message.buffers}


def test_calls_that_their_host_has_begun_leave_as_one() -> None:
    client = Client()
    warm(client)
    launch, free = client.sends(*handed(loop(1, 8)), begun=range(1, 9))
    assert isinstance(launch, EarlyLaunch)
    assert (launch.launch, launch.arguments, launch.results, launch.covers) == (8, (0,), 8, tuple(range(1, 9)))
    assert free == Free((0,))
    assert client.ends(launch) == tuple(range(1, 9))


def test_rounds_leave_as_one_only_where_the_last_launch_needs_all_others() -> None:
    """What is reported is what became of that. `x = f(x); y = g(y)`, whose last launch needs nothing of `x`, leaves one
    by one where its host has begun it; `x = f(x); x = g(x)` does not."""
    client = with_two_states()
    apart = handed(two_states(100, 4))
    sent = client.sends(*apart, begun=range(1000))
    assert [m for m in sent if isinstance(m, Launch)] == apart[::2]
    assert freed(sent) == freed(apart)
    launches, start = list[Message](), 500
    for number in range(501, 509):
        launches += [EarlyLaunch(number, 1 if number % 2 else 4, (start,), number), Free((start,))]
        start = number
    for _ in range(3):
        for message in client.sends(*launches, begun=range(1000)):
            client.ends(message)
        client.prepare()
    together, _ = client.sends(*launches, begun=range(1000))
    assert isinstance(together, EarlyLaunch)
    assert together.covers == tuple(range(501, 509))


def test_loops_are_found_in_calls_that_hosts_have_begun() -> None:
    client = Client()
    for first in (100, 200, 300):
        for message in client.sends(*handed(loop(first, 32, start=first - 1)), begun=range(400)):
            client.ends(message)
        client.prepare()
    launch, *_ = client.sends(*handed(loop(1, 32)), begun=range(1, 33))
    assert isinstance(launch, EarlyLaunch)
    assert len(launch.covers) == 32


@pytest.mark.parametrize(
    ("messages", "begun"),
    [
        pytest.param(handed(loop(1, 8)), range(1, 8), id="one is not known to have begun"),
        pytest.param([*handed(loop(1, 4)), *loop(5, 4, start=4)], range(1, 9), id="some were only sent"),
    ],
)
def test_calls_that_have_not_all_begun_leave_one_by_one(messages: list[Message], begun: range) -> None:
    client = Client()
    warm(client)
    assert client.sends(*messages, begun=begun) == messages


# --- by example -------------------------------------------------------------------------------------------------------


def test_a_loop_leaves_as_one_launch_once_it_is_compiled() -> None:
    client = Client()
    messages = loop(1, LENGTHS[-1])
    first = client.sends(*messages)
    assert [m for m in first if isinstance(m, Launch)] == messages[::2]
    assert not client.registered, "nobody knows yet how long a launch takes"
    warm(client)
    launch, freed = client.sends(*loop(1, 8))
    assert isinstance(launch, Launch)
    assert (launch.launch, launch.arguments, launch.results) == (8, (0,), 8)
    assert client.lengths[launch.program] == 8
    assert freed == Free((0,)), "the values between were never made"
    assert client.ends(launch) == (1, 2, 3, 4, 5, 6, 7, 8)
    assert client.ends(launch) == (8,), "once"


def test_a_loop_that_donates_its_value_leaves_as_one_launch_too() -> None:
    """What is donated needs no `Free`: the launch that takes it is the end of it."""
    client = Client()
    sketch = Sketch("taking")
    where = sketch.slice("0.0")
    taken = sketch.graph(sketch.call("f", sketch.argument(where), slice=where, donated=(0,)))
    client.graphs[5] = taken
    client.coalescer.register(5, taken)
    for first in (10_000, 20_000, 30_000):
        for message in client.sends(*loop(first, 64, 5, first - 1)[::2]):
            client.ends(message)
        client.prepare()
    (launch,) = client.sends(*loop(1, 8, 5)[::2])
    assert isinstance(launch, Launch)
    assert (launch.launch, launch.arguments, launch.results) == (8, (0,), 8)
    assert client.graphs[launch.program].donated_arguments == (0,)


def test_the_longest_segments_are_taken_first() -> None:
    client = Client()
    warm(client)
    found = [m for m in client.sends(*loop(1, 2 * 32 + 2 * 8 + 2)) if isinstance(m, Launch)]
    assert [client.lengths.get(m.program, 1) for m in found] == [32, 32, 8, 8, 1, 1]
    assert [m.arguments for m in found] == [(0,), (32,), (64,), (72,), (80,), (81,)]


def test_nothing_is_registered_before_a_loop_occurs_often() -> None:
    client = Client(occurrences=8)
    for first in (1, 101):
        for message in client.sends(*loop(first, 24, start=first - 1)):
            client.ends(message)
    assert not client.registered
    client.sends(*loop(201, 80, start=200))
    assert len(client.registered) == 1, "this chain has fewer than eight of the longer segments"


def test_no_length_is_registered_twice() -> None:
    client = Client()
    warm(client)
    for first in (1, 1001, 2001):
        client.sends(*loop(first, 200, start=first - 1))
    lengths = [calls_of(msgspec.msgpack.decode(m.graph, type=Graph)) for m in client.registered]
    assert len(lengths) == len(set(lengths)) == 1, "128, which warming up was too short for"


def test_a_slow_program_leaves_in_short_segments_or_one_by_one() -> None:
    client = Client(device_us=MAX_UNCONTENDED_US / 10)
    warm(client)
    assert set(client.lengths.values()) == {8}
    slow = Client(device_us=MAX_UNCONTENDED_US)
    warm(slow)
    assert not slow.lengths


def test_segments_are_shorter_while_other_sessions_wait_behind_them() -> None:
    client = Client(device_us=MAX_CONTENDED_US / 10)
    warm(client)

    def lengths() -> set[int]:
        sent = client.sends(*loop(1, 64))
        return {client.lengths[m.program] for m in sent if isinstance(m, Launch)}

    assert lengths() == {32}
    client.contended = True
    for message in client.sends(*loop(100, 8, start=99)):
        client.ends(message)
    assert lengths() == {8}
    client.contended = False
    for message in client.sends(*loop(200, 8, start=199)):
        client.ends(message)
    assert lengths() == {32}


def test_a_loop_that_gets_slower_leaves_in_shorter_segments() -> None:
    client = Client()
    warm(client)
    client.device_us = MAX_UNCONTENDED_US / 10
    for first in range(100_000, 115_000, 1000):
        for message in client.sends(*loop(first, 64, start=first - 1)):
            client.ends(message)
    found = [m for m in client.sends(*loop(1, 64)) if isinstance(m, Launch)]
    assert {client.lengths[m.program] for m in found} == {8}


@pytest.mark.parametrize("fusion", [True, False])
def test_a_composed_program_has_a_loop_only_where_hosts_compose_nodes(fusion: bool) -> None:
    client = Client()
    client.coalescer = Coalescer(itertools.count(100).__next__, 1, fusion=fusion)
    client.coalescer.register(1, client.graphs[1])
    warm(client)
    nodes = [node for node in client.graphs[100].nodes if isinstance(node, Compute)]
    assert calls_of(client.graphs[100]) in LENGTHS
    assert (len(nodes) == 1) == fusion


def test_a_value_that_is_kept_ends_a_segment() -> None:
    """Of sixteen values the eighth is kept: it comes to be, and the rest goes on from it."""
    client = Client()
    warm(client)
    messages = [m for m in loop(1, 16) if m != Free((8,))]
    launches = [m for m in client.sends(*messages) if isinstance(m, Launch)]
    assert [(m.arguments, m.results) for m in launches] == [((0,), 8), ((8,), 16)]


def test_nothing_is_coalesced_when_every_value_is_kept() -> None:
    client = Client()
    warm(client)
    messages = loop(1, 16)[::2]
    assert client.sends(*messages) == messages


def test_other_messages_stay_in_their_place() -> None:
    client = Client()
    warm(client)
    put = Put(500, 1, VECTOR, ())
    found = client.sends(*loop(1, 8), put, *loop(9, 8, start=8), *loop(17, 1, program=4, start=16))
    kinds = [type(m) for m in found]
    assert kinds == [Launch, Free, Put, Launch, Free, Launch, Free]


def test_an_argument_that_stays_the_same_is_no_hindrance() -> None:
    """The batch loop: parameters = step(parameters, data)."""
    client = Client()
    again: list[Message] = []
    for first in (10_000, 20_000, 30_000, 0):
        again = [Launch(first + k, 2, (first + k - 1, 777), first + k) for k in range(1, 9)]
        again = list(itertools.chain.from_iterable((m, Free((m.arguments[0],))) for m in again))  # type: ignore[attr-defined]
        found = client.sends(*again)
        for message in found:
            client.ends(message)
        client.prepare()
    assert [m.arguments for m in found if isinstance(m, Launch)] == [(0, 777)]
    changed = list(again)
    changed[8] = Launch(5, 2, (4, 9), 5)
    assert len([m for m in client.sends(*changed) if isinstance(m, Launch)]) > 1


def training(first: int, rounds: int, weights: int, batches: tuple[int, ...] = ()) -> list[Message]:
    """`loss, grads = f(weights, batch); weights = g(weights, grads)`, by a program that gives two results and one that
    takes two. Names of Python are let go of when they are assigned again."""
    made: list[Message] = []
    freed: tuple[int, ...] = ()
    for turn in range(rounds):
        number = first + 3 * turn
        batch = batches[turn] if batches else 777
        made += [Launch(number, 3, (weights, batch), number), *map(Free, ((b,) for b in freed))]
        made += [Launch(number + 1, 2, (weights, number + 1), number + 2), Free((weights,))]
        weights, freed = number + 2, (number, number + 1)
    return made


@pytest.mark.parametrize("varied", [False, True])
def test_a_round_of_several_programs_leaves_as_one_launch(varied: bool) -> None:
    """
    1. A training step of two programs, of which the second takes what the first gave; eight steps leave together.
    2. Once it is compiled, they are two launches: the last round's loss is held, and leaves with other results.
    3. Arguments that are others in each round go along.
    """
    client = Client(lengths=(8, 4))
    batches = tuple(range(700, 708)) if varied else ()
    for first in (10_000, 20_000, 30_000):
        for message in client.sends(*training(first, 8, 5, batches)):
            client.ends(message)
        client.prepare()
    launch, state, second, *rest = client.sends(*training(1_000, 8, 5, batches))
    assert isinstance(launch, Launch)
    assert state == Free((5,)), "what the first one took, before the next one"
    assert isinstance(second, Launch)
    assert (launch.launch, second.launch) == (1_010, 1_022)
    assert (launch.results, second.results) == (1_009, 1_021), "the loss, the gradients and the weights of a last round"
    assert second.arguments == ((1_011, 704, 705, 706, 707) if varied else (1_011, 777))
    assert client.ends(second)[-2:] == (1_021, 1_022)
    assert [m for m in rest if not isinstance(m, Free)] == []
    assert freed([state, *rest]) == {5, 1_009, 1_010, 1_011}


def test_results_that_have_no_consecutive_numbers_leave_one_by_one() -> None:
    """Of a round both programs' results go on, and another array got its number in between."""
    client = Client(lengths=(8, 4))
    for first in (10_000, 20_000, 30_000, 40_000):
        made: list[Message] = []
        x, y = 1, 2
        for number in range(first, first + 80, 10):
            made += [Launch(number, 1, (x,), number), Free((x,)), Launch(number + 1, 4, (y,), number + 5), Free((y,))]
            x, y = number, number + 5
        sent = client.sends(*made)
        assert [m for m in sent if isinstance(m, Launch)] == [m for m in made if isinstance(m, Launch)]
        for message in sent:
            client.ends(message)
    assert not client.registered


def two_states(first: int, rounds: int, odd: int = -1) -> list[Message]:
    """`x = f(x); y = g(y)`: each round makes two arrays, and in round `odd` another one gets the number in between."""
    made: list[Message] = []
    x, y = 1, 2
    number = first
    for turn in range(rounds):
        following = number + 1 + (turn == odd)
        made += [Launch(first + 2 * turn, 1, (x,), number), Free((x,))]
        made += [Launch(first + 2 * turn + 1, 4, (y,), following), Free((y,))]
        x, y, number = number, following, following + 1
    return made


def with_two_states() -> Client:
    """A client whose segments are of four rounds of `two_states`, prepared."""
    client = Client(lengths=(8,))
    for first in (10_000, 20_000, 30_000):
        for message in client.sends(*two_states(first, 8)):
            client.ends(message)
        client.prepare()
    return client


def test_a_segment_whose_results_have_no_consecutive_numbers_leaves_as_it_is() -> None:
    """
    1. Of eight rounds, two segments: in the last round of the first one an upload got the number in between.
    2. As one launch it would take the upload's number, and the next segment would take an array that never comes to be.
    """
    client = with_two_states()
    messages = two_states(100, 8, odd=3)
    sent = [m for m in client.sends(*messages) if isinstance(m, Launch)]
    assert sent[:-1] == [m for m in messages if isinstance(m, Launch)][:8]
    assert (sent[-1].launch, sent[-1].arguments, sent[-1].results) == (115, (106, 108), 115)
    assert client.coalescer.take_covered(107) == ()
    inside = [m for m in client.sends(*two_states(200, 8, odd=2)) if isinstance(m, Launch)]
    assert len(inside) == 2, "within a segment no number counts"


def test_a_launch_that_left_with_others_whose_results_are_kept_cannot_be_cancelled() -> None:
    client = with_two_states()
    segment, *_ = client.sends(*two_states(100, 4))
    assert isinstance(segment, Launch)
    assert not client.coalescer.cancel(segment.launch)
    warm(client)
    alone, *_ = client.sends(*loop(1, 8))
    assert isinstance(alone, Launch)
    assert client.coalescer.cancel(alone.launch), "the results between were let go of"


def test_a_launch_that_is_cancelled_before_it_leaves_is_not_coalesced() -> None:
    client = with_two_states()
    messages = two_states(100, 4)
    assert client.coalescer.cancel(107)
    sent = client.sends(*messages)
    assert [m for m in sent if isinstance(m, Launch)] == [m for m in messages if isinstance(m, Launch)]
    for message in sent:
        client.ends(message)
    assert len([m for m in client.sends(*two_states(100, 4)) if isinstance(m, Launch)]) == 1, "once, until it ends"


def test_a_program_that_cannot_be_repeated_is_not_coalesced() -> None:
    """Its argument is donated by one launch and taken by the next."""
    client = Client()
    sketch = Sketch()
    where = sketch.slice("0.0")
    v, w = sketch.argument(where), sketch.argument(where)
    client.graphs[5] = sketch.graph(sketch.call("f", v, w, slice=where, donated=(1,)))
    client.coalescer.register(5, client.graphs[5])
    for first in (10_000, 20_000):
        messages = [Launch(first + k, 5, (first + k - 1, 7), first + k) for k in range(1, 9)]
        freed = [Free((first + k,)) for k in range(8)]
        for message in client.sends(*itertools.chain.from_iterable(zip(messages, freed, strict=True))):
            client.ends(message)
    assert not client.registered


def test_a_program_on_several_slices_is_not_coalesced() -> None:
    client = Client()
    sketch = Sketch()
    here, there = sketch.slice("0.0"), sketch.slice("1.0")
    y = sketch.call("g", sketch.call("f", sketch.argument(here), slice=here), slice=there)
    client.coalescer.register(1, sketch.graph(sketch.call("h", y, slice=here)))
    fresh = Coalescer(itertools.count(100).__next__, 1)
    fresh.register(1, sketch.graph(y))
    messages = loop(1, 16)
    assert fresh.coalesce(messages) == messages


def test_a_host_function_is_not_coalesced() -> None:
    """Each launch is a call of Python, which may do more than give a result; a composed program makes only those whose
    results are taken."""
    client = Client()
    sketch = Sketch()
    where = sketch.slice("0.0")
    client.graphs[5] = sketch.graph(sketch.call("h", sketch.argument(where), slice=where, host_limit_ms=1000))
    client.coalescer.register(5, client.graphs[5])
    for first in (10_000, 20_000):
        for message in client.sends(*loop(first, 64, 5, first - 1)):
            client.ends(message)
    assert not client.registered


def test_composed_programs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalesce, "MAX_PROGRAMS", 2)
    client = Client()
    warm(client)
    warm(client, program=4)
    assert len(client.lengths) == 2


def test_those_that_a_move_has_overtaken_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalesce, "MAX_PROGRAMS", 2)
    client = Client()
    for _ in range(3):  # a composed program is on its way when its slice moves, and is never prepared
        for first in (10_000, 20_000):
            for message in client.sends(*loop(first, 64, start=first - 1)):
                client.ends(message)
        assert client.registered
        client.registered.clear()
        client.coalescer.moved({graph(1).slices[0].id})
    warm(client)
    assert len(client.lengths) == 2


def test_after_a_move_composed_programs_are_launched_once_they_are_registered_again() -> None:
    """The controller has forgotten those that were prepared before it."""
    client = Client()
    warm(client)
    before = set(client.lengths)
    client.coalescer.moved({graph(1).slices[0].id})
    for first in (1, 65):
        sent = client.sends(*loop(first, 64, start=first - 1))
        assert sent == loop(first, 64, start=first - 1)
        for message in sent:
            client.ends(message)
    client.prepare()
    launches = [m for m in client.sends(*loop(129, 64, start=128)) if isinstance(m, Launch)]
    assert len(launches) < 64
    assert before.isdisjoint(launch.program for launch in launches)


def test_after_a_move_a_loop_is_measured_on_its_new_devices() -> None:
    """On these it is so slow that it does not leave as one."""
    client = Client()
    warm(client)
    client.coalescer.moved({graph(1).slices[0].id})
    client.device_us = MAX_UNCONTENDED_US
    client.lengths.clear()
    warm(client)
    assert not client.lengths


def test_a_shorter_time_counts_at_once_and_a_longer_one_little_by_little() -> None:
    repetition = Repetition(Shape((1,), ((),), (), (), (1,)), ())
    repetition.measure(1000.0, 1)
    repetition.measure(500.0, 1)
    assert repetition.device_us == 750.0
    repetition.measure(1500.0, 1)
    assert 750.0 < repetition.device_us < 760.0


def test_a_round_is_measured_once_all_its_launches_are() -> None:
    repetition = Repetition(Shape((1, 2), ((), ()), (), (), (1, 1)), ())
    for place in (0, 1):
        repetition.sample(place, 500)
    repetition.sample(0, 100)
    assert repetition.device_us == 1000.0
    repetition.sample(1, 100)
    assert repetition.device_us == 600.0


def test_a_program_that_was_not_composed_may_be_prepared() -> None:
    client = Client()
    client.coalescer.prepared(12345)
    client.coalescer.measure((1, 2), (3,), False)
    assert client.coalescer.take_covered(77) == ()


# --- against a cluster that takes one message after the other ---------------------------------------------------------


class Cluster:
    """The buffers of a session, and which launches ended. A launch of buffers that are not there is an error."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.store: dict[int, object] = {0: 11, 1: 22}
        self.ended: list[int] = []

    def do(self, messages: Iterable[Message]) -> None:
        for message in messages:
            match message:
                case Launch():
                    inputs = [self.store[buffer] for buffer in message.arguments]
                    results = made_alone(self.client.graphs[message.program], inputs)[0]  # type: ignore[arg-type]
                    taken = set(self.store) & set(range(message.results, message.results + len(results)))
                    assert not taken
                    self.store.update(enumerate(results, message.results))
                    self.ended += self.client.ends(message)
                case Free():
                    for buffer in message.buffers:
                        del self.store[buffer]


@st.composite
def histories(draw: st.DrawFn) -> list[list[Message]]:
    """Batches of launches and frees, most launches a repetition of the one before."""
    live, free_of = [0, 1], 10
    messages: list[Message] = []
    program = 1
    for launch in range(1, draw(st.integers(2, 40))):
        if draw(st.integers(0, 8)) == 0:
            program = draw(st.sampled_from(sorted(PROGRAMS)))
        count, outputs = PROGRAMS[program]
        if not live:
            break
        picks = st.sampled_from([*live[-outputs:] * 6, *live])
        messages.append(Launch(launch, program, tuple(draw(picks) for _ in range(count)), free_of))
        known = list(live)
        live += range(free_of, free_of + outputs)
        free_of += outputs
        for buffer in known[-2:]:
            if draw(st.integers(0, 3)):
                live.remove(buffer)
                messages.append(Free((buffer,)))
    cuts = sorted(draw(st.lists(st.integers(0, len(messages)), max_size=2)))
    bounds = [0, *cuts, len(messages)]
    return [messages[a:b] for a, b in itertools.pairwise(bounds)]


@st.composite
def loops(draw: st.DrawFn) -> list[list[Message]]:
    """Rounds of up to three programs: what each takes is drawn once for all rounds, and now and then differs."""
    programs = draw(st.lists(st.sampled_from(sorted(PROGRAMS)), min_size=1, max_size=3))
    template = [[draw(st.integers(-4, 5)) for _ in range(PROGRAMS[program][0])] for program in programs]
    odd = draw(st.integers(0, 60))
    made, free_of, messages, launch = [0, 1], 10, list[Message](), 0
    keep = draw(st.integers(2, 6))
    for _ in range(draw(st.integers(2, 12))):
        for program, sources in zip(programs, template, strict=True):
            launch += 1
            outputs = PROGRAMS[program][1]
            # A source below zero is a result from so far back, any other one an array from before the loop.
            back = [made[max(s, -len(made))] if s < 0 else s % 2 for s in sources]
            if launch == odd:
                back = [0] * len(back)
            messages.append(Launch(launch, program, tuple(back), free_of))
            made += range(free_of, free_of + outputs)
            free_of += outputs
            while len(made) > 2 + keep:
                messages.append(Free((made.pop(2),)))
    cuts = sorted(draw(st.lists(st.integers(0, len(messages)), max_size=2)))
    return [messages[a:b] for a, b in itertools.pairwise([0, *cuts, len(messages)])]


@repeatable(400)
@given(loops())
def test_rounds_that_leave_as_one_have_the_effect_of_single_launches(batches: list[list[Message]]) -> None:
    plain, composed = Cluster(Client()), Cluster(Client(lengths=(8, 4)))
    for again in range(4):  # measured, registered, prepared, and used: the same with other numbers
        shift = 1000 * again
        for batch in batches:
            moved = [_moved(message, shift) for message in batch]
            plain.do(moved)
            composed.do(composed.client.sends(*moved))
            composed.client.prepare()
    assert composed.store == plain.store
    assert composed.ended == plain.ended


def _moved(message: Message, shift: int) -> Message:
    """The same with other numbers for what it makes; arrays 0 and 1 are there from the beginning."""

    def number(buffer: int) -> int:
        return buffer + shift if buffer > 1 else buffer

    if isinstance(message, Free):
        return Free(tuple(map(number, message.buffers)))
    assert isinstance(message, Launch)
    taken = tuple(map(number, message.arguments))
    return Launch(message.launch + shift, message.program, taken, number(message.results))


@repeatable(250)
@given(histories())
def test_coalesced_launches_have_the_effect_of_single_ones(batches: list[list[Message]]) -> None:
    plain, composed = Cluster(Client()), Cluster(Client(lengths=(16, 8, 4)))
    for program in PROGRAMS:
        if PROGRAMS[program] == (1, 1):
            warm(composed.client, program)
    for batch in batches:
        plain.do(batch)
        composed.do(composed.client.sends(*batch))
        composed.client.prepare()
    assert composed.store == plain.store
    assert composed.ended == plain.ended


def test_lengths_go_down() -> None:
    assert list(LENGTHS) == sorted(LENGTHS, reverse=True)


def test_nothing_is_coalesced_where_that_is_switched_off() -> None:
    """Not even what repeats itself often enough; nor is a program for it asked for."""
    client = Client()
    client.coalescer = Coalescer(itertools.count(100).__next__, 1, enabled=False)
    for number, made in client.graphs.items():
        client.coalescer.register(number, made)
    for first in (10_000, 20_000, 30_000):
        messages = loop(first, 64, start=first - 1)
        assert client.sends(*messages) == messages
        for message in messages:
            client.ends(message)
        client.prepare()
    assert not client.lengths


def test_a_program_that_is_dropped_takes_the_composed_ones_along() -> None:
    """1. Launches of it that wait to leave do so one by one. 2. Of others nothing is lost."""
    client = Client(lengths=(8,))

    def composed(program: int) -> set[int]:
        launches = [message for message in client.sends(*loop(1, 16, program)) if isinstance(message, Launch)]
        return {launch.program for launch in launches} - {program}

    for program in (1, 4):
        warm(client, program)
    (first,), (second,) = composed(1), composed(4)
    assert client.coalescer.unregister(1) == (first,)
    assert client.coalescer.unregister(1) == ()
    assert client.sends(*loop(1, 64)) == loop(1, 64)
    assert client.registered == []
    assert composed(4) == {second}


def test_a_composed_program_that_is_not_prepared_yet_is_dropped_too() -> None:
    client = Client(lengths=(8,))
    for first in (10_000, 20_000, 30_000):
        for message in client.sends(*loop(first, 64, 1, first - 1)):
            client.ends(message)
    (unready,) = (message.program for message in client.registered)
    assert client.coalescer.unregister(1) == (unready,)
    client.coalescer.prepared(unready)
    assert client.sends(*loop(1, 64)) == loop(1, 64)


def test_nothing_is_kept_of_programs_that_are_dropped() -> None:
    """A client may make and drop programs for days."""
    client = Client(lengths=(8,))

    def kept() -> dict[str, int]:
        return {name: len(table) for name, table in vars(client.coalescer).items() if isinstance(table, (dict, set))}

    before = kept()
    for number in range(50, 60):
        client.coalescer.register(number, graph(1))
        warm(client, number)
        assert len(client.sends(*loop(1, 16, number))) < 32, "it leaves as one"
        assert client.coalescer.unregister(number)
        client.coalescer.take_covered(8)
        client.coalescer.take_covered(16)
    assert kept() == before


@pytest.mark.parametrize("dropped_at", [1, 9, 16])
def test_a_program_may_be_dropped_while_its_last_launches_leave(dropped_at: int) -> None:
    """By another thread, or a destructor: all that was called leaves, as one or one by one."""
    client = Client(lengths=(8,))
    warm(client)
    messages = handed(loop(1, 16))

    def is_begun(launch: EarlyLaunch) -> bool:
        if launch.launch == dropped_at:
            client.coalescer.unregister(1)
        return True

    found = client.coalescer.coalesce(messages, is_begun)
    ended = [launch for message in found for launch in client.ends(message)]
    assert ended == list(range(1, 17))
    assert freed(found) <= freed(messages)
