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
from pathways_ray.client.array_pieces import FetchedArray, Fetching, FetchPlan, plan_of
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
    plans, size = list[FetchPlan](), 0
    for kind in kinds:
        plan = plan_of(kind)
        if len(plan.by_host) != 1 or host not in plan.by_host:
            return None
        plans.append(plan)
        size += plan.nbytes
    return plans if size <= limits.MAX_SERVED_BYTES else None


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
    arrays, fetches, requests, devices = list[FetchedArray](), list[Fetching](), list[int](), list[tuple[int, ...]]()
    try:
        for plan in call.plans:
            array = FetchedArray(plan, sleeper.wake)
            arrays.append(array)
            fetches.append(array.by_host[host])
            requests.append(data.new_request())
            devices.append(plan.by_host[host])
            link.fetches[requests[-1]] = fetches[-1]
        question = wire.ServeCall(key, call.arguments, tuple(requests), tuple(devices), call.inline)
        link.ask(question)
        if link.dead is not None:  # looked at behind the entry: the end of a stream fails what it finds
            fetches[0].failure = link.dead
        data.wait_for(fetches, sleeper, check)
    except PathwaysError as error:
        return error
    finally:
        for request in requests:
            link.fetches.pop(request, None)
    return [array.value() for array in arrays]
