"""Estimates a plan: memory, time by part, rates, days, energy, money.

    estimate(question, plan) = memory of the stages
                             + time of the pipeline (work of the stages, their schedule)
                             + gradients over the data axis + the shared embedding + the optimizer

Nothing here decides; `search` compares estimates and `reasons` puts them into words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_ptdp.config.cluster import Cluster, Software
from megatron_ptdp.config.model import Model
from megatron_ptdp.planner import simulated
from megatron_ptdp.planner.layers import Cost, Split, embedding_cost, layer_cost, logits_cost
from megatron_ptdp.planner.memory import StageMemory, device_parameters, stage_layers, stage_memory
from megatron_ptdp.planner.network import Group, all_reduce, crossed, flat_gather, gather, message
from megatron_ptdp.planner.operations import copy_seconds
from megatron_ptdp.planner.pipeline import StageWork, Work, bounded, has_closed_form, placement
from megatron_ptdp.planner.plan import Plan
from megatron_ptdp.schedules import rules_of

DAY = 86400.0


@dataclass(frozen=True)
class Question:
    """A model, the devices of a cluster, a batch and the tokens of the run: everything that a plan is estimated for."""

    model: Model
    cluster: Cluster
    software: Software
    devices: int
    batch: int
    tokens: float = 300e9

    def __hash__(self) -> int:  # the parts are large; their names are distinct enough for a table
        return hash((self.model.name, self.cluster.name, self.devices, self.batch))


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Seconds of one iteration on the busiest device; the parts add up to the whole.

    Attributes:
        compute: forward, recomputed and backward work.
        tensor, pipeline, data: communication that computation does not hide; `data` holds the shared embedding's too.
        bubble: waiting for other stages.
        optimizer: one pass over its state; on small machines what else an iteration costs once (`Device.step`).
    """

    compute: float
    tensor: float
    pipeline: float
    data: float
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.compute + self.tensor + self.pipeline + self.data + self.bubble + self.optimizer


@dataclass(frozen=True, slots=True)
class Estimate:
    """The figures of one plan.

    Attributes:
        simulated: whether the pipeline's time comes from the event simulator rather than the closed form.
        closed_form: seconds of an iteration by the closed form.
        hardware_flops, model_flops: FLOP/s per device: what runs, recomputation included (as PTD-P prints); and what
            the model needs, without it.
    """

    plan: Plan
    memory: StageMemory
    limit: float
    time: TimeSplit
    simulated: bool
    closed_form: float
    hardware_flops: float
    model_flops: float
    peak_flops: float
    tokens_per_second: float
    days: float
    energy: float
    price: float

    @property
    def fits(self) -> bool:
        return self.memory.most <= self.limit

    @property
    def missing(self) -> float:
        """Bytes that the fullest device lacks; negative when it fits."""
        return self.memory.most - self.limit

    @property
    def seconds(self) -> float:
        return self.time.total


@lru_cache(maxsize=8192)
def stage_costs(
    model: Model, cluster: Cluster, software: Software, split: Split, pipeline: int, chunks: int
) -> tuple[Cost, ...]:
    """The cost of each stage for one microbatch: its layers, and the embedding and the logits at the ends."""
    plan = Plan(pipeline=pipeline, chunks=chunks)
    stages, last = [], plan.stages - 1
    for stage in range(plan.stages):
        cost, layers = Cost(), stage_layers(plan, model, stage)
        for layer in dict.fromkeys(layers):
            cost += layer_cost(model, layer, split, cluster, software).times(layers.count(layer))
        if stage == 0:
            cost += embedding_cost(model, split, cluster, software)
        if stage == last:
            cost += logits_cost(model, split, cluster, software)
        stages.append(cost)
    return tuple(stages)


def split_of(plan: Plan) -> Split:
    later = rules_of(plan.schedule).splits_backward
    return Split(plan.tensor, plan.microbatch, plan.sequence_parallel, plan.recompute, later)


def message_bytes(question: Question, plan: Plan) -> float:
    """Bytes of one microbatch between two stages: with an encoder, its tokens and the decoder's cross all boundaries,
    as in the trainer (`models.t5`)."""
    model = question.model
    return float(question.software.element_bytes * plan.microbatch * model.tokens_per_example * model.hidden)


def boundary_seconds(question: Question, plan: Plan) -> list[tuple[float, float]]:
    """Seconds of one activation across each boundary between stages (b s h elements, or 1/t of it per device); and
    seconds in which its stages stand still although it is overlapped."""
    cluster, size = question.cluster, message_bytes(question, plan) / plan.token_slices
    levels = crossed(cluster, plan.tensor * plan.data, plan.pipeline)
    if plan.sequence_parallel:  # each device holds 1/t anyway, and nothing is gathered
        seconds = {level: message(cluster, level, size / plan.tensor) for level in set(levels)}
    else:
        senders = plan.tensor if plan.scatter_gather else 1
        seconds = {level: message(cluster, level, size, senders) for level in set(levels)}
    return [(seconds[level], level.message_share * seconds[level]) for level in levels]


def action_costs(question: Question, plan: Plan) -> tuple[Cost, ...]:
    """`stage_costs` of a plan, with what its actions cost where a stage is one compiled program."""
    costs = stage_costs(question.model, question.cluster, question.software, split_of(plan), plan.pipeline, plan.chunks)
    if plan.token_slices > 1:  # a slice is taken to run as efficiently as the whole
        costs = tuple(cost.times(1 / plan.token_slices) for cost in costs)
    if not question.software.compiled_stages:
        return costs
    rules, action = rules_of(plan.schedule), question.cluster.device.action
    made = []
    for stage, cost in enumerate(costs):
        apart = _forwards_apart(plan) if stage == len(costs) - 1 else 1.0
        more = Cost(apart * action, action)
        if stage == len(costs) - 1 and plan.recompute == "full" and plan.pipeline > 1:
            head = logits_cost(question.model, split_of(plan), question.cluster, question.software)
            again = apart / plan.token_slices
            cost += Cost(0.0, again * head.forward, inputs_tensor=again * head.forward_tensor)
        if rules.splits_backward:
            back = cost.inputs + cost.weights
            inputs = question.software.inputs_share * back if stage else 0.0  # the first stage has none to give
            weights = back - inputs
            if plan.recompute == "full":  # both parts compute that again, and W goes the whole way back
                inputs = cost.inputs if stage else 0.0
                weights = back + (cost.inputs_tensor if stage else 0.0)
            cost = replace(cost, inputs=inputs, weights=weights + action)
        made.append(cost + more)
    return tuple(made)


def _forwards_apart(plan: Plan) -> float:
    """The share of a compiled last stage's microbatches whose forward pass is a launch of its own. The backward passes
    of the others have it inside (`parallel.action_order.fused_last_stage`), and where layers are recomputed these alone
    do not compute the logits again. Of looped-bfs that is one microbatch, which is charged like the rest."""
    rules = rules_of(plan.schedule)
    if rules.fuses_last_stage:
        return 0.0
    if plan.recompute != "full" or plan.schedule == "looped-bfs" or plan.token_slices > 1:
        return 1.0  # later slices take the keys and values of a forward pass
    if plan.schedule == "dualpipe-v":  # whose last stage splits the backward passes of the first p - 1
        return (plan.pipeline - 1) / plan.microbatches
    return float(rules.splits_backward)


def pipeline_work(question: Question, plan: Plan) -> tuple[Work, float]:
    """The work of each stage for one microbatch, or slice of one; and the seconds a message blocks its stage.

    A message that is not hidden blocks its stage once forward and once backward where sending to one neighbour and
    receiving from it happen at the same time (Megatron-LM, send_forward_recv_backward), and twice where they follow one
    another (DeepSpeed's TrainSchedule: SendGrad, RecvActivation, …). The slowest boundary sets the pace, so each stage
    is charged for it.
    """
    costs = action_costs(question, plan)
    sent = boundary_seconds(question, plan) or [(0.0, 0.0)]
    overlap = question.software.pipeline_overlap
    waits = question.software.wait_seconds if plan.pipeline > 1 else 0.0
    hidden = overlap * sum(seconds for seconds, _ in sent) / len(sent)
    turns = 1 if question.software.paired_messages else 2
    blocked = (1 - overlap) * (turns * max(sent)[0] + waits) + overlap * max(still for _, still in sent)
    stages = tuple(
        StageWork(
            cost.forward + cost.forward_tensor + blocked, cost.inputs + cost.inputs_tensor + blocked, cost.weights
        )
        for cost in costs
    )
    return Work(stages, placement(plan), hidden), blocked


def data_seconds(question: Question, plan: Plan, free_per_microbatch: float, owned: float) -> float:
    """Seconds of communication over the data axis that is exposed, per iteration.

    ZeRO 0 sums the gradients once. ZeRO 1 scatters their sum and gathers new weights. ZeRO 2 scatters for each
    microbatch. ZeRO 3 gathers weights forward, for what is recomputed, and backward, and scatters gradients, for each
    microbatch, the next layer's while one computes.

    What is done once per iteration hides behind the microbatches of `overlap_window`. `free_per_microbatch` is
    seconds in which the links carry nothing else.
    """
    if plan.data == 1:
        return 0.0
    cluster, software = question.cluster, question.software
    group, m = Group(plan.data, plan.tensor), plan.microbatches
    gradients, weights = owned * software.gradient_bytes, owned * software.weight_bytes
    if plan.zero == 3:
        gathered = flat_gather if software.flat_gather else gather
        passes = 3 if plan.recompute == "full" else 2
        each = passes * gathered(cluster, group, weights) + gathered(cluster, group, gradients)
        return m * (each - software.gather_overlap * min(each, free_per_microbatch))
    scatters = m if plan.zero == 2 else 1
    if plan.zero:
        seconds = scatters * gather(cluster, group, gradients, True) + gather(cluster, group, weights, True)
    else:
        seconds = all_reduce(cluster, group, gradients, True)
    return seconds - software.data_overlap * min(seconds, scatters * overlap_window(plan) * free_per_microbatch)


def _free(plan: Plan, work: Work, costs: tuple[Cost, ...], pipeline_seconds: float, blocked: float) -> float:
    """Seconds per microbatch, waiting included, in which no device has tensor-parallel communication or messages."""
    taken = [0.0] * plan.pipeline
    for cost, at in zip(costs, work.placement, strict=True):
        taken[at] += cost.tensor + cost.hidden + 2 * blocked
    return max(0.0, pipeline_seconds / plan.units - max(taken))


def overlap_window(plan: Plan) -> float:
    """Microbatches of work behind which gradients can be reduced, and new weights gathered.

    Without chunks that is the last microbatch: before its backward pass no gradient is whole. With chunks, a chunk is
    done while the others still have a group of microbatches to go: as many as stages when interleaved (Megatron-Core
    overlaps both with interleaved schedules), all of them when looped, whose point this is (Lamy-Poirier 2023,
    section 4.2).
    """
    if plan.chunks == 1 or rules_of(plan.schedule).v_placement:
        return 1.0
    group = plan.microbatches if plan.schedule == "looped-bfs" else min(plan.pipeline, plan.microbatches)
    return 1.0 + (group - 1) * (plan.chunks - 1) / plan.chunks


def shared_embedding(question: Question, plan: Plan) -> tuple[Group, float]:
    """The devices that sum the gradients of the matrix which the first and the last stage share, and its bytes on each;
    one device and none, where there is no other stage, or both are on one device."""
    if plan.pipeline == 1 or not question.model.tied or rules_of(plan.schedule).v_placement:
        return Group(1), 0.0
    size = question.software.gradient_bytes * question.model.vocabulary * question.model.hidden / plan.tensor
    return Group(2, plan.tensor * plan.data * (plan.pipeline - 1)), size


def embedding_seconds(question: Question, plan: Plan) -> float:
    """Seconds in which the first and the last stage sum the gradients of the matrix they share."""
    return all_reduce(question.cluster, *shared_embedding(question, plan))


def time_split(question: Question, plan: Plan, pipeline_seconds: float | None = None) -> TimeSplit:
    """Seconds of an iteration by part; the pipeline's by the closed form, where the schedule has one, unless its
    seconds are given."""
    work, blocked = pipeline_work(question, plan)
    total = pipeline_seconds
    if total is None:
        total = bounded(plan, work) if has_closed_form(plan) else simulated.pipeline_seconds(plan, work)
    per_device = work.per_device()
    busiest = max(range(plan.pipeline), key=lambda position: per_device[position].total)
    costs = action_costs(question, plan)
    own = [cost for cost, at in zip(costs, work.placement, strict=True) if at == busiest]
    m = plan.units
    compute, tensor = m * sum(cost.compute for cost in own), m * sum(cost.tensor for cost in own)
    messages = m * 2 * len(own) * blocked
    positions = {0, min(1, plan.pipeline - 1), plan.pipeline - 1}
    owned = max(device_parameters(plan, question.model, position) for position in positions)
    updates = simulated.updates(plan)
    data = updates * data_seconds(question, plan, _free(plan, work, costs, total, blocked), owned)
    traffic = owned * question.software.optimizer_traffic / (plan.data if plan.zero else 1)
    return TimeSplit(
        compute=compute,
        tensor=tensor,
        pipeline=messages,
        data=data + embedding_seconds(question, plan),
        bubble=max(0.0, total - compute - tensor - messages),
        optimizer=updates * copy_seconds(question.cluster.device, traffic) + question.cluster.device.step,
    )


def estimate(question: Question, plan: Plan, pipeline_seconds: float | None = None) -> Estimate:
    """The figures of a legal plan. `pipeline_seconds`: the event simulator's result, where there is one."""
    model, cluster = question.model, question.cluster
    time = closed = time_split(question, plan)
    if pipeline_seconds is not None:
        time = time_split(question, plan, pipeline_seconds)
    tokens = plan.batch * model.tokens_per_example
    days = question.tokens / tokens * time.total / DAY
    hours = days * 24 * plan.devices
    operations = cluster.operations
    working = (time.compute + time.optimizer) / time.total
    # Fused attention has no scores to run again: `selective` is `none` then, as for the time (`layers.layer_cost`).
    fused = question.software.flash_attention and plan.recompute == "selective"
    again = "none" if fused else plan.recompute
    watts = operations.power_idle + (operations.power_busy - operations.power_idle) * working
    return Estimate(
        plan=plan,
        memory=stage_memory(plan, model, cluster, question.software),
        limit=cluster.device.memory_bytes,
        time=time,
        simulated=pipeline_seconds is not None,
        closed_form=closed.total,
        hardware_flops=model.hardware_flops(plan.batch, again) / time.total / plan.devices,
        model_flops=model.model_flops(plan.batch) / time.total / plan.devices,
        peak_flops=cluster.device.peak_flops,
        tokens_per_second=tokens / time.total,
        days=days,
        energy=watts * hours / 1000,
        price=operations.price * hours,
    )
