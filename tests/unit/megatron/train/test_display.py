"""What is shown of a run, utilization in both conventions, and what the page on training says of settings."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from megatron_ptdp.models import flops_per_token, preset
from megatron_ptdp.train.config import SECTIONS, load
from megatron_ptdp.train.display import Display, StepFigures
from megatron_ptdp.train.setup import schedule_of, sizes_of
from megatron_ptdp.train.speed import Peak, Utilization

PAGE = Path(__file__).resolve().parents[4] / "docs" / "training.md"
SEEN = StepFigures(2.5, 1.0, 1e-3, 0.5, 12_345.0, 0.25, 0.333)


def test_without_a_terminal_there_is_a_line_from_time_to_time_and_at_the_end() -> None:
    file = io.StringIO()
    with Display(Console(file=file, width=200), 0, 7, "25.0%", every=3) as display:
        for step in range(1, 8):
            display.step(step, SEEN)
    lines = file.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 3/7", "step 6/7", "step 7/7"]
    assert lines[0].endswith("loss 2.5000, 12,345 tokens/s, bubble 25.0%, MFU 25.0% (hardware 33.3%)")


def test_the_loss_of_an_evaluation_shows_until_the_next_one() -> None:
    file = io.StringIO()
    with Display(Console(file=file, width=200), 0, 4, "25.0%", every=4) as display:
        for step in range(1, 5):
            display.step(step, SEEN, 2.75 if step == 2 else None)
    lines = file.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "step 2/4: loss 2.5000 (held out 2.7500 at step 2)",
        "step 4/4: loss 2.5000 (held out 2.7500 at step 2)",
    ]


def test_speeds_are_means_over_the_time_of_the_steps_since_the_last_line() -> None:
    file = io.StringIO()
    slow, fast = (
        SEEN._replace(seconds=3.0, tokens_per_second=100.0),
        SEEN._replace(seconds=1.0, tokens_per_second=300.0),
    )
    with Display(Console(file=file, width=200), 0, 4, "25.0%", every=2) as display:
        for step, seen in enumerate((SEEN, SEEN, slow, fast), 1):
            display.step(step, seen)
    assert "12,345 tokens/s" in file.getvalue().splitlines()[0]
    assert " 150 tokens/s" in file.getvalue().splitlines()[1]  # 600 tokens in 4 s


def test_what_is_waited_for_stands_beside_the_bar_until_the_next_step() -> None:
    terminal, plain = io.StringIO(), io.StringIO()
    with Display(Console(file=terminal, width=200, force_terminal=True), 0, 7, "25.0%", every=3) as display:
        display.waits("the first step is compiled")
        assert display._progress is not None
        display._progress.refresh()
        assert "the first step is compiled" in terminal.getvalue()
        display.step(1, SEEN)
        terminal.truncate(0)
        display._progress.refresh()
        assert "is compiled" not in terminal.getvalue()
    with Display(Console(file=plain, width=200), 0, 7, "25.0%", every=3) as display:
        display.waits("the first step is compiled")
    assert plain.getvalue() == ""


def test_on_a_terminal_there_is_a_bar() -> None:
    file = io.StringIO()
    with Display(Console(file=file, width=200, force_terminal=True), 2, 7, "25.0%", every=3) as display:
        display.step(3, SEEN)
    assert "3/7" in file.getvalue()
    assert "loss 2.5000" in file.getvalue()


def test_recomputation_counts_in_one_convention_only() -> None:
    flops = flops_per_token(preset("gpt-small"), "full")
    share = Utilization.of(1000.0, flops, Peak(1e12, "as configured"), 4)
    assert share.mfu == pytest.approx(1000 * flops.model / 4e12)
    assert 1.2 < share.hardware / share.mfu < 4 / 3  # 4/3 of the layers, not of the logits


def test_sizes_follow_from_the_batch_and_the_schedule() -> None:
    config = load(None, ["model=gpt-tiny", "pipeline=2", "data=2", "microbatch=2", "batch=32", "schedule=zb-v"])
    schedule = schedule_of(config)
    sizes = sizes_of(config, schedule)
    assert (sizes.microbatches, sizes.chunks, sizes.batch, sizes.devices) == (8, 2, 32, 4)


def test_the_page_names_every_setting() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE.read_text()))
    assert {name for kind in SECTIONS.values() for name in kind.__struct_fields__} - named == set()
