"""Hosts that agree in each call of a computation: all exchange their values, or all have XLA run it."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from pathways_ray.executor.compile import agreement
from pathways_ray.executor.compile.agreement import PATIENCE_S, RESTS, Agreement, PartnerLost
from pathways_ray.executor.data.partners import SocketPartner
from tests.drawn import drawn


def still(partner: SocketPartner) -> list[SocketPartner]:
    return [partner] if partner.is_open else []


class Hosts:
    """Some hosts that are at one computation, the first of which decides; each has a thread of its own."""

    def __init__(self, count: int) -> None:
        self.first: list[SocketPartner] = []
        self.others: list[SocketPartner] = []
        for _ in range(count - 1):
            a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.first.append(SocketPartner(a))
            self.others.append(SocketPartner(b))
        self.sides = [Agreement(lambda: self.first, count - 1, is_first=True)]
        self.sides += [Agreement(partial(still, one), count - 1, is_first=False) for one in self.others]
        self.pool = ThreadPoolExecutor(count)

    def all(self, act: Callable[[int, Agreement], Any]) -> list[Any]:
        """What all hosts do at the same time."""
        return [one.result(timeout=20) for one in [self.pool.submit(act, k, one) for k, one in enumerate(self.sides)]]

    def call(self, number: int, there: Sequence[bool] = ()) -> list[bytes | None]:
        """A call, in which not all hosts may have their arguments: what each gets."""

        def act(k: int, side: Agreement) -> bytes | None:
            side.at(number, 3)
            if there and not there[k]:
                side.leave()
                return None
            return side.agree(b"%d" % k)

        return self.all(act)


@pytest.fixture
def two() -> Iterator[Hosts]:
    made = Hosts(2)
    yield made
    made.pool.shutdown()


def test_all_get_what_all_gave_in_their_order() -> None:
    for count in (2, 3, 4):
        hosts = Hosts(count)
        for number in range(1, 20):
            assert hosts.call(number) == [b"0123"[:count]] * count
        hosts.pool.shutdown()


def test_a_host_without_its_arguments_has_all_leave_the_call_to_xla(two: Hosts) -> None:
    assert two.call(1, [False, True]) == [None, None]
    assert two.call(2, [True, False]) == [None, None]
    assert two.call(3, [False, False]) == [None, None]
    assert two.call(4) == [b"01", b"01"]


@pytest.mark.parametrize("seed", range(drawn(60)))
def test_hosts_never_disagree(seed: int) -> None:
    """Any host may be late, or without its arguments; sums follow each other within a call."""
    chance = random.Random(seed)
    count = chance.randint(2, 4)
    hosts = Hosts(count)
    calls = [
        (chance.randint(0, 2), [chance.random() > 0.15 for _ in range(count)], [chance.random() for _ in range(count)])
        for _ in range(60)
    ]

    def act(k: int, side: Agreement) -> list[list[bytes] | None]:
        found: list[list[bytes] | None] = []
        for number, (more, there, late) in enumerate(calls):
            side.at(number + 1, 0)
            if late[k] > 0.9:
                time.sleep(PATIENCE_S * 1.5 if late[k] > 0.99 else 0.001)
            if not there[k]:
                side.leave()
                found.append(None)
                continue
            every = side.agree(b"%d.%d " % (number, k))
            parts = [side.exchange(b"%d.%d+%d " % (number, k, part)) for part in range(more)] if every else []
            found.append([every, *parts] if every else None)
        return found

    told = hosts.all(act)
    assert all(one == told[0] for one in told)
    for number, (values, (more, there, _)) in enumerate(zip(told[0], calls, strict=True)):
        if values is not None:
            assert all(there)
            assert values[0] == b"".join(b"%d.%d " % (number, k) for k in range(count))
            assert values[1:] == [
                b"".join(b"%d.%d+%d " % (number, k, part) for k in range(count)) for part in range(more)
            ]
    hosts.pool.shutdown()


@pytest.mark.parametrize("count", [2, 3])
def test_the_first_host_waits_for_a_while_and_then_rests(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others say of calls that it has left comes too late, and is let go of."""
    monkeypatch.setattr(agreement, "PATIENCE_S", 0.01)
    hosts = Hosts(count)
    first, *others = hosts.sides
    for number in range(1, RESTS + 2):
        first.at(number, 0)
        began = time.monotonic()
        assert first.agree(b"0") is None
        assert time.monotonic() - began < 1.0
    for number in range(1, RESTS + 2):
        for other in others:
            other.at(number, 0)
            assert other.agree(b"1") is None
    assert hosts.call(RESTS + 2) == [b"012"[:count]] * count
    hosts.pool.shutdown()


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("comes", [True, False])
@pytest.mark.parametrize("before", [[True, True], [True, False]])
def test_of_two_hosts_that_have_heard_each_other_one_waits_for_the_other(
    two: Hosts, late: int, comes: bool, before: list[bool]
) -> None:
    two.call(1, before)
    early = 1 - late
    for side in two.sides:
        side.at(2, 0)
    waiting = two.pool.submit(two.sides[early].agree, b"%d" % early)
    time.sleep(3 * PATIENCE_S)
    assert not waiting.done()
    if comes:
        assert two.sides[late].agree(b"%d" % late) == b"01"
    else:
        two.sides[late].leave()
    assert waiting.result(timeout=5) == (b"01" if comes else None)
    assert two.call(3) == [b"01", b"01"]


def test_the_first_of_two_hosts_waits_without_limit_only_for_who_speaks_by_the_same_connection(two: Hosts) -> None:
    """That of another program may come since, by which the other one of this program says nothing."""
    assert two.call(1) == [b"01", b"01"]
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    two.first[0] = SocketPartner(a)
    first, _ = two.sides
    first.at(2, 0)
    assert first.agree(b"0") is None
    b.close()


@pytest.mark.parametrize("ends", [0, 1])
def test_the_end_of_one_of_two_hosts_wakes_the_other(two: Hosts, ends: int) -> None:
    assert two.call(1) == [b"01", b"01"]
    two.sides[1 - ends].at(2, 0)
    waiting = two.pool.submit(two.sides[1 - ends].agree, b"1")
    time.sleep(0.05)
    assert not waiting.done()
    (two.first if ends == 0 else two.others)[0].end()
    assert waiting.result(timeout=5) is None
    assert two.call(3) == [None, None]


def test_a_host_that_leaves_many_calls_hears_all_that_is_said_meanwhile(
    two: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a connection holds: nobody waits for room in it."""
    monkeypatch.setattr(agreement, "PATIENCE_S", 30.0)  # the threads of both may have to wait for a core
    for number in range(1, 3000):
        for side in two.sides:
            side.at(number, 0)
            side.leave()
    assert two.call(3000) == [b"01", b"01"]


def test_a_host_that_ends_wakes_who_waits(two: Hosts) -> None:
    _, other = two.sides
    other.at(1, 0)
    waiting = two.pool.submit(other.agree, b"1")
    time.sleep(0.05)
    assert not waiting.done()
    two.first[0].end()
    assert waiting.result(timeout=5) is None
    assert two.call(2) == [None, None]


def test_what_is_said_in_calls_of_which_one_host_is_never_there_is_let_go_of() -> None:
    hosts = Hosts(3)
    for number in range(1, 1000):
        assert hosts.call(number, [True, number > 900, True]) == ([b"012"] * 3 if number > 900 else [None] * 3)
    hosts.pool.shutdown()


def test_a_host_that_fails_amid_a_call_ends_what_it_says(two: Hosts) -> None:
    assert two.call(1) == [b"01", b"01"]
    first, other = two.sides
    waiting = two.pool.submit(other.exchange, b"1")
    time.sleep(0.05)
    assert first.has_begun
    first.break_off()
    with pytest.raises(PartnerLost):
        waiting.result(timeout=5)


def test_hosts_at_different_calls_exchange_nothing(two: Hosts) -> None:
    def act(k: int, side: Agreement) -> bytes | None:
        side.at(7 + k, 0)
        return side.agree(b"%d" % k)

    assert two.all(act) == [None, None]
    assert two.call(9) == [None, None]


def test_without_all_partners_nobody_waits() -> None:
    hosts = Hosts(3)
    lonely = Agreement(lambda: hosts.first[:1], 2, is_first=True)

    def act(k: int, side: Agreement) -> bytes | None:
        side = lonely if k == 0 else side
        if k == 2:
            return None
        side.at(1, 0)
        return side.agree(b"%d" % k)

    assert hosts.all(act) == [None, None, None]
    alone = Agreement(list, 1, is_first=False)
    alone.at(1, 0)
    alone.leave()
    assert alone.agree(b"0") is None
    hosts.pool.shutdown()


def test_what_is_no_word_ends_the_connection() -> None:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    partner = SocketPartner(a)
    side = Agreement(partial(still, partner), 1, is_first=False)
    b.send(b"short")
    side.at(1, 0)
    assert side.agree(b"0") is None
    assert not partner.is_open
    b.close()
