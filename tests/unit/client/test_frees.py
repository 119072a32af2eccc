"""Frees that follow each other leave as one."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pathways_ray.client.frees import MAX_FREED, with_frees_joined
from pathways_ray.transport.messages import Free, Launch, Message

LAUNCHES = st.builds(Launch, st.integers(1, 3), st.just(1), st.just(()), st.just(1))
FREES = st.builds(Free, st.lists(st.integers(1, 9), max_size=4).map(tuple))


def spread(messages: list[Message]) -> list[Message]:
    """Each buffer in a message of its own."""
    found: list[Message] = []
    for message in messages:
        found += [Free((buffer,)) for buffer in message.buffers] if isinstance(message, Free) else [message]
    return found


@given(st.lists(st.one_of(LAUNCHES, FREES)))
def test_the_same_is_freed_between_the_same_launches(messages: list[Message]) -> None:
    joined = with_frees_joined(messages)
    assert spread(joined) == spread(messages)
    kinds = [type(message) for message in joined]
    assert (Free, Free) not in pairwise(kinds)


def test_a_message_names_no_more_than_the_controller_takes_at_once() -> None:
    frees: list[Message] = [Free((number,)) for number in range(2 * MAX_FREED + 1)]
    joined = with_frees_joined(frees)
    assert [len(message.buffers) for message in joined if isinstance(message, Free)] == [MAX_FREED] * 2 + [1]
    assert spread(joined) == frees


def test_nothing_is_sent_for_nothing() -> None:
    assert with_frees_joined([Free(())]) == []
    assert with_frees_joined([]) == []
