"""Values that are asked for with their calls: a client's streams and a host's data server, in one process."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest

from pathways_ray.client.ahead import MAX_AHEAD, MAX_AHEAD_BYTES, NOT_ASKED
from pathways_ray.client.array_pieces import FetchPlan
from pathways_ray.client.data import DataLinks
from pathways_ray.client.data_link import DataLink
from pathways_ray.errors import BufferDeleted, Failure, HostLost, PathwaysError
from pathways_ray.ir.types import ArrayType
from pathways_ray.transport.capabilities import data_token
from pathways_ray.transport.messages import HostAddress, LaunchEarly
from tests.unit.executor.data.test_server import COVER, OVER, SECRET, SESSION, SMALL, Asked, Host, eventually
from tests.unit.helpers import placed

PROGRAM = 3


@pytest.fixture(params=["local", "stream"])
def host(request: pytest.FixtureRequest) -> Host:
    return Host()


@pytest.fixture
def data(host: Host, request: pytest.FixtureRequest) -> Iterator[DataLinks]:
    made = DataLinks(SESSION, data_token(SECRET, SESSION, None), (HostAddress(0, 1, host.server.address),))
    host.put(1, SMALL)
    np.testing.assert_array_equal(made.fetch(1, COVER, lambda: None), SMALL)
    eventually(lambda: made._links[0].is_local)
    if request.node.callspec.params.get("host") == "stream":
        made._links[0]._local = None
    yield made
    made.close(OVER)


def called(data: DataLinks, buffer: int) -> DataLink:
    """Hands a call over that asks for its result. The host leaves it to its scheduler."""
    link = data.link_of(0)
    assert link is not None
    asked = data.ahead.ask(link, buffer, COVER, data.new_request(), PROGRAM)
    assert asked != NOT_ASKED
    assert data.launch_early(0, LaunchEarly(1, (), buffer, (), *asked))
    return link


def test_the_value_comes_without_another_question(host: Host, data: DataLinks) -> None:
    """1. Before somebody looks. 2. While he waits. 3. Behind a wait for its being there."""
    link = called(data, 2)
    eventually(lambda: host.store.waiting() == 1)
    before = data.new_request()
    host.put(2, SMALL + 2)
    np.testing.assert_array_equal(data.fetch(2, COVER, lambda: None), SMALL + 2)
    called(data, 3)
    looking = Asked(data, 3)
    eventually(lambda: host.store.waiting() == 1)
    host.put(3, SMALL + 3)
    looking.end()
    np.testing.assert_array_equal(looking.result, SMALL + 3)
    called(data, 4)
    host.put(4, SMALL + 4)
    data.await_value(4, 0, lambda: False)
    np.testing.assert_array_equal(data.fetch(4, COVER, lambda: None), SMALL + 4)
    assert data.new_request() - before == 3  # this one, and those of two calls
    assert link.fetches == {}


def test_a_value_that_nobody_looks_at_is_let_go_and_said_once(host: Host, data: DataLinks) -> None:
    """One that was waited for counts as looked at. What has not come is asked for no longer."""
    ignored: list[int] = []
    data.ahead.ignored = ignored.append
    link = called(data, 2)
    eventually(lambda: host.store.waiting() == 1)
    data.ahead.drop(2)
    data.ahead.drop(2)
    assert ignored == [PROGRAM]
    eventually(lambda: host.store.waiting() == 0)
    called(data, 3)
    host.put(3, SMALL)
    data.await_value(3, 0, lambda: False)
    data.ahead.drop(3)
    assert (ignored, link.fetches) == ([PROGRAM], {})


def test_where_it_cannot_come_it_is_asked_for_again(host: Host, data: DataLinks) -> None:
    """1. The host had failed, and has it now. 2. Its slice has moved, so that it lies elsewhere."""
    link = called(data, 2)
    host.put(2, Failure("HostLost", "it was away"))
    with pytest.raises(HostLost):
        data.await_value(2, 0, lambda: False)
    host.put(2, SMALL + 2)
    np.testing.assert_array_equal(data.fetch(2, COVER, lambda: None), SMALL + 2)
    called(data, 3)
    host.put(3, SMALL + 3)
    moved = FetchPlan.of_array(ArrayType((4,), "float32"), (("x",),), placed(1, ["0.0"]))
    np.testing.assert_array_equal(data.fetch(3, moved, lambda: None), SMALL + 3)
    assert link.fetches == {}


def test_a_failure_or_the_end_of_the_stream_ends_a_wait_for_it(host: Host, data: DataLinks) -> None:
    link = called(data, 2)
    looking = Asked(data, 2)
    eventually(lambda: host.store.waiting() == 1)
    looking.stop = BufferDeleted("it was deleted")
    data.wake()
    looking.end()
    assert isinstance(looking.error, BufferDeleted)
    eventually(lambda: host.store.waiting() == 0)
    called(data, 3)
    another = Asked(data, 3)
    eventually(lambda: host.store.waiting() == 1)
    link.end("its process was lost")
    another.end()
    assert isinstance(another.error, PathwaysError)


def test_not_all_values_are_asked_for_with_their_calls(host: Host, data: DataLinks) -> None:
    """
    1. Not big ones.
    2. Nor those that lie on several hosts.
    3. Nor one behind a few that nobody has looked at. The first of them is given up: it may have been donated.
    """
    (link,) = data._links.values()
    big = FetchPlan.of_array(ArrayType((MAX_AHEAD_BYTES,), "int16"), ((),), placed(1, ["0.0"]))
    assert data.ahead.ask(link, 2, big, 1, PROGRAM) == NOT_ASKED
    apart = FetchPlan.of_array(ArrayType((4,), "int16"), (("x",),), placed(1, ["0.0", "1.0"]))
    assert data.ahead.ask(link, 2, apart, 1, PROGRAM) == NOT_ASKED
    ignored: list[int] = []
    data.ahead.ignored = ignored.append
    for buffer in range(2, 2 + MAX_AHEAD):
        called(data, buffer)
    eventually(lambda: host.store.waiting() == MAX_AHEAD)
    assert data.ahead.ask(link, 99, COVER, data.new_request(), PROGRAM) == NOT_ASKED
    assert ignored == [PROGRAM]
    eventually(lambda: host.store.waiting() == MAX_AHEAD - 1)
    called(data, 99)
    host.put(2, SMALL)
    np.testing.assert_array_equal(data.fetch(2, COVER, lambda: None), SMALL)


def test_one_that_is_asked_for_as_its_stream_ends_does_not_wait(data: DataLinks) -> None:
    (link,) = data._links.values()
    link.end("its process was lost")
    data.ahead.ask(link, 2, COVER, data.new_request(), PROGRAM)
    assert data.ahead.take(2, lambda: None) is None


@pytest.mark.parametrize("kind", ["same", "other"])
def test_a_call_that_asks_under_a_number_that_is_taken_does_not_disturb_the_first(
    host: Host, data: DataLinks, kind: str
) -> None:
    """A client that says so twice gets a failure for one of them, and its stream goes on."""
    link = called(data, 2)
    (request,) = link.fetches
    data.launch_early(0, LaunchEarly(1, (), 2 if kind == "same" else 3, (), request, (0,)))
    data.launch_early(0, LaunchEarly(1, (), 4, (), data.new_request(), (17,)))  # no such device
    host.put(4, jax.numpy.zeros(4))
    host.put(5, SMALL + 5)
    np.testing.assert_array_equal(data.fetch(5, COVER, lambda: None), SMALL + 5)
