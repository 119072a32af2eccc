"""Calls that are made for their values alone: their host answers with these, and nothing is launched.

`pw.padded` gives its caller values, and keeps no array. Such a call is asked of its host (`ServeCall`) where calls may
be handed to that (`EarlyCalls`), its arguments are there or go along, and its results are small and all on that host.
Otherwise, or where anything goes wrong, it is launched as others are, and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pathways_ray import limits
from pathways_ray.client.array_pieces import FetchedArray, FetchPlan, plan_of
from pathways_ray.client.local_reader import Sleeper
from pathways_ray.errors import PathwaysError
from pathways_ray.transport import messages as wire

if TYPE_CHECKING:
    from pathways_ray.client.argument_types import ArgumentType
    from pathways_ray.client.data import DataLinks


class Server(NamedTuple):
    """A host that serves calls of a program, which it knows as `key`."""

    host: int
    key: int


class ServedCall(NamedTuple):
    """A call as its host gets it: the numbers of its arguments, those that go along, and how its results are read."""

    server: Server
    arguments: tuple[int, ...]
    inline: tuple[wire.InlineArgument, ...]
    plans: Sequence[FetchPlan]


def plans_on(kinds: Sequence[ArgumentType], host: int) -> Sequence[FetchPlan] | None:
    """The ways to read results of these types; None where some are elsewhere than on a host, or large."""
    plans = [plan_of(kind) for kind in kinds]
    if any(len(plan.by_host) != 1 or host not in plan.by_host for plan in plans):
        return None
    return plans if sum(plan.nbytes for plan in plans) <= limits.MAX_SERVED_BYTES else None


def values_of(
    data: DataLinks, call: ServedCall, check: Callable[[], None]
) -> list[np.ndarray[Any, Any]] | PathwaysError | None:
    """The values of the results of a call, as its host says them; the failure with which it does not; None where there
    is no stream to it.

    Args:
        check: raises when there is no more point in waiting.
    """
    host, key = call.server
    if (link := data.link_of(host)) is None:
        return None
    sleeper = Sleeper()
    told = data.waker(sleeper)
    arrays = [FetchedArray(plan, told) for plan in call.plans]
    fetches = [array.by_host[host] for array in arrays]
    requests = tuple([data.new_request() for _ in arrays])
    devices = tuple([plan.by_host[host] for plan in call.plans])
    try:
        for request, fetching in zip(requests, fetches, strict=True):
            link.fetches[request] = fetching
        data.ask(link, wire.ServeCall(key, call.arguments, requests, devices, call.inline), link.is_local)
        if link.dead is not None:  # looked at behind the entry: the end of a stream fails what it finds
            fetches[0].failure = link.dead
        data.wait_for(fetches, sleeper, check)
    except PathwaysError as error:
        return error
    finally:
        for request in requests:
            link.fetches.pop(request, None)
    return [array.value() for array in arrays]
