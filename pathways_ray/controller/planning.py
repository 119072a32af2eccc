"""Planning, the controller's slow path: once per program, and in a process of its own unless it is certain to be quick.

`answer` is a pure function of a `PlanRequest`; where it runs is its caller's affair. The controller runs it itself for
a graph of few bytes and references (`plan_if_cheap`). All others go to `controller.planner`, one at a time; meanwhile
they wait in a `plan_queue.PlanQueue`, where tenants take turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from pathways_ray import limits
from pathways_ray.controller import quotas
from pathways_ray.controller.programs import (
    Lowered,
    check_size,
    decode_graph,
    lowered_program,
    placed_graph,
    references,
)
from pathways_ray.controller.scripts import lowered_script, script_texts
from pathways_ray.controller.tenants import Tenant
from pathways_ray.errors import Failure, PathwaysError, ProgramRefused, WireError, to_failure
from pathways_ray.ir.graph import Compute, Graph, Regroup, Result, bodies_in, functions_in
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.script import has_control
from pathways_ray.ir.text import order_text, plan_text

CHEAP_BYTES = 1 << 16
CHEAP_REFERENCES = 250
"""A graph within both is planned at once: every pass is linear in its references but for the search for loops, which
looks at each of them up to 100 times. What else it has is bounded alike: 700 arguments take 60 ms. The worst graph
found took 6 ms."""

MAX_RESULT_BYTES = 32 * limits.MAX_RESULTS
"""The node that names the results of a graph: one that is longer names more than there may be."""


class PlanRequest(msgspec.Struct, frozen=True, array_like=True):
    """A graph to lower and plan, as it came from a client; the slices that it names, as far as the session has them.

    `text` asks for the plan in words, and for nothing else. See `placed_graph` for `kept_bytes`.
    """

    graph: bytes
    slices: tuple[PlacedSlice, ...]
    fusion: bool
    tenant: Tenant
    text: bool = False
    kept_bytes: int = limits.MAX_KEPT_BYTES


class PlanReply(msgspec.Struct, frozen=True, array_like=True):
    """The lowered program, or its plan and order as texts, or a failure; `checked` is False where it is one of the
    functions that came with it, `again` is set where the cause may pass."""

    lowered: Lowered | None = None
    failure: Failure | None = None
    plan: str = ""
    order: str = ""
    checked: bool = True
    again: bool = False


class _Graph(msgspec.Struct):
    """The fields that are looked at before `answer` does. Each is decoded by itself, so only once where a message has
    it again and again."""

    slices: msgspec.Raw
    nodes: msgspec.Raw


class _Slice(msgspec.Struct, array_like=True):
    id: int


_GRAPH = msgspec.msgpack.Decoder(_Graph)
_SLICES = msgspec.msgpack.Decoder(Annotated[list[_Slice], msgspec.Meta(max_length=limits.MAX_SLICES)])
_NODES = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], msgspec.Meta(max_length=limits.MAX_NODES)])
_RESULT = msgspec.msgpack.Decoder(Result)


def request_of(
    graph: bytes,
    places: Mapping[int, PlacedSlice],
    fusion: bool,
    tenant: Tenant,
    text: bool = False,
    kept_bytes: int = limits.MAX_KEPT_BYTES,
) -> PlanRequest:
    """A request with the slices that the graph names. One that is no graph names none, and `answer` says so."""
    try:
        named = [mesh.id for mesh in _SLICES.decode(_GRAPH.decode(graph).slices)]
    except (msgspec.MsgspecError, ValueError, RecursionError):
        named = []
    slices = tuple(places[number] for number in dict.fromkeys(named) if number in places)
    return PlanRequest(graph, slices, fusion, tenant, text, kept_bytes)


def result_count(graph: bytes) -> int:
    """The results of a graph that could not be planned, at most `MAX_RESULTS`: launches of it name them all the same. 0
    for bytes that are no graph."""
    try:
        last = _NODES.decode(_GRAPH.decode(graph).nodes)[-1]
        if memoryview(last).nbytes > MAX_RESULT_BYTES:
            return limits.MAX_RESULTS
        return min(len(_RESULT.decode(last).inputs), limits.MAX_RESULTS)
    except (msgspec.MsgspecError, ValueError, RecursionError, IndexError):
        return 0


def answer(request: PlanRequest, graph: Graph | None = None) -> PlanReply:
    """Lowers and plans. `graph` is that of the request, if it was decoded before."""
    try:
        return _answered(request, graph if graph is not None else decode_graph(request.graph))
    except PathwaysError as error:
        return PlanReply(failure=to_failure(error))
    except MemoryError:
        raise
    except Exception as error:  # a malformed graph may trip the passes anywhere; it must not end its process
        return PlanReply(failure=Failure("WireError", f"program refused: {type(error).__name__}: {error}"))


def _answered(request: PlanRequest, graph: Graph) -> PlanReply:
    count = len(graph.nodes) + sum(len(body.nodes) for body in bodies_in(graph.nodes))
    refused = quotas.nodes(request.tenant, count, graph.name)
    if refused is not None:
        return PlanReply(failure=refused)
    check_trust(request.tenant, graph)
    if graph.decides:  # `split` says that of segments: a host ends that is to say a value which is no whole number
        raise WireError(f"program {graph.name[:100]!r} says that results of it decide, which is not a client's to say")
    slices = {placed.mesh.id: placed for placed in request.slices}
    how = request.fusion, request.kept_bytes
    if has_control(graph):
        if request.text:
            plan, order = script_texts(graph, slices, *how)
            return PlanReply(plan=plan, order=order)
        return PlanReply(lowered_script(graph, slices, *how))
    check_size(graph)
    lowered, plans = placed_graph(graph, slices, *how)
    if request.text:
        return PlanReply(plan=plan_text(plans), order=order_text({p.island: p for p in plans}))
    return PlanReply(lowered_program(graph, lowered, plans, slices))


def check_trust(tenant: Tenant, graph: Graph) -> None:
    """Raises `ProgramRefused` for a graph with host functions of a tenant that the operator does not trust."""
    for part in (part for recipe in graph.recipes for part in functions_in(recipe.parts)):
        if part.host_limit_ms and not tenant.trusted:
            raise ProgramRefused(
                f"program {graph.name!r} has the host function {part.name}, and hosts run Python only of tenants that "
                f"the operator trusts; {tenant.name!r} is not one"
            )


def _plain(graph: Graph) -> int:
    """Nodes that compute nothing, and the shards that some of them are made of."""
    shards = sum(len(node.inputs) + len(node.shards) for node in graph.nodes if isinstance(node, Regroup))
    return shards + sum(not isinstance(node, Compute) for node in graph.nodes)


def plan_if_cheap(request: PlanRequest) -> PlanReply | None:
    """The answer, or None where it may take longer than others can wait."""
    if len(request.graph) > CHEAP_BYTES:
        return None
    try:
        graph = decode_graph(request.graph)
        if max(references(graph), _plain(graph)) > CHEAP_REFERENCES or has_control(graph):
            return None
    except PathwaysError as error:
        return PlanReply(failure=to_failure(error))
    return answer(request, graph)
