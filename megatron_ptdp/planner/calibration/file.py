"""The TOML of a measured cluster, with the origin of each figure beside it."""

from __future__ import annotations

from megatron_ptdp.config.cluster import Cluster, Operations


def cluster_text(cluster: Cluster) -> str:
    """The TOML of a cluster file."""
    device = cluster.device
    lines = [
        "# Measured through the runtime. Shared machines wander: measure again when plans and runs disagree.",
        f'source = "{cluster.source}"',
        f'software = "{cluster.software}"',
        *(() if cluster.levels else ("network = []  # one device",)),
        "",
        "[device]",
        f'name = "{device.name}"',
        _field("peak_flops", device.peak_flops, "the limit of products alone"),
        _field("matrix_efficiency", device.matrix_efficiency, "(r) fitted to the steps of the reference models"),
        f"units = {device.units}",
        f"tiles = {[list(tile) for tile in device.tiles]}",
        f"tile_depth = {device.tile_depth}",
        _field("memory_bytes", device.memory_bytes, "given"),
        _field("memory_bandwidth", device.memory_bandwidth, "an elementwise pass over what a microbatch has"),
        _field("memory_efficiency", device.memory_efficiency, "(r)"),
        _field("kernel_overhead", device.kernel_overhead, "(r)"),
        _field("launch", device.launch, "an empty launch that is waited for"),
        _field("reserved_bytes", device.reserved_bytes),
        _field("fragmentation", device.fragmentation),
        _field("action", device.action, "what a launch of a schedule takes from devices that compute"),
        _field("step", device.step, "(r) of an iteration"),
    ]
    for level in cluster.levels:
        lines += ["", "[[network]]", f'name = "{level.name}"', f"size = {level.size}"]
        lines += [_field("bandwidth", level.bandwidth, "of all-reduces"), "efficiency = 1.0"]
        lines += [_field("latency", level.latency, "of a step of an all-reduce")]
        lines += [_field("message_bandwidth", level.message_bandwidth, "of messages between devices")]
        lines += [_field("message_latency", level.message_latency)]
        lines += [_field("message_share", level.message_share, "of its time it takes from devices that compute")]
        lines += [f"collectives = {level.collectives}  # gradients are summed array by array"] * (level.collectives > 1)
    lines += ["", "[operations]                 # not measured"]
    lines += [_field(name, getattr(cluster.operations, name)) for name in Operations.__dataclass_fields__]
    return "\n".join(lines) + "\n"


def _field(name: str, value: float, why: str = "") -> str:
    return f"{name} = {value:.4g}" + (f"  # {why}" if why else "")
