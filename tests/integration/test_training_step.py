"""Training steps on the real runtime: the numbers of one device, however they are computed.

A tiny GPT in float64. The reference is the same model as one stage on one device, in plain JAX; that the model itself
is right is tested with the models. Relative differences are Frobenius norms, at most 1e-12.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from megatron_ptdp import schedules
from megatron_ptdp.errors import BadSizes, BatchError, CheckpointError, ConfigError
from megatron_ptdp.models import DATA, TENSOR, Compute, Gpt, ModelConfig, initialise, whole
from megatron_ptdp.parallel import Layout, Options, Sizes, Step, build_step
from megatron_ptdp.verify.planted import PLANTED_BUGS, planted

CONFIG = ModelConfig("gpt", layers=4, hidden=8, heads=2, sequence=6, vocabulary=13)  # 13: padded when shared by two
EXAMPLES = 8
CLIP = 0.3
RATE = 0.01
BOUND = 1e-12
STAGES_OF_TWO = {"interleaved", "looped-bfs", "interleaved-zb", "zb-v", "dualpipe-v"}

pytestmark = pytest.mark.usefixtures("doubles")


def optimizer(decay: Any) -> optax.GradientTransformation:
    return optax.adamw(RATE, mask=decay)


class Reference(NamedTuple):
    """One device: parameters, a batch, loss and gradients there."""

    params: Any
    batch: dict[str, np.ndarray]
    differentiate: Callable[[Any, Mapping[str, np.ndarray]], tuple[Any, Any]]


@pytest.fixture(scope="module")
def reference(doubles: None) -> Reference:
    model = Gpt(CONFIG, Compute(dtype="float64"))
    stage = whole(model)
    mesh = jax.make_mesh((1, 1), (DATA, TENSOR), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = jax.tree.map(lambda p: p.spec, model.parameters(stage))

    @jax.jit
    def differentiate(params: Any, batch: Any, tokens: Any) -> Any:
        run = jax.shard_map(
            lambda params, batch: model.forward(stage, params, {}, batch)[None],
            mesh=mesh,
            in_specs=(specs, P(DATA)),
            out_specs=P(DATA),
        )
        return jax.value_and_grad(lambda params: run(params, batch)[0] / tokens)(params)

    draw = np.random.default_rng(0)
    (shape, dtype) = model.batch(EXAMPLES)["tokens"]
    batch = {"tokens": draw.integers(0, CONFIG.vocabulary, shape).astype(dtype)}
    params = initialise(model, stage, 1, "float64")
    return Reference(params, batch, lambda params, batch: differentiate(params, batch, model.tokens(batch)))


def make(
    schedule: str = "1f1b",
    compute: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    placement: Any = "together",
    dtype: Any = "float64",
    **sizes: int,
) -> Step:
    """A step for 8 examples; microbatches are 4 unless said."""
    sizes = {"microbatches": 4, "chunks": 2 if schedule in STAGES_OF_TWO else 1, **sizes}
    examples = EXAMPLES // (sizes["microbatches"] * sizes.get("data", 1))
    found = Sizes(examples=examples, **sizes)
    model = Gpt(CONFIG, Compute(tensor=found.tensor, dtype=dtype, **(compute or {})))
    rows = schedules.build(schedule, found.pipeline, found.microbatches, found.chunks if found.chunks > 1 else None)
    master = "float64" if dtype == "float64" else "float32"
    chosen = Options(master=master, compute=dtype, **(options or {}))
    layout = Layout.of(model, found, placement=placement)
    try:
        return build_step(model, optimizer, layout, rows, chosen)
    except BaseException:
        layout.release()
        raise


def release(step: Step) -> None:
    step.layout.release()
    gc.collect()


def difference(tree: Any, expected: Any) -> float:
    """The largest relative difference of any array."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True)
    return max(float(np.linalg.norm(np.asarray(a) - b)) / max(float(np.linalg.norm(b)), 1e-30) for a, b in pairs)


def assert_parity(step: Step, reference: Reference) -> None:
    loss, gradients = step.gradients(step.initial(reference.params), reference.batch)
    expected, expected_gradients = reference.differentiate(reference.params, reference.batch)
    assert abs(loss - float(expected)) <= BOUND * abs(float(expected))
    assert difference(gradients, expected_gradients) <= BOUND


def trained(reference: Reference, steps: int) -> tuple[Any, list[float], list[float]]:
    """A plain optax loop with clipping: parameters, losses, norms before clipping."""
    model = Gpt(CONFIG, Compute(dtype="float64"))
    decay = jax.tree.map(lambda p: p.decay, model.parameters(whole(model)))
    transform = optax.chain(optax.clip_by_global_norm(CLIP), optimizer(decay))
    params, losses, norms = reference.params, [], []
    slots = transform.init(params)
    for _ in range(steps):
        loss, gradients = reference.differentiate(params, reference.batch)
        losses.append(float(loss))
        norms.append(float(optax.tree.norm(gradients)))
        updates, slots = transform.update(gradients, slots, params)
        params = optax.apply_updates(params, updates)
    return params, losses, norms


@pytest.mark.slow
def test_training_at_all_kinds_of_parallelism_equals_a_plain_loop_on_one_device(session, reference) -> None:
    """Two stages on two islands, of 2 replicas × 2 members each, ZeRO-1 and sequence parallelism.

    1. Three steps with clipping give the losses, norms and parameters of a plain loop.
    2. A snapshot taken before the last step is still what it was after it.
    3. Evaluated, it has the loss that the last step had, and stays what it was.
    4. The canonical state, placed under other sizes, trains on with the same numbers.
    """
    step = make(
        "1f1b",
        {"sequence_parallel": True},
        {"zero": 1, "clip": CLIP},
        placement="apart",
        pipeline=2,
        tensor=2,
        data=2,
    )
    params, losses, norms = trained(reference, 3)
    state = step.initial(reference.params)
    for number in range(3):
        before = step.snapshot(state)
        state, metrics = step(state, reference.batch)
        assert float(metrics["loss"]) == pytest.approx(losses[number], rel=BOUND)
        assert float(metrics["norm"]) == pytest.approx(norms[number], rel=BOUND)
        assert bool(metrics["applied"])
        assert step.first_bad(metrics) is None
    assert difference(step.gather(state)["params"], params) <= 1e-9  # Adam divides small numbers by small numbers

    assert float(step.evaluate(before, reference.batch)) == pytest.approx(losses[2], rel=BOUND)
    kept = step.gather(before)
    assert int(kept["counts"]["0/count"]) == 2
    other = make("gpipe", options={"clip": CLIP}, pipeline=1, data=2)
    again, metrics = other(other.place(kept), reference.batch)
    assert float(metrics["loss"]) == pytest.approx(losses[2], rel=BOUND)
    assert difference(other.gather(again), step.gather(state)) <= 1e-9
    release(step)
    release(other)


@pytest.mark.long
def test_replicas_on_two_islands_sum_their_gradients_in_pieces(session, reference) -> None:
    step = make("interleaved", options={"pieces": 2}, pipeline=2, data=2, islands=2)
    assert_parity(step, reference)
    expected, _ = reference.differentiate(reference.params, reference.batch)
    state = step.initial(reference.params)
    assert float(step.evaluate(state, reference.batch)) == pytest.approx(float(expected), rel=BOUND)
    state, _ = step(state, reference.batch)
    for one, other in zip(jax.tree.leaves(state.params[0]), jax.tree.leaves(state.params[1]), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    release(step)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_is_not_applied_and_named(session, reference) -> None:
    step = make("1f1b", pipeline=2, options={"keep": "input"})
    params = jax.tree.map(np.copy, reference.params)
    params["layers"]["ffn"]["out"]["weight"][3, 0, 0] = np.nan  # of the second stage
    state, metrics = step(step.initial(params), reference.batch)
    assert not bool(metrics["applied"])
    bad = step.first_bad(metrics)
    assert bad is not None
    assert bad[0] == 1
    after = step.gather(state)
    assert difference(jax.tree.map(np.nan_to_num, after["params"]), jax.tree.map(np.nan_to_num, params)) == 0
    assert int(after["counts"]["0/count"]) == 0
    release(step)


def test_what_cannot_be_is_refused_with_the_sizes(session, reference) -> None:
    with pytest.raises(BadSizes, match="4 layers cannot fill 8 stages"):
        make("1f1b", pipeline=8)
    with pytest.raises(BadSizes, match=r"island 0 is to hold 2 pipeline devices of 2 × 2 .* 8 devices, but has 4"):
        make("1f1b", pipeline=2, tensor=2, data=2)
    with pytest.raises(BadSizes, match="pipeline 4 × tensor 2 × data 2 are 16 devices, but there are 8"):
        make("1f1b", pipeline=4, tensor=2, data=2, microbatches=2)
    with pytest.raises(schedules.ScheduleError, match="dualpipe-v needs at least as many microbatches as stages"):
        make("dualpipe-v", pipeline=2, microbatches=2)
    with pytest.raises(ConfigError, match=r"zero 3 .* is for one stage"):
        make("1f1b", pipeline=2, options={"zero": 3})
    step = make("1f1b")
    with pytest.raises(BadSizes, match="the schedule gpipe has 1 devices, 1 stages and 2 microbatches, but the sizes"):
        build_step(step.model, optimizer, step.layout, schedules.build("gpipe", 1, 2), Options(master="float64"))
    state = step.initial(reference.params)
    with pytest.raises(BatchError, match=r"'tokens' is of shape \(7, 7\), but \(8, 7\) is needed: 4 microbatches of 2"):
        step(state, {"tokens": reference.batch["tokens"][:7]})
    with pytest.raises(BatchError, match="'tokens' is missing"):
        step(state, {})
    with pytest.raises(CheckpointError, match="missing"):
        step.initial({"layers": reference.params["layers"]})
    sgd = build_step(step.model, lambda _: optax.sgd(RATE), step.layout, step.schedule, step.options)
    with pytest.raises(CheckpointError, match="the state has no '0/count', which this optimizer keeps"):
        step.place(sgd.gather(sgd.initial(reference.params)))
    release(step)


def test_scatter_gather_sends_each_device_its_part(session) -> None:
    step = make("1f1b", placement="apart", pipeline=2, tensor=2)
    # 4 microbatches × 2 examples × 6 tokens × 8 wide × 8 bytes, there and back; twice that without.
    assert "all: to devices 6,144; 12,288, between hosts 6,144; 6,144" in step.explain()
    release(step)


GRID = [
    *((name, {"pipeline": 2}, {}, {}) for name in schedules.schedule_names() if not schedules.rules_of(name).stale),
    *((name, {"pipeline": 2}, {}, {"keep": "input"}) for name in ("gpipe", "zb-h1", "dualpipe-v")),
    ("1f1b", {"pipeline": 4, "tensor": 1}, {"recompute": "selective"}, {"join": True}),
    ("1f1b", {"pipeline": 2, "tensor": 2}, {"recompute": "full"}, {"keep": "residuals"}),
    ("1f1b", {"pipeline": 2, "tensor": 2}, {"recompute": "full"}, {"scatter_gather": False}),
    *((name, {"pipeline": 2}, {"recompute": "full"}, {}) for name in ("gpipe", "looped-bfs", "zb-h1", "dualpipe-v")),
    ("zb-v", {"pipeline": 2, "tensor": 2}, {"sequence_parallel": True}, {}),
    ("1f1b", {"pipeline": 2, "data": 2}, {}, {"zero": 1}),
    ("interleaved", {"pipeline": 2, "data": 2}, {}, {"zero": 2}),
    ("gpipe", {"data": 2, "tensor": 2}, {}, {"zero": 3}),
    ("1f1b", {"pipeline": 2, "data": 4, "islands": 2, "microbatches": 2}, {}, {"zero": 2}),
    ("1f1b", {"tensor": 2, "data": 4, "islands": 2, "microbatches": 2}, {"sequence_parallel": True}, {"zero": 1}),
]


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "sizes", "compute", "options"), GRID)
def test_loss_and_gradients_are_those_of_one_device(session, reference, schedule, sizes, compute, options) -> None:
    step = make(schedule, compute, options, **sizes)
    assert_parity(step, reference)
    release(step)


@pytest.mark.long
@pytest.mark.parametrize("bug", PLANTED_BUGS)
def test_every_planted_bug_shows(session, reference, bug) -> None:
    """In the loss, a gradient or the norm, by far more than the bound; the step without it is the first test above."""
    expected, expected_gradients = reference.differentiate(reference.params, reference.batch)
    with planted(bug):
        step = make(
            "1f1b",
            {"sequence_parallel": True},
            placement="apart",
            pipeline=2,
            tensor=2,
            data=2,
            microbatches=2,
        )
        state = step.initial(reference.params)
        loss, gradients = step.gradients(state, reference.batch)
        _, metrics = step(state, reference.batch)
    norm = float(optax.tree.norm(expected_gradients))
    off = {
        "loss": abs(loss / float(expected) - 1),
        "gradients": difference(gradients, expected_gradients),
        "norm": abs(float(metrics["norm"]) / norm - 1),
    }
    assert max(off.values()) > 1e-6, off
    release(step)


@pytest.mark.long
def test_schedules_that_keep_the_order_of_accumulation_give_the_same_bits(session, reference) -> None:
    """GPipe, 1F1B and interleaved all run backwards in the order of the microbatches; and a second run is the same.
    Those that are compared have the same stages: XLA may round a layer otherwise that it compiles with another one."""
    params = jax.tree.map(lambda a: a.astype("float32"), reference.params)
    for alike in ((("gpipe", 2), ("1f1b", 2), ("1f1b", 2)), (("gpipe", 4), ("1f1b", 4), ("interleaved", 2))):
        found = []
        for name, pipeline in alike:
            step = make(name, dtype="float32", pipeline=pipeline)
            found.append(step.gradients(step.initial(params), reference.batch))
            release(step)
        for other in found[1:]:
            assert other[0] == found[0][0]
            for one, two in zip(jax.tree.leaves(found[0][1]), jax.tree.leaves(other[1]), strict=True):
                assert one.tobytes() == two.tobytes()


@pytest.mark.long
def test_bfloat16_copies_train_float32_masters(session, reference) -> None:
    """Losses follow those of float64 as far as bfloat16 goes, and small updates are not lost in the parameters."""
    step = make("1f1b", dtype="bfloat16", options={"clip": CLIP}, pipeline=2)
    _, losses, _ = trained(reference, 5)
    state = step.initial(reference.params)
    found = []
    for _ in range(5):
        state, metrics = step(state, reference.batch)
        found.append(float(metrics["loss"]))
    assert found == pytest.approx(losses, rel=1e-2)
    kept = step.gather(state)["params"]["layers"]["attention"]["out"]["weight"]
    assert kept.dtype == np.float32
    assert (kept != kept.astype(jax.numpy.bfloat16).astype(np.float32)).any()
    release(step)
