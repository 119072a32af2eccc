"""Partners of computations: who finds whom, before the first call and when one of them compiles again."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pathways_ray.executor.compile import agreement
from pathways_ray.executor.data import partners
from pathways_ray.executor.data.partners import MAX_STRANGERS, Partners
from pathways_ray.transport import neighbours
from pathways_ray.transport.messages import Peer
from tests.waiting import until

NAME, OTHER = b"a computation 16", b"another one   16"
SECRET = "the link secret"


class Transfer:
    """What partners ask the connections of a host for."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.peers: dict[int, Peer] = {}

    def near(self, host: int) -> Peer | None:
        return self.peers.get(host)


class Island:
    """Hosts of one machine that know each other."""

    def __init__(self, count: int = 2) -> None:
        made = [Transfer(f"{os.getpid()}-{time.monotonic_ns()}-{k}") for k in range(count)]
        for transfer in made:
            transfer.peers = {k: Peer(k, 1, one.address) for k, one in enumerate(made)}
        self.transfers: list[Any] = made
        self.hosts = [Partners(k, transfer, SECRET) for k, transfer in enumerate(self.transfers)]
        self.pool = ThreadPoolExecutor(2 * count)

    def meet(self, host: int, name: bytes = NAME, may: bool = True, pause: float = 0.0) -> Any:
        """A host compiles a computation of all."""

        def compiled() -> Any:
            time.sleep(pause)
            return self.hosts[host].meet(name, range(len(self.hosts)), may)

        return self.pool.submit(compiled)

    def called(self, sides: list[Any], number: int) -> list[bytes | None]:
        """A call of all hosts: what each gets."""

        def act(k: int) -> bytes | None:
            sides[k].at(number, 0)
            got: bytes | None = sides[k].agree(b"%d" % k)
            return got

        return [one.result(timeout=20) for one in [self.pool.submit(act, k) for k in range(len(sides))]]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has hosts wait for each other where this machine has no time for one of their threads for a while."""
    monkeypatch.setattr(agreement, "PATIENCE_S", 5.0)


def results(*asked: Any) -> list[Any]:
    return [one.result(timeout=40) for one in asked]


@pytest.mark.parametrize("pauses", [(0.0, 0.3), (0.3, 0.0)])
def test_hosts_find_each_other_whoever_has_compiled_first(pauses: tuple[float, float]) -> None:
    island = Island()
    sides = results(*[island.meet(k, pause=pause) for k, pause in enumerate(pauses)])
    assert [island.called(sides, number) for number in (1, 2)] == [[b"01", b"01"]] * 2


def test_three_hosts_and_two_computations() -> None:
    island = Island(3)
    for name in (NAME, OTHER):
        sides = results(*[island.meet(k, name) for k in range(3)])
        assert island.called(sides, 1) == [b"012"] * 3


def test_a_computation_that_one_host_compiles_again_goes_on() -> None:
    """Or twice at once, as for two programs: there is one connection for it, which all its calls count on."""
    island = Island()
    first, other = results(island.meet(0), island.meet(1))
    assert island.called([first, other], 1) == [b"01", b"01"]
    (again,) = results(island.meet(0))
    others = results(island.meet(1), island.meet(1))
    for number, sides in enumerate([[first, others[0]], [again, other], [again, others[1]], [first, other]]):
        assert island.called(sides, 2 + number) == [b"01", b"01"]


def test_a_computation_that_is_gone_and_comes_again() -> None:
    island = Island()
    sides = results(island.meet(0), island.meet(1))
    assert island.called(sides, 1) == [b"01", b"01"]
    del sides
    gc.collect()
    sides = results(island.meet(0), island.meet(1))
    assert island.called(sides, 2) == [b"01", b"01"]


def test_who_compiles_it_otherwise_tells_the_others() -> None:
    """Then nobody waits for a word of it: neither where it was compiled before, nor to be answered."""
    for otherwise in (0, 1):
        island = Island()
        sides = results(island.meet(0), island.meet(1))
        assert results(island.meet(otherwise, may=False)) == [None]
        began = time.monotonic()
        if otherwise == 0:
            sides[1].at(1, 0)
            assert sides[1].agree(b"1") is None
            (again,) = results(island.meet(1))
            again.at(2, 0)
            assert again.agree(b"1") is None
        else:
            sides[0].at(1, 0)
            assert sides[0].agree(b"0") is None
        assert time.monotonic() - began < 5.0


@pytest.mark.parametrize("otherwise", [0, 1])
def test_to_compile_it_otherwise_amid_calls_divides_no_hosts(otherwise: int) -> None:
    island = Island()
    for name in [b"computation %4d" % number for number in range(20)]:
        sides = results(island.meet(0, name), island.meet(1, name))
        changed = island.meet(otherwise, name, may=False, pause=0.002)
        told = [island.called(sides, number) for number in range(1, 100)]
        assert changed.result(timeout=20) is None
        assert all(one == other for one, other in told)
        assert island.called(sides, 100) == [None, None]


def test_a_first_host_that_never_compiles_it_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partners, "COMPILE_LIMIT_S", 0.2)
    island = Island()
    (other,) = results(island.meet(1))
    (first,) = results(island.meet(0))
    assert island.called([first, other], 1) == [None, None]


def test_hosts_of_several_machines_exchange_nothing() -> None:
    island = Island()
    for transfer in island.transfers:
        transfer.peers = {}
    assert results(island.meet(0), island.meet(1)) == [None, None]


def test_an_address_at_which_nobody_listens() -> None:
    island = Island()
    island.transfers[1].peers[0] = Peer(0, 1, "nowhere")
    first, other = results(island.meet(0), island.meet(1))
    assert island.called([first, other], 1) == [None, None]


def test_strangers_learn_nothing_and_end_nothing() -> None:
    """They know the name, which the system shows, and not the secret: they send nothing, nonsense, or a greeting."""
    island = Island()
    name = neighbours.name_of(island.transfers[0].address, f"sums {SECRET}")
    with contextlib.ExitStack() as stack:
        strangers = []
        for k in range(3 * MAX_STRANGERS):
            stranger = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            stranger.settimeout(5.0)
            stranger.connect(name)
            if k % 3:
                with contextlib.suppress(OSError):
                    stranger.send(b"x" * (40 if k % 3 == 1 else 7))
            strangers.append(stranger)
        for k, stranger in enumerate(strangers):
            if k % 3:
                with contextlib.suppress(ConnectionError):
                    assert stranger.recv(64) == b""
        sides = results(island.meet(0), island.meet(1))
        assert island.called(sides, 1) == [b"01", b"01"]
        until(lambda: len(island.hosts[0]._strangers) <= MAX_STRANGERS)


def test_connections_of_computations_that_are_gone_are_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where their last word was not read."""
    monkeypatch.setattr(partners, "MAX_PARTNERS", 8)
    island = Island()
    for k in range(30):
        name = b"%016d" % k
        sides = results(island.meet(0, name), island.meet(1, name))
        sides[1].at(1, 0)
        sides[1].leave()
        del sides
    sides = results(island.meet(0), island.meet(1))
    assert island.called(sides, 1) == [b"01", b"01"]
    assert len(island.hosts[0]._found) <= 8


@pytest.mark.parametrize("ends", [True, False])
def test_a_program_whose_connection_is_not_that_of_both_hosts_is_left_to_xla(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two programs are one computation: of one of them the connection has ended, or was never there, when the other one
    gets a new one. The first host finds this for both, and may not wait by it for who has another."""
    monkeypatch.setattr(agreement, "PATIENCE_S", 0.05)
    island = Island()
    if ends:
        one = results(island.meet(0), island.meet(1))
        assert island.called(one, 1) in ([b"01", b"01"], [None, None])
        one[1].break_off()
        other = results(island.meet(0), island.meet(1))
    else:
        monkeypatch.setattr(partners, "COMPILE_LIMIT_S", 0.5)
        early = island.meet(1)
        time.sleep(0.1)
        late = island.meet(1)
        (mute,) = results(early)
        one = [*results(island.meet(0)), mute]
        other = [*results(island.meet(0)), *results(late)]
    assert island.called(one, 2) == [None, None]
    assert island.called(other, 3) in ([b"01", b"01"], [None, None])
