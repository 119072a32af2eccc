"""Shards whose memory several arrays have, or that peers read.

What a transfer leaves on its device is handed on as it is: the array that arrives is joined of shards of the one that
was sent. So is one that is regrouped. A computation that overwrites one of them would take the others' memory as well,
so it gets a copy, as long as there is another one.

A shard knows who has its memory, as long as they live: the arrays it is in, and what is on its way to one.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from pathways_ray.jax_arrays import shards_of

_HOLDERS = "_pathways_holders"
"""The attribute of a shard which has, by their identity, references to those that have its memory."""

_SHARES = "_pathways_shares"
"""The attribute of what has or had the memory of a shard together with others."""


class OnTheWay(list[Any]):
    """Pieces that stay on this host, between those that send and those that receive them."""


class _Peers:
    """Other hosts, which read a shard at a time of their choosing; nobody says when they have."""


PEERS = _Peers()


def share(shard: Any, *holders: Any) -> None:
    """Notes that these have the memory of a shard."""
    there = {number: holder for number, holder in getattr(shard, _HOLDERS, {}).items() if holder() is not None}
    for holder in holders:
        there[id(holder)] = weakref.ref(holder)
        setattr(holder, _SHARES, True)
    setattr(shard, _HOLDERS, there)


def joined(array: Any, shards: Sequence[Any]) -> Any:
    """The array that was joined of shards; of those that were handed on it has the memory too."""
    for shard in shards:
        if hasattr(shard, _HOLDERS):
            share(shard, array)
    return array


def is_shared(array: Any) -> bool:
    """Whether somebody else has the memory of a shard of an array."""
    if not hasattr(array, _SHARES):
        return False
    holders = [holder() for shard in shards_of(array) for holder in getattr(shard, _HOLDERS, {}).values()]
    return any(holder is not None and holder is not array for holder in holders)
