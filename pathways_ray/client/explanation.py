"""Text of `explain`: the devices, bytes, order and peak memory of a program."""

from __future__ import annotations

from pathways_ray.client.graph_builder import BuiltProgram
from pathways_ray.ir.memory import peak_bytes
from pathways_ray.ir.passes import lower
from pathways_ray.ir.passes.split import split
from pathways_ray.ir.script import has_control
from pathways_ray.ir.text import graph_text
from pathways_ray.transport.messages import Explained


def explanation(built: BuiltProgram, reply: Explained) -> str:
    """The explanation of a program that the controller has placed as `reply` says."""
    whole = built.graph
    graphs = [lower(one, fusion=False) for one in (split(whole)[1] if has_control(whole) else [whole])]
    peaks = [peak_bytes(graph) for graph in graphs]
    peak = {mesh.id: max(one.get(mesh.id, 0) for one in peaks) for mesh in whole.slices}
    used = {s.id for s in built.graph.slices}
    slices = {source.slice.id: source.slice for source in built.sources}
    slices.update({kind.slice.id: kind.slice for kind in built.result_kinds if kind.slice is not None})
    lines = [f"program {whole.name}: {len(built.graph.nodes)} nodes"]
    for place in sorted((s for s in slices.values() if s.id in used), key=lambda s: s.id):
        lines.append(
            f"  {place}: island {place.island}, devices {', '.join(place.devices)}; arrays take at most "
            f"{peak.get(place.id, 0)} bytes a device"
        )
    moved = [line for graph in graphs for line in graph_text(graph).splitlines() if "= transfer" in line]
    lines.append(f"  transfers and reshards: {len(moved)}")
    lines += [f"  {line}" for line in moved]
    for host, temporary in sorted(reply.temporary_bytes.items()):
        lines.append(f"  host {host}: computations need up to {temporary} bytes of their own on a device")
    lines.append("  order:")
    lines += [f"    {line}" for line in reply.order.splitlines()]
    return "\n".join(lines)
