"""A client and the client service in one process: the upgrade, and the end of either connection, on both sides."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from pathways_ray.client import connection as connection_module
from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.client.connection import Channel
from pathways_ray.client.session import Session
from pathways_ray.controller.channel import ChannelState
from pathways_ray.errors import SessionClosed, WireError
from pathways_ray.ir.types import ArrayType
from pathways_ray.transport.messages import Completed
from tests.unit.controller.test_client_service import LIMIT_S, TOKEN, Service
from tests.waiting import until

KIND = ArgumentType.of(ArrayType((2,), "float32"), False, None, ())


@pytest.fixture(params=["plain", "tls"])
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(connection_module, "LINK_DIAL_LIMIT_S", LIMIT_S)  # also on a busy machine
    made = Service(request.getfixturevalue("certificate") if request.param == "tls" else None)
    yield made
    made.stop()


def connect(service: Service) -> Session:
    scheme, ca = ("grpc://", None) if service.tls is None else ("grpcs://", service.tls.ca)
    return Session.connect(scheme + service.address, TOKEN, ca=ca)


def assert_answers(session: Session) -> None:
    """A launch of a program that was never registered is refused, which goes there and back."""
    (array,) = session.launch(1, [], (KIND,))
    with pytest.raises(WireError, match="names program 1, never registered"):
        array.block_until_ready(timeout=LIMIT_S)


def test_both_ends_move_to_the_link(service: Service) -> None:
    for _ in range(5):
        with connect(service) as session:
            assert_answers(session)
            assert session._connection.state is Channel.ON_LINK
            assert service.state(session.id) is ChannelState.ON_LINK
    until(lambda: not service.core.clients.known)


def test_sessions_that_open_at_once_all_move_to_their_link(service: Service) -> None:
    found: list[Channel] = []

    def one() -> None:
        with connect(service) as session:
            assert_answers(session)
            found.append(session._connection.state)

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert found == [Channel.ON_LINK] * 8


def test_a_client_that_breaks_its_link_ends_its_session_on_both_sides(service: Service) -> None:
    session = connect(service)
    assert_answers(session)
    assert session._connection._link is not None
    session._connection._link.close()
    until(lambda: bool(session.closed_because) and not service.core.clients.known)
    session.close()


def test_a_message_that_no_client_may_send_ends_the_session_with_the_reason(service: Service) -> None:
    session = connect(service)
    assert_answers(session)
    session._connection.outbox.send(Completed((1,)))
    until(lambda: bool(session.closed_because))
    assert "refused" in session.closed_because
    with pytest.raises(SessionClosed, match="refused"):
        session.launch(1, [], (KIND,))
    session.close()
