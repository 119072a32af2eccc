"""Event loops that stop rather than lose what a callback would have sent."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from pathways_ray.errors import WireError
from pathways_ray.transport import outboxes
from pathways_ray.transport.frames import LinkLost
from pathways_ray.transport.loops import begin, stop_on_errors, vital
from pathways_ray.transport.messages import Prepared

UNSAYABLE = Prepared(-(1 << 63) - 1)


def test_a_message_that_cannot_be_encoded_ends_the_loop(capfd: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        stop_on_errors(asyncio.get_running_loop())
        outboxes.FanOut().send(UNSAYABLE)
        await asyncio.sleep(60)

    with pytest.raises(RuntimeError, match="Event loop stopped"):
        asyncio.run(story())


def test_what_nobody_awaits_ends_the_loop_too() -> None:
    """As the answer of the resource manager does whose consequences fail: its client would wait for ever."""
    tasks: set[asyncio.Task[None]] = set()

    async def work(wrong: bool) -> None:
        if wrong:
            raise KeyError("a consequence")

    async def story() -> None:
        stop_on_errors(asyncio.get_running_loop())
        begin(work(False), tasks)
        await asyncio.sleep(0.01)
        assert not tasks
        begin(work(True), tasks)
        await asyncio.sleep(60)

    with pytest.raises(RuntimeError, match="Event loop stopped"):
        asyncio.run(story())
    assert not tasks


@pytest.mark.parametrize("error", [KeyError("what a message led to"), LinkLost("reset"), WireError("no message")])
def test_what_a_links_messages_lead_to_ends_the_loop_and_its_own_errors_do_not(error: Exception) -> None:
    """The link would be opened again, and whoever waits for what came of the message would wait on."""

    async def link() -> None:
        with vital():
            raise error

    async def story() -> int:
        stop_on_errors(asyncio.get_running_loop())
        with contextlib.suppress(type(error)):
            await link()
        await asyncio.sleep(0.01)
        return 1

    if isinstance(error, KeyError):
        with pytest.raises(RuntimeError, match="Event loop stopped"):
            asyncio.run(story())
    else:
        assert asyncio.run(story()) == 1


def test_errors_of_others_are_only_printed() -> None:
    """gRPC's own callbacks raise now and then, to no harm."""

    async def story() -> int:
        loop = asyncio.get_running_loop()
        stop_on_errors(loop)
        loop.call_soon(lambda: 1 // 0)
        await asyncio.sleep(0.01)
        return 1

    assert asyncio.run(story()) == 1
