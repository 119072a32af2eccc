"""The loops: learner and sampler on slices, in three modes; and the same in one process of plain JAX.

The sampler has its rows partitioned and the parameters whole, the learner its parameters partitioned. Weights go from
one layout to the other after each update, from device to device, with their version. Rewards are Python, on the hosts
of the sampler.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from examples.rl import grpo, model, task

PROMPTS = 16
"""Prompts of a step."""

STATE = grpo.State(model.specs("t"), model.specs("t"), model.specs("t"), P())


class Step(NamedTuple):
    """The figures of a step. `lag` is the number of updates by which its answers were behind; `seconds` its time."""

    loss: float
    reward: float
    right: float
    lag: int
    seconds: float


class Run(NamedTuple):
    """A finished run: its steps, and the parameters at the end in NumPy."""

    steps: list[Step]
    params: model.Params


class Job:
    """A learner and a sampler, on a slice each.

    Args:
        sampler: a slice with axis `x`, learner: one with axis `t`.
        prompts: prompts of a step.
    """

    def __init__(
        self, sampler: pw.VirtualSlice, learner: pw.VirtualSlice, prompts: int = PROMPTS, seed: int = 0
    ) -> None:
        self.prompts = prompts
        rows, specs, batch = P("x"), model.specs("t"), (grpo.Rollout(P(), P(), P()), P())
        whole = dict.fromkeys(("loss", "reward", "right"), P())
        sample = pw.compiled(grpo.rollout, slice=sampler, in_specs=(P(), P(), rows), out_specs=rows)
        reward = pw.host(
            task.grade,
            slice=sampler,
            in_specs=rows,
            out_specs=rows,
            result=lambda tokens: jax.ShapeDtypeStruct(tokens.shape[:1], np.float32),
        )

        @pw.program
        def act(params: Any, step: Any, prompts: Any) -> Any:
            batch = sample(params, step, prompts)
            return batch, reward(batch.tokens)

        self.act = act
        self.train = pw.compiled(
            grpo.update, slice=learner, in_specs=(STATE, *batch), out_specs=(STATE, whole), donate_argnums=0
        )
        self.gradient = pw.compiled(grpo.gradient, slice=learner, in_specs=(specs, *batch), out_specs=(specs, whole))
        self.add = pw.compiled(
            lambda a, b: jax.tree.map(lambda x, y: x + y, a, b), slice=learner, in_specs=(specs, specs), out_specs=specs
        )
        self.apply = pw.compiled(
            lambda state, total, parts: grpo.apply(state, jax.tree.map(lambda g: g / parts, total)),
            slice=learner,
            in_specs=(STATE, specs, P()),
            out_specs=STATE,
        )
        self.state: Any = pw.put(jax.device_get(grpo.start(model.init(seed))), learner, STATE)
        self.weights = pw.versioned(self.state.params, slice=sampler, spec=P(), max_lag=0)

    def answers(self, number: int, groups: int = 1) -> tuple[Any, int]:
        """Launches the sampling of answers to prompts number `number`, one of `groups` parts of a step's; the batch,
        and the version that answers."""
        weights = self.weights.restore()  # the latest, copied again where it was lost with the sampler's hosts
        prompts = task.prompts(number, self.prompts // groups)
        return self.act(weights.tree, np.int32(number), prompts), weights.version

    def learn(self, number: int, *ahead: tuple[Any, int]) -> tuple[Any, int]:
        """Updates by answers, those `ahead` or others where they were lost; its figures, and the lag. Sends the weights
        on their way."""
        under_way = list(ahead)

        @pw.retry
        def update() -> Any:
            batch, version = under_way.pop() if under_way else self.answers(number)
            return *self.train(self.state, *batch), version  # takes the memory of the state once the batch is there

        self.state, figures, version = update()
        self.weights.push(self.state.params)
        return figures, number - version


def on_policy(job: Job, steps: int) -> Iterator[Step]:
    """Each batch is sampled with the weights that it updates. A lost host of the sampler costs one sampling more."""
    for number in range(steps):
        begun = time.perf_counter()
        yield _step(*job.learn(number), begun)


def one_step_off(job: Job, steps: int) -> Iterator[Step]:
    """The next batch is sampled while this one updates, with weights of one update less."""
    ahead = job.answers(0)
    for number in range(steps):
        begun, now = time.perf_counter(), ahead
        if number + 1 < steps:
            ahead = job.answers(number + 1)
        yield _step(*job.learn(number, now), begun)


def streaming(job: Job, steps: int, groups: int = 4, bound: int = 2) -> Iterator[Step]:
    """Groups of prompts are sampled all the time; an update takes the first ones that are there, whichever they are.
    Groups more than `bound` updates behind are thrown away; so are lost ones, 3 times what is under way per step."""
    numbers = iter(range(1 << 30))
    job.weights.max_lag = 1
    flying = [job.answers(next(numbers), groups) for _ in range(2 * groups)]
    for number in range(steps):
        begun, total, figures, oldest, lost = time.perf_counter(), None, [], number, 0
        while len(figures) < groups:
            done, flying = pw.wait(flying, count=1)
            batch, version = done.pop(0)
            flying += [*done, job.answers(next(numbers), groups)]
            if number - version > bound:
                continue
            try:
                found, its = jax.block_until_ready(job.gradient(job.state.params, *batch))
                total = found if total is None else job.add(total, found)
                figures.append(its)
                oldest = min(oldest, version)
            except (pw.errors.HostLost, pw.errors.BufferLost):
                if (lost := lost + 1) > 3 * len(flying):
                    raise  # the learner's own state is lost, or the sampler does not come back
        job.state = job.apply(job.state, total, np.float32(groups))
        job.weights.push(job.state.params)
        each = [_step(one, number - oldest, begun) for one in figures]
        yield Step(*(float(np.mean([step[k] for step in each])) for k in range(3)), number - oldest, each[-1].seconds)


MODES: dict[str, Callable[[Job, int], Iterator[Step]]] = {
    "on-policy": on_policy,
    "one-step-off": one_step_off,
    "streaming": streaming,
}


def run(job: Job, mode: str, steps: int, show: Callable[[int, Step], None] = lambda number, step: None) -> Run:
    """Runs a mode to its end."""
    made = []
    for number, step in enumerate(MODES[mode](job, steps)):
        made.append(step)
        show(number, step)
    return Run(made, jax.tree.map(np.asarray, job.state.params))


def _step(figures: Any, lag: int, begun: float) -> Step:
    """Waits for the figures of a step."""
    loss, reward, right = (float(figures[name]) for name in ("loss", "reward", "right"))
    return Step(loss, reward, right, lag, time.perf_counter() - begun)


def plain(steps: int, members: int = 1, lag: int = 0, prompts: int = PROMPTS, seed: int = 0) -> Run:
    """The same in this process, without Pathways: on `members` devices for the sampler and as many for the learner;
    samples are `lag` updates behind, 0 as on-policy, 1 as one step off."""
    devices = jax.local_devices(backend="cpu")
    sampler = Mesh(np.array(devices[:members]), "x")
    learner = Mesh(np.array(devices[members : 2 * members] if len(devices) >= 2 * members else devices[:members]), "t")

    def on(mesh: Mesh, tree: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree, is_leaf=lambda leaf: isinstance(leaf, P))

    rows, whole = on(sampler, P("x")), on(sampler, P())
    sample = jax.jit(grpo.rollout, in_shardings=(whole, whole, rows), out_shardings=rows)
    state_there, batch_there = on(learner, STATE), on(learner, P())
    train = jax.jit(
        grpo.update, in_shardings=(state_there, batch_there, batch_there), out_shardings=(state_there, batch_there)
    )
    state = jax.device_put(grpo.start(model.init(seed)), state_there)
    versions = [jax.device_put(jax.device_get(state.params), whole)]
    made = []
    for number in range(steps):
        begun = time.perf_counter()
        used = max(0, number - lag)
        batch = jax.device_get(sample(versions[used], np.int32(number), task.prompts(number, prompts)))
        state, figures = train(state, batch, task.grade(batch.tokens))
        versions.append(jax.device_put(jax.device_get(state.params), whole))
        made.append(_step(figures, number - used, begun))
    return Run(made, jax.tree.map(np.asarray, state.params))


def same_bits(one: Run, other: Run) -> bool:
    """Whether two runs have the same losses, rewards and parameters, to the bit."""
    figures = [[step[:3] for step in run.steps] for run in (one, other)]
    leaves = zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True)
    return figures[0] == figures[1] and all(a.tobytes() == b.tobytes() for a, b in leaves)
