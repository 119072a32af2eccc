"""Launches that repeat each other are put together, and nothing else is changed by it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from pathways_ray.executor.chains import Chain, grouped
from pathways_ray.transport.messages import Drop, Enqueued, Program, Run, ToHost
from tests.unit.strategies import repeatable

# Arguments and outputs of each program; programs of 10 and up may not be chained.
PROGRAMS = {1: (1, 1), 2: (2, 1), 3: (2, 2), 10: (1, 1)}


def outputs_of(program: int) -> int:
    return PROGRAMS[program][1] if program < 10 else 0


def groups(messages: Iterable[ToHost]) -> list[ToHost | Chain]:
    return list(grouped(list(messages), outputs_of))


def run(sequence: int, argument: int, program: int = 1, session: int = 1) -> Run:
    """Launch `sequence` makes buffer `sequence`."""
    return Run(sequence, session, program, (argument,), sequence)


def drop(*buffers: int, session: int = 1) -> Drop:
    return Drop(session, buffers)


# --- by example -------------------------------------------------------------------------------------------------------


def test_launches_that_feed_each_other_and_are_dropped_are_a_chain() -> None:
    """y = f(y), three times; every value but the last is dropped. The drops come behind."""
    runs = run(1, 0), run(2, 1), run(3, 2)
    messages = [runs[0], drop(0), runs[1], drop(1), runs[2], drop(2)]
    assert groups(messages) == [Chain(runs, ((0, 0),)), drop(0), drop(1), drop(2)]


def test_a_value_that_somebody_keeps_ends_the_chain() -> None:
    """The second value is kept: one chain ends with it. What follows takes it from the store."""
    runs = run(1, 0), run(2, 1), run(3, 2), run(4, 3)
    messages = [runs[0], runs[1], drop(1), runs[2], runs[3], drop(3)]
    assert groups(messages) == [Chain(runs[:2], ((0, 0),)), runs[2], runs[3], drop(1), drop(3)]


def test_nothing_is_chained_when_every_value_is_kept() -> None:
    messages = [run(1, 0), run(2, 1), run(3, 2)]
    assert groups(messages) == messages


def test_a_value_that_another_program_takes_is_kept() -> None:
    """Its drop comes behind that program's launch, so it is not among the chain's."""
    messages = [run(1, 0), run(2, 1), run(3, 1, program=10), drop(1), run(4, 2), drop(2)]
    assert groups(messages)[:3] == messages[:3]


def test_other_messages_and_sessions_stay_in_their_place() -> None:
    peers = Program(5, b"", {})
    messages = [run(1, 0), run(2, 1, session=2), peers, run(3, 2), drop(1), drop(0, session=2)]
    assert groups(messages) == messages


def test_sessions_number_their_buffers_apart() -> None:
    """Buffer 1 of session 2 is another one: neither does it feed session 1, nor is its drop one of session 1's."""
    fed = [run(1, 0), run(2, 1, session=2), drop(1), drop(1, session=2)]
    assert groups(fed) == fed
    dropped = [run(1, 0), run(2, 1), drop(1, session=2)]
    assert groups(dropped) == dropped


def test_an_argument_that_stays_the_same_is_no_hindrance() -> None:
    """The batch loop: parameters = step(parameters, data)."""
    runs = tuple(Run(k, 1, 2, (k - 1, 100), k) for k in (1, 2, 3))
    messages = [runs[0], drop(0), runs[1], drop(1), runs[2], drop(2)]
    assert groups(messages)[0] == Chain(runs, ((0, 0),))
    changed = [messages[0], Run(2, 1, 2, (1, 101), 2), drop(1)]
    assert groups(changed) == changed


def test_outputs_may_change_places_if_they_always_do() -> None:
    swap = [Run(10 * k, 1, 3, (10 * (k - 1) + 1, 10 * (k - 1)), 10 * k) for k in (1, 2, 3)]
    drops = [drop(10 * k, 10 * k + 1) for k in (1, 2)]
    assert groups([swap[0], swap[1], drops[0], swap[2], drops[1]])[0] == Chain(tuple(swap), ((0, 1), (1, 0)))
    straight = Run(30, 1, 3, (20, 21), 30)
    assert groups([swap[0], swap[1], drops[0], straight, drops[1]])[0] == Chain(tuple(swap[:2]), ((0, 1), (1, 0)))


def test_gangs_that_come_one_by_one_are_not_chained() -> None:
    messages = [Run(k, 1, 1, (k - 1,), k, 0, 1) for k in (1, 2, 3)] + [drop(1), drop(2)]
    assert groups(messages) == messages


# --- against a host that takes one message after the other ------------------------------------------------------------


class Host:
    """A store, and what each launch computed. A launch of buffers that are not there is an error of the test."""

    def __init__(self) -> None:
        self.store: dict[tuple[int, int], int] = {
            (session, k): hash((session, k)) for session in (1, 2) for k in (0, 1)
        }
        self.ended: list[int] = []

    def do(self, message: ToHost | Chain) -> None:
        match message:
            case Run():
                inputs = [self.store[message.session, buffer] for buffer in message.arguments]
                self.finish(message, self.compute(message.program, inputs))
            case Drop():
                for buffer in message.buffers:
                    self.store.pop((message.session, buffer), None)
            case Chain():
                self.chain(message)

    def compute(self, program: int, inputs: list[int]) -> list[int]:
        return [hash((program, k, *inputs)) for k in range(PROGRAMS[program][1])]

    def finish(self, run: Run, values: list[int]) -> None:
        self.store.update({(run.session, run.results + k): value for k, value in enumerate(values)})
        self.ended.append(run.sequence)

    def chain(self, chain: Chain) -> None:
        """One computation of the first launch's arguments; only what the last one makes is stored."""
        first, last = chain.runs[0], chain.runs[-1]
        values = [self.store[first.session, buffer] for buffer in first.arguments]
        for number in range(len(chain.runs)):
            made = self.compute(first.program, values)
            if number < len(chain.runs) - 1:
                for position, output in chain.feeds:
                    values[position] = made[output]
        self.ended += [run.sequence for run in chain.runs[:-1]]
        self.finish(last, made)


@st.composite
def histories(draw: st.DrawFn) -> list[list[ToHost]]:
    """Batches of launches and drops of two sessions, most launches a repetition of the one before."""
    live: dict[int, list[int]] = {1: [0, 1], 2: [0, 1]}
    made = {1: 0, 2: 0}
    messages: list[ToHost] = []
    session, program = 1, 1
    for sequence in range(1, draw(st.integers(2, 25))):
        if draw(st.integers(0, 5)) == 0:
            session, program = draw(st.sampled_from([1, 2])), draw(st.sampled_from(sorted(PROGRAMS)))
        count, outputs = PROGRAMS[program]
        known = live[session]
        picks = st.sampled_from([*known[-outputs:] * 3, *known]) if known else st.just(-1)
        arguments = tuple(draw(picks) for _ in range(count))
        if -1 in arguments:
            continue
        made[session] += 10  # each session numbers its own, so that the same numbers come twice
        results = made[session]
        messages.append(Run(sequence, session, program, arguments, results))
        known += range(results, results + outputs)
        for _ in range(draw(st.integers(0, 2))):
            old = [buffer for buffer in known if buffer < results]
            if old:
                gone = draw(st.sampled_from([*old, *old[-outputs:] * 3]))
                known.remove(gone)
                messages.append(Drop(session, (gone,)))
    cuts = sorted(draw(st.lists(st.integers(0, len(messages)), max_size=2)))
    bounds = [0, *cuts, len(messages)]
    return [messages[a:b] for a, b in itertools.pairwise(bounds)]


@repeatable(250)
@given(histories())
def test_chains_have_the_effect_of_their_launches(batches: list[list[ToHost]]) -> None:
    plain, chained = Host(), Host()
    for batch in batches:
        for message in batch:
            plain.do(message)
        for group in groups(batch):
            chained.do(group)
    assert chained.store == plain.store
    assert sorted(chained.ended) == sorted(plain.ended)
    for session in (1, 2):
        mine = {m.sequence for batch in batches for m in batch if isinstance(m, Run) and m.session == session}
        assert [s for s in chained.ended if s in mine] == [s for s in plain.ended if s in mine]


def test_messages_of_hosts_are_none_of_its_business() -> None:
    assert groups([]) == []
    assert list(grouped([Enqueued(1, 0)], outputs_of)) == [Enqueued(1, 0)]  # type: ignore[list-item]
