"""Size and time of plans, by the devices of a program: nothing but its digits should grow with them."""

from __future__ import annotations

import time
from typing import Any

from benchmarks import measure
from benchmarks.scale.controlplane import chain, planned
from pathways_ray.controller.programs import decode_graph
from pathways_ray.ir.exchange import exchange
from pathways_ray.ir.graph import Graph
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.types import ArrayType, Layout, SliceType, Spec
from pathways_ray.transport.messages import encode

DEVICES_PER_HOST = 8
ISLAND = 16  # hosts of each island where there are several
CUTS: dict[str, tuple[Spec, Spec]] = {
    "shard by shard": ((("x",),), (("x",),)),
    "replicated": ((), ()),
    "all to all": ((("x",),), ((), ("x",))),
}
MOST_PARCELS = 1 << 18  # of one host; all to all on more devices makes more than a host could hold


def two_slices(devices: int, cut: tuple[Spec, Spec]) -> tuple[Graph, list[PlacedSlice]]:
    """One computation on each of two slices, and the value between them in another layout."""
    hosts = -(-devices // DEVICES_PER_HOST)
    places = [divmod(k, DEVICES_PER_HOST) for k in range(devices)]
    slices = [
        PlacedSlice.on(SliceType(k + 1, (devices,), ("x",)), k, [Device(k * hosts + h, index) for h, index in places])
        for k in range(2)
    ]
    array = ArrayType((devices, devices), "float32")
    return chain("two slices", slices, array, [Layout(1, cut[0]), Layout(2, cut[1])]), slices


def planning(devices: int, cut: str, rounds: int) -> dict[str, Any]:
    """Bytes and milliseconds of a program, by the devices of its slices."""
    graph, slices = two_slices(devices, CUTS[cut])
    data = encode(graph)
    found: dict[str, list[float]] = {"planning_ms": [], "deriving_ms": []}
    parcels = devices * min(devices, DEVICES_PER_HOST)
    for _ in range(rounds):
        before = time.thread_time()
        made = planned(decode_graph(data), slices, fusion=True)
        found["planning_ms"].append(1e3 * (time.thread_time() - before))
        if cut != "all to all" or parcels < MOST_PARCELS:
            ((edge,),) = (bundle.edges for bundle in made.plans[0].bundles)
            before = time.thread_time()
            exchange(edge, slices[0], slices[1], host=0)
            found["deriving_ms"].append(1e3 * (time.thread_time() - before))
    (message, _) = made.messages.values()
    listed = encode(message.plan) + b"".join(encode(device) for s in slices for device in s.devices)
    return {
        "devices": devices,
        "edge": cut,
        "graph_bytes": len(data),
        "plan_bytes": len(message.plan),
        "plan_bytes_with_lists": len(listed),
        **{name: measure.spread(values) if values else None for name, values in found.items()},
    }
