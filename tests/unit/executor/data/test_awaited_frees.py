"""Uploads that wait for what their session has freed: in their order, and not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pathways_ray.errors import QuotaExceeded
from pathways_ray.executor.data.awaited_frees import AwaitedFrees, FreesAwaited

FULL = FreesAwaited(QuotaExceeded("full"))


def test_uploads_of_a_session_begin_in_their_order_and_those_of_others_between() -> None:
    """
    1. Two uploads of session 7 wait, and one of session 8, which fits soon.
    2. The second of session 7 would fit: it is not looked at before the first.
    """
    begun: list[str] = []
    room: set[str] = {"second", "other"}
    awaited = AwaitedFrees()

    def begin(name: str) -> Callable[[], None]:
        def attempt() -> None:
            if name not in room:
                raise FULL
            begun.append(name)

        return attempt

    async def scene() -> None:
        waiting = [
            asyncio.ensure_future(awaited.open(session, name, begin(name), FULL, 60.0))
            for session, name in ((7, "first"), (7, "second"), (8, "other"))
        ]
        await waiting[2]
        assert begun == ["other"]
        assert awaited.is_ahead(7, "second")
        assert not awaited.is_ahead(7, "first")
        room.add("first")
        await asyncio.gather(*waiting)

    asyncio.run(scene())
    assert begun == ["other", "first", "second"]
    assert not awaited.is_ahead(7, "third")


def test_an_upload_for_which_nothing_goes_is_refused() -> None:
    awaited = AwaitedFrees()

    def begin() -> None:
        raise FULL

    with pytest.raises(FreesAwaited, match="full"):
        asyncio.run(awaited.open(7, "upload", begin, FULL, 0.02))
    assert not awaited.is_ahead(7, "another")


def test_an_upload_that_is_given_up_leaves_those_before_it_their_turn() -> None:
    awaited, begun = AwaitedFrees(), list[str]()

    async def scene() -> None:
        def begin() -> None:
            if not second.done():
                raise FULL
            begun.append("first")

        first = asyncio.ensure_future(awaited.open(7, "first", begin, FULL, 60.0))
        second = asyncio.ensure_future(awaited.open(7, "second", begin, FULL, 60.0))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)

    asyncio.run(scene())
    assert begun == ["first"]
