"""Records, the end of a run by signals, learning rates."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from megatron_ptdp.errors import ConfigError, TrainingStopped
from megatron_ptdp.train.config import Optimizer
from megatron_ptdp.train.optimizer import rate, transformation
from megatron_ptdp.train.records import METRICS, Records, locked
from megatron_ptdp.train.rules import MIN_EPSILON
from megatron_ptdp.train.stop import Stop


def lines(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / METRICS).read_text().splitlines()]


def test_each_step_is_there_once_after_a_restart(tmp_path: Path) -> None:
    with Records(tmp_path, 0) as records:
        for step in range(1, 8):
            records.write(step, {"loss": 10.0 - step})
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 8, "lo')  # killed while it wrote
    with Records(tmp_path, 5) as records:
        for step in range(6, 9):
            records.write(step, {"loss": 20.0 - step})
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 9))
    assert [line["loss"] for line in lines(tmp_path)][4:6] == [5.0, 14.0]


def test_events_are_those_of_tensorboard(tmp_path: Path) -> None:
    from tensorboardX.event_file_writer import EventFileWriter  # noqa: F401
    from tensorboardX.proto.event_pb2 import Event

    with Records(tmp_path, 0) as records:
        records.write(3, {"loss": 1.5, "note": "text"})
    (path,) = (tmp_path / "events").iterdir()
    data, events = path.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")  # then a CRC of 4 bytes, the event, and another CRC
        events.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    scalars = [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value]
    assert scalars == [(3, "loss", 1.5)]


@pytest.mark.parametrize("full", ["lines", "events"])
def test_a_full_disk_ends_a_run_with_its_reason(tmp_path: Path, full: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboardX.event_file_writer import EventsWriter

    def no_space(self: EventsWriter, event: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def train() -> None:
        with Records(tmp_path, 0) as records:
            if full == "lines":
                records._lines.close()
                records._lines = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115
            else:
                monkeypatch.setattr(EventsWriter, "write_event", no_space)
            for step in range(1, 100):
                records.write(step, {"loss": 1.0, "norm": 1.0})

    with pytest.raises(TrainingStopped, match=r"the records in .* cannot be written: No space left"):
        train()


def test_lines_that_a_crash_of_the_machine_left_are_taken_out(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_bytes(b'{"step": 1, "loss": 2.0}\n\xff\xfe\0\n')
    with Records(tmp_path, 1) as records:
        records.write(2, {"loss": 1.0})
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_a_directory_is_for_one_training_at_a_time(tmp_path: Path) -> None:
    other = locked(tmp_path / "run")
    with locked(tmp_path / "run"), pytest.raises(ConfigError, match="another training runs in"):
        other.__enter__()
    with locked(tmp_path / "run"):
        pass


def test_what_would_block_inside_a_training_is_no_other_training(tmp_path: Path) -> None:
    """As a write to a terminal that does not wait."""
    with pytest.raises(BlockingIOError, match="stderr"), locked(tmp_path / "run"):
        raise BlockingIOError(errno.EAGAIN, "stderr")
    with locked(tmp_path / "run"):
        pass


def test_the_first_signal_asks_and_the_second_leaves() -> None:
    said: list[str] = []
    left: list[object] = []
    before = signal.getsignal(signal.SIGINT)  # a shell has its background jobs ignore it
    stop = Stop(said.append, left.append)
    stop.before_leaving = lambda: left.append("cleaned up")
    with stop.listening():
        assert not stop.asked
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked
        assert left == []
        os.kill(os.getpid(), signal.SIGINT)
    assert left == ["cleaned up", 130]
    assert said[0].startswith("SIGTERM: ends after this step")
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("decay", "middle", "end"), [("constant", 1.0, 1.0), ("linear", 0.55, 0.1), ("cosine", 0.55, 0.1)]
)
def test_learning_rates(decay: str, middle: float, end: float) -> None:
    config = Optimizer(learning_rate=1.0, final_learning_rate=0.1, warmup_steps=4, decay=decay)  # type: ignore[arg-type]
    rates = [float(rate(config, 24)(step)) for step in range(25)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[14] == pytest.approx(middle)
    assert rates[23] > end or decay == "constant"  # the last step of the run
    assert rates[24] == pytest.approx(end)
    assert min(np.diff(rates[:4])) > 0 >= max(np.diff(rates[4:]))


@pytest.mark.parametrize("jitted", [False, True])
def test_the_least_epsilon_leaves_a_parameter_without_a_gradient(jitted: bool) -> None:
    config = Optimizer(epsilon=MIN_EPSILON, decay="constant", weight_decay=0.0)
    made = transformation(config, 10)({"w": True})
    params = {"w": jnp.ones(2)}
    update = jax.jit(made.update) if jitted else made.update
    updates, _ = update({"w": jnp.array([1.0, 0.0])}, made.init(params), params)
    np.testing.assert_allclose(updates["w"], [-config.learning_rate, 0.0], rtol=1e-5)


def test_only_what_decays_decays() -> None:
    params = {"matrix": jnp.ones((2, 2)), "norm": jnp.ones(2)}
    for name in ("adamw", "sgd"):
        config = Optimizer(optimizer=name, weight_decay=0.5, learning_rate=0.1, decay="constant")
        made = transformation(config, 10)({"matrix": True, "norm": False})
        none = {key: jnp.zeros_like(value) for key, value in params.items()}
        updates, _ = made.update(none, made.init(params), params)
        after = optax.apply_updates(params, updates)
        np.testing.assert_allclose(after["matrix"], 0.95)
        np.testing.assert_array_equal(after["norm"], 1.0)
