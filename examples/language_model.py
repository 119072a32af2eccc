"""Trains a byte-level language model as a pipeline over two islands, and in plain JAX to compare.

`training_step` is ordinary Python over the functions of two stages. Given functions compiled for slices, and traced by
`pw.program`, it is one program per step: the first stage runs on island 0, the last on island 1, and what passes
between them moves from device to device. Given the same functions under `jax.jit`, it is the single-process reference:
both must produce the same bits. A third run, with the model in one piece, shows that cutting it changed only rounding.

Run it with `python -m examples.language_model`.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn

import pathways_ray as pw
from examples import byte_transformer as model

STEPS = 200
FETCH_EVERY = 20  # looking at each loss would make every step wait for the one before


class Training(NamedTuple):
    losses: np.ndarray  # (steps,) float32, nats per byte
    params: tuple[Any, Any]  # first stage, last stage; NumPy pytrees


class State(NamedTuple):
    """All that a step changes, for the first and for the last stage."""

    first_params: Any
    first_opt: Any
    last_params: Any
    last_opt: Any


Report = Callable[[int, np.ndarray], None]  # called with the number of steps done and the losses fetched last


def initial_state() -> State:
    """Parameters and optimizer state, as NumPy pytrees."""
    first, last = model.init_params()
    return jax.tree.map(np.asarray, State(first, model.optimizer.init(first), last, model.optimizer.init(last)))


def stages(compile_first: Callable, compile_last: Callable) -> tuple[SimpleNamespace, SimpleNamespace]:
    """The functions of each stage, passed through what compiles them (`jax.jit`, or `pw.compiled` with a slice)."""
    first = SimpleNamespace(
        forward=compile_first(model.first_forward),
        backward=compile_first(model.first_backward),
        accumulate=compile_first(model.accumulate),
        update=compile_first(model.update),
    )
    last = SimpleNamespace(
        forward_backward=compile_last(model.last_forward_backward),
        accumulate=compile_last(model.accumulate),
        update=compile_last(model.update),
    )
    return first, last


def training_step(
    first: SimpleNamespace, last: SimpleNamespace, state: State, tokens: Sequence[Any], targets: Sequence[Any]
) -> tuple[State, Any]:
    """One step over all microbatches: the new state and the mean loss, a scalar.

    All forward passes are issued before the first backward pass, so the first stage works on later microbatches while
    the last stage has an earlier one.
    """
    first_total = last_total = None
    activations = [first.forward(state.first_params, x) for x in tokens]
    for x, activation, y in zip(tokens, activations, targets, strict=True):
        loss_and_grads, grad_activation = last.forward_backward(state.last_params, activation, y)
        grads = first.backward(state.first_params, x, grad_activation)
        last_total = last.accumulate(last_total, loss_and_grads) if last_total is not None else loss_and_grads
        first_total = first.accumulate(first_total, grads) if first_total is not None else grads
    loss, last_grads = last_total
    new_first = first.update(state.first_params, state.first_opt, first_total)
    new_last = last.update(state.last_params, state.last_opt, last_grads)
    return State(*new_first, *new_last), loss


def train(step: Callable, state: State, steps: int, report: Report | None = None) -> Training:
    """Runs `step` over the batches. Losses stay futures and are fetched FETCH_EVERY at a time."""
    losses: list[np.ndarray] = []
    waiting: list[Any] = []
    for number, (tokens, targets) in enumerate(model.batches(steps), start=1):
        state, loss = step(state, tokens, targets)
        waiting.append(loss)
        if number % FETCH_EVERY == 0 or number == steps:
            losses += [np.asarray(one) for one in waiting]
            waiting.clear()
            if report:
                report(number, np.array(losses[-FETCH_EVERY:]))
    params = jax.tree.map(np.asarray, (state.first_params, state.last_params))
    return Training(np.array(losses, np.float32), params)


def train_pathways(steps: int = STEPS, report: Report | None = None) -> Training:
    """Trains on one device of island 0 and one of island 1 of the running session."""
    with pw.virtual_slice((1,), ("x",), island=0) as here, pw.virtual_slice((1,), ("x",), island=1) as there:
        first, last = stages(pw.compiled(slice=here), pw.compiled(slice=there))

        @pw.program
        def step(state: State, tokens: Sequence[Any], targets: Sequence[Any]) -> tuple[State, Any]:
            return training_step(first, last, state, tokens, targets)

        def place(tree: Any, on: Any) -> Any:
            return jax.tree.map(lambda leaf: pw.put(leaf, slice=on, spec=P()), tree)

        state = initial_state()
        placed = State(*place(state[:2], here), *place(state[2:], there))
        return train(step, placed, steps, report)


def train_reference(steps: int = STEPS, report: Report | None = None) -> Training:
    """The same functions, called one after another in this process with `jax.jit`."""
    first, last = stages(jax.jit, jax.jit)
    return train(lambda *args: training_step(first, last, *args), initial_state(), steps, report)


def train_unsplit(steps: int = STEPS, report: Report | None = None) -> Training:
    """The model in one piece, a whole step in one `jax.jit`."""

    @jax.jit
    def step(state: State, tokens: Sequence[Any], targets: Sequence[Any]) -> tuple[State, Any]:
        params = state.first_params, state.last_params
        loss, (first_grads, last_grads) = jax.value_and_grad(model.full_loss)(params, tokens, targets)
        new_first = model.update(state.first_params, state.first_opt, first_grads)
        new_last = model.update(state.last_params, state.last_opt, last_grads)
        return State(*new_first, *new_last), loss

    return train(step, initial_state(), steps, report)


def show_training(console: Console, name: str, run: Callable[[int, Report], Training], steps: int) -> Training:
    """Runs one of the three trainings under a progress line that shows the mean of the losses fetched last."""
    columns = *Progress.get_default_columns(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}")
    start = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        line = progress.add_task(name, total=steps, loss="")
        training = run(
            steps,
            lambda done, losses: progress.update(line, completed=done, loss=f"loss {losses.mean():.3f} nats per byte"),
        )
    seconds = time.perf_counter() - start
    console.print(f"{name}: {steps} steps in {seconds:.1f} s, compiling included")
    return training


def same_bits(a: Training, b: Training) -> bool:
    """Whether two trainings gave the same losses and the same parameters to the last bit."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs)


def main(session: Any = None, steps: int = STEPS) -> Training:
    """Trains on the running session and in plain JAX, and compares the two. `session` is the one pw.init returned."""
    console = Console()
    if session is not None:
        console.print(f"stages on islands 0 and 1 of {session.url}")
    training = show_training(console, "Pathways, two islands", train_pathways, steps)
    reference = show_training(console, "plain JAX, one process", train_reference, steps)
    console.print(f"losses and parameters bit-equal to plain JAX: {same_bits(training, reference)}")
    return training


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    with pw.init(islands=2, hosts_per_island=1, devices_per_host=1) as session:
        main(session, arguments.steps)
