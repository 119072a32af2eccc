"""A cluster: its device, the levels of network between devices, power, price and failures; and the software on it.

A cluster is a tree. Level 0 joins `size` devices (a server, a torus), level 1 joins such groups, and so on; the last
level joins whatever there is. Rates are per device and direction: a device has its share of its group's links, so eight
devices behind eight cards of 25 GB/s have 25 GB/s each, and behind one card 3.1 GB/s each.

All constants of the time model live here and come from the cluster file, each with its source beside it. They are set
once per cluster, never per model or plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ptdp.errors import BadFigure


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator.

    Attributes:
        peak_flops: matrix FLOP/s of the training precision, as the maker prints it.
        matrix_efficiency: share of the peak that a very large product reaches in training (clock under load included).
        units: independent matrix units (streaming multiprocessors; matrix units of a TPU core; CPU cores).
        tiles: (rows, columns, relative speed) that one unit works on at a time; the best is taken.
        tile_depth: inner dimension whose time equals the start and the end of a tile.
        memory_bytes: memory a process can have.
        memory_bandwidth: bytes/s, as the maker prints it.
        memory_efficiency: share of it that a large copy reaches.
        kernel_overhead: seconds in which a kernel starts and ends; nothing runs beside it.
        launch: seconds the host needs per kernel. Kernels shorter than that wait for the host.
        reserved_bytes: what the runtime and the collectives library hold.
        fragmentation: share of the activations that the allocator loses.
        action: seconds a device loses for each action of a schedule where a stage is one compiled program: the
            runtime's work for a launch, as far as it takes time from the device.
        step: seconds of an iteration that belong to no microbatch and no byte: its beginning, the launches of its end.
    """

    name: str
    peak_flops: float
    matrix_efficiency: float
    units: int
    tiles: tuple[tuple[int, int, float], ...]
    tile_depth: int
    memory_bytes: float
    memory_bandwidth: float
    memory_efficiency: float
    kernel_overhead: float
    launch: float
    reserved_bytes: float
    fragmentation: float
    action: float = 0.0
    step: float = 0.0


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the network.

    Attributes:
        name: for people.
        size: devices joined up to and including this level; 0 for no limit.
        bandwidth: bytes/s per device and direction, as printed.
        efficiency: share of it that a large collective reaches.
        latency: seconds of one step of a collective, software included.
        oversubscription: of a tree: bandwidth below over bandwidth above; 1 for a full fat tree.
        message_bandwidth: bytes/s of a message between stages, where another mechanism than the collectives' carries
            it; 0: as `rate`, with `latency`.
        message_latency: seconds of such a message beside its bytes.
        collectives: into how many collectives a device's gradients are cut here; each has its latency.
        message_share: share of its time in which the devices at its ends stand still, although others overlap it.
    """

    name: str
    size: int
    bandwidth: float
    efficiency: float
    latency: float
    oversubscription: float = 1.0
    message_bandwidth: float = 0.0
    message_latency: float = 0.0
    message_share: float = 0.0
    collectives: int = 1

    @property
    def rate(self) -> float:
        """Bytes/s a device gets when all devices use this level."""
        return self.bandwidth * self.efficiency / self.oversubscription


@dataclass(frozen=True, slots=True)
class Operations:
    """Power, price and failures of a cluster.

    Attributes:
        power_busy, power_idle: watts per device in training and waiting, with its share of the server and the cooling.
        price: per device hour, in the currency of the file.
        mtbf_hours: mean time between failures of one device, its share of the server included.
        checkpoint_bandwidth: bytes/s per device to storage, and in all at most `checkpoint_limit`.
        restart_seconds: from a failure until training goes on, work lost since the checkpoint not included.
    """

    power_busy: float
    power_idle: float
    price: float
    mtbf_hours: float
    checkpoint_bandwidth: float
    checkpoint_limit: float
    restart_seconds: float


@dataclass(frozen=True, slots=True)
class Software:
    """A training system, as far as time and memory show it. Bytes are per parameter.

    Attributes:
        weight_bytes, gradient_bytes, optimizer_bytes: stored; gradients as they are accumulated and reduced.
        optimizer_traffic: bytes read and written by one optimizer step, casts, clipping and checks included.
        flash_attention: scores never go to memory.
        attention_efficiency: share of the rate of other products that the fused products with the scores reach.
        fused_accumulation: the product that makes a weight's gradient adds it to the sum.
        forward_overlap, backward_overlap: share of tensor-parallel communication that computation hides, where there
            is computation to hide it.
        pipeline_overlap, data_overlap: the same for messages between stages and for gradients.
        gather_overlap: the same for the gathers of ZeRO-3, which are always prefetched.
        flat_gather: ZeRO-3 gathers by one ring through all devices instead of one per rail.
        paired_messages: a stage sends to a neighbour and receives from it at the same time; otherwise one after the
            other.
        wait_seconds: a device idles so long after a blocking message: the host waits for it before it launches again.
        kernels_forward, kernels_inputs, kernels_weights: kernels the host launches for one layer in each pass.
        element_bytes: of an activation.
        compiled_stages: an action of a schedule is one compiled program. It costs `Device.action`; forward and backward
            of the last stage are one action where one follows the other; and where a schedule splits the backward
            pass, the first stage has no gradients of inputs to give.
        inputs_share: of a compiled stage's backward pass, the gradients of its inputs.
    """

    name: str
    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    optimizer_traffic: float
    flash_attention: bool
    fused_accumulation: bool
    forward_overlap: float
    backward_overlap: float
    pipeline_overlap: float
    data_overlap: float
    gather_overlap: float
    flat_gather: bool
    wait_seconds: float
    kernels_forward: int
    kernels_inputs: int
    kernels_weights: int
    element_bytes: int = 2
    compiled_stages: bool = False
    inputs_share: float = 0.5
    attention_efficiency: float = 1.0
    paired_messages: bool = True

    def __hash__(self) -> int:  # one field, for the same reason as that of Cluster
        return hash(self.name)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices of one kind, joined by levels of network."""

    name: str
    device: Device
    levels: tuple[Level, ...]
    operations: Operations
    software: str
    source: str = ""

    def __hash__(self) -> int:  # few fields: clusters are looked up in tables often
        return hash((self.name, self.device.name, len(self.levels)))

    def __post_init__(self) -> None:
        names = [level.name for level in self.levels]
        if twice := [name for name in names if names.count(name) > 1]:
            raise BadFigure(
                f"cluster {self.name!r}: {len(twice)} networks are named {twice[0]!r}; name each differently"
            )
        inner = 1
        for position, level in enumerate(self.levels):
            last = position == len(self.levels) - 1
            if level.size <= inner and not (last and level.size == 0):
                raise BadFigure(
                    f"cluster {self.name!r}: network {level.name!r} joins {level.size} devices, "
                    f"must be more than the {inner} of the level below"
                )
            if level.size % inner:
                raise BadFigure(
                    f"cluster {self.name!r}: network {level.name!r} must join a multiple of {inner} devices"
                )
            inner = level.size or inner

    @property
    def limit(self) -> int:
        """Most devices there are; 0 for no limit."""
        return self.levels[-1].size if self.levels else 1
