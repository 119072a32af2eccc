"""`pathways-plan` from the outside: what it prints, writes and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from megatron_ptdp.planner.cli import commands, spread_fixes
from megatron_ptdp.planner.plan import Plan, illegal
from megatron_ptdp.planner.questions import read_plan
from megatron_ptdp.planner.settings import parse_setting
from megatron_ptdp.schedules import build
from megatron_ptdp.train.config import load as load_training
from tests.unit.megatron.planner.helpers import gpt
from tests.unit.megatron.schedules.pipelines import BUILT_IN

SMALL = ("--model", "gpt-1.7b", "--devices", "16", "--batch", "64")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands, arguments, prog_name="pathways-plan")


def test_a_search_prints_plans_memory_time_and_reasons() -> None:
    done = invoke(*SMALL, "--top", "2")
    assert done.exit_code == 0, done.output
    for text in ("tokens/s", "first stage", "last stage", "bubble", "nvlink", "failures", "binds", "runner-up", "days"):
        assert text in done.output


def test_json_has_every_figure() -> None:
    done = invoke(*SMALL, "--top", "2", "--json", "--tokens", "1e9")
    record = json.loads(done.output)
    assert record["question"]["tokens"] == 1e9
    plan = record["plans"][0]
    assert plan["fits"] is True
    assert set(plan["memory_bytes"]) == {"first", "middle", "last"}
    assert sum(plan["memory_bytes"]["first"].values()) == pytest.approx(2 * plan["memory_bytes"]["first"]["total"])
    parts = dict(plan["seconds"])
    assert parts.pop("total") == pytest.approx(sum(parts.values()))
    assert set(plan["flops_per_device"]) == {"hardware", "model", "peak"}
    for name in ("tokens_per_second", "days", "energy_kwh", "price", "traffic_bytes_per_device", "failures"):
        assert plan[name]
    assert record["binds"]
    assert record["runner_up"]["why"]


@pytest.mark.parametrize(
    "fixes",
    [
        ("--fix", "tensor=2", "--fix", "pipeline=4"),
        ("--fix", "tensor=2", "pipeline=4"),
        ("--fix", "tensor=2,pipeline=4"),
    ],
)
def test_settings_are_fixed_in_any_of_three_ways(fixes: tuple[str, ...]) -> None:
    record = json.loads(invoke(*SMALL, *fixes, "--json", "--top", "1").output)
    assert (record["plans"][0]["plan"]["tensor"], record["plans"][0]["plan"]["pipeline"]) == (2, 4)


def test_the_help_names_all_settings() -> None:
    text = invoke("--help").output
    assert [name for name in Plan.__dataclass_fields__ if name not in text] == []


def test_fixes_end_at_the_next_option() -> None:
    assert spread_fixes(["--fix", "a=1", "b=2", "--top", "3", "x=4"]) == [
        *("--fix", "a=1", "--fix", "b=2", "--top", "3", "x=4")
    ]


def test_the_configuration_is_what_training_takes_and_compare_reads(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    assert invoke(*SMALL, "--top", "1", "--config-out", str(path)).exit_code == 0
    table = tomllib.loads(path.read_text())
    assert list(table) == ["model", *Plan.__dataclass_fields__]
    assert table["model"] == "gpt-1.7b"
    done = invoke("compare", str(path), "data=16,batch=64,microbatch=4", "--model", "gpt-1.7b")
    assert done.exit_code == 0, done.output
    assert "is faster; the other:" in done.output


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ("tensor=8,batch=64", "tensor=8,batch=1536", "B is faster per token; the other: "),
        ("tensor=8,batch=64", "tensor=8,data=4,batch=64", "A is faster per token and device; the other: "),
        ("tensor=8,batch=64", "tensor=8,batch=64", "A is faster; the other: +0.0% time (equal"),
    ],
)
def test_plans_with_other_batches_and_devices_are_compared_by_their_tokens(a: str, b: str, said: str) -> None:
    """The first of each pair takes less time for an iteration where batches differ, and more where devices do."""
    done = invoke("compare", a, b, "--model", "gpt-1.7b")
    assert said in done.output
    if a != b:
        slower = float(done.output.partition("the other: +")[2].partition("%")[0]) / 100
        one, other = (json.loads(invoke("compare", a, b, "--model", "gpt-1.7b", "--json").output)[k] for k in "ab")
        rates = [each["tokens_per_second"] / devices_of(each["plan"]) for each in (one, other)]
        assert max(rates) / min(rates) - 1 == pytest.approx(slower, abs=0.0006)


def devices_of(plan: Any) -> int:
    return int(plan["tensor"] * plan["data"] * plan["pipeline"])


def test_chunks_that_are_left_out_are_those_of_the_schedule_as_in_training() -> None:
    for name in BUILT_IN:
        plan = read_plan(f"pipeline=2,batch=8,schedule={name}")[1]
        assert plan.chunks * plan.pipeline == build(name, plan.pipeline, plan.microbatches).stages
        assert not illegal(plan, gpt(tied=False))
    assert read_plan("pipeline=2,batch=8,schedule=interleaved,chunks=4")[1].chunks == 4


def test_a_model_of_a_file_is_found_again_from_anywhere_and_is_no_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, plan = tmp_path / 'a "model"', tmp_path / "plan.toml"
    there.mkdir()
    (there / "gpt-39b.toml").write_text("layers = 4\nhidden = 64\nheads = 4\nsequence = 64\nvocabulary = 256\n")
    monkeypatch.chdir(there)
    assert invoke("--model", "gpt-39b.toml", *SMALL[2:], "--config-out", str(plan)).exit_code == 0
    monkeypatch.chdir(tmp_path)
    assert tomllib.loads(plan.read_text())["model"] == str(there / "gpt-39b.toml")
    for command in (("simulate", str(plan)), ("compare", str(plan), str(plan))):
        done = invoke(*command)
        assert done.exit_code == 0, done.output
        assert "0.0B parameters" in done.output
    assert load_training(plan).model.layers == 4


def test_what_is_written_of_a_schedule_that_updates_on_the_way_is_read_again(tmp_path: Path) -> None:
    model, path = tmp_path / "untied.toml", tmp_path / "plan.toml"
    model.write_text("layers = 4\nhidden = 64\nheads = 4\nsequence = 64\nvocabulary = 256\ntied = false\n")
    asked = ("--model", str(model), "--devices", "4", "--batch", "12", "--fix", "schedule=pipedream")
    assert invoke(*asked, "--config-out", str(path)).exit_code == 0
    assert tomllib.loads(path.read_text())["clip"] == 0.0
    for command in (("simulate", str(path)), ("compare", str(path), str(path))):
        done = invoke(*command, "--model", str(model))
        assert done.exit_code == 0, done.output


def test_compare_takes_the_model_of_either_and_shows_both_questions(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('model = "gpt-1.7b"\npipeline = 2\ntensor = 4\nbatch = 8\n', encoding="utf-8")
    for both in ((str(path), "tensor=8,data=2,batch=16"), ("tensor=8,data=2,batch=16", str(path))):
        done = invoke("compare", *both)
        assert done.exit_code == 0, done.output
        assert "on 8 × A100-SXM4-80GB" in done.output
        assert "on 16 × A100-SXM4-80GB" in done.output


def test_a_table_may_name_the_model_and_no_more(tmp_path: Path) -> None:
    """As `[model] preset` of the trainer does; other sizes are in files of the planner's own."""
    path = tmp_path / "plan.toml"
    plan = "pipeline = 2\nbatch = 8\n"
    path.write_text(f'{plan}[model]\npreset = "gpt-tiny"\n')
    for command in (("simulate", str(path)), ("compare", str(path), "tensor=2,batch=8")):
        assert invoke(*command).exit_code == 0
    for model, said in (
        ('[model]\npreset = "gpt-tiny"\nlayers = 6\n', "a table of preset, layers"),
        ("[model]\npreset = 5\n", "5"),
        ("model = 5\n", "5"),
        ("model = {}\n", "a table of nothing"),
    ):
        path.write_text(plan + model)
        for command in (("simulate", str(path)), ("compare", "tensor=2,batch=8", str(path))):
            done = invoke(*command)
            assert done.exit_code == 2
            assert f"model in plan.toml is {said}, must be a shipped name or a TOML file" in done.output
            assert invoke(*command, "--model", "gpt-tiny").exit_code == 0


def test_compare_gives_both_as_json() -> None:
    a, b = "tensor=8,pipeline=12,batch=24", "tensor=8,pipeline=12,batch=24,chunks=4,schedule=interleaved"
    record = json.loads(invoke("compare", a, b, "--model", "gpt3-175b", "--json").output)
    assert record["a"]["seconds"]["total"] > record["b"]["seconds"]["total"]


def test_explain_goes_through_the_three_heuristics() -> None:
    done = invoke("explain", *SMALL)
    assert done.exit_code == 0, done.output
    assert done.output.count("rule  ") == 3
    assert "agrees" in done.output or "differs" in done.output
    assert len(json.loads(invoke("explain", *SMALL, "--json").output)["rules"]) == 3


def test_simulate_draws_and_traces(tmp_path: Path) -> None:
    picture, trace = tmp_path / "a.png", tmp_path / "a.json"
    plan = "pipeline=4,tensor=2,batch=8,chunks=2,schedule=interleaved"
    done = invoke("simulate", plan, "--model", "gpt-1.7b", "--png", str(picture), "--perfetto", str(trace))
    assert "24 layers do not divide" not in done.output
    assert done.exit_code == 0, done.output
    assert "timeline of 8 microbatches" in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text())


def test_a_picture_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    done = invoke("simulate", "pipeline=2,batch=4", "--model", "gpt-1.7b", "--png", str(tmp_path / "no" / "a.png"))
    assert done.exit_code == 2
    assert "pathways-plan: a.png cannot be written: No such file" in done.output
    done = invoke("simulate", "pipeline=2,batch=4", "--model", "gpt-1.7b", "--png", str(tmp_path / "a.foo"))
    assert done.exit_code == 2
    assert "pathways-plan: a.foo cannot be drawn: Format 'foo' is not supported" in done.output


def test_list_names_what_is_shipped() -> None:
    done = invoke("list")
    assert "gpt3-175b" in done.output
    assert "a100-80g" in done.output
    assert "ptdp" in done.output


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("--devices", "8"), 2, "pathways-plan: --model, --batch missing"),
        (("--model", "gpt4", "--devices", "8", "--batch", "8"), 2, "there is no model 'gpt4'"),
        ((*SMALL, "--cluster", "h200"), 2, "did you mean 'h100'"),
        ((*SMALL, "--fix", "tensr=8"), 2, "did you mean 'tensor'"),
        ((*SMALL, "--fix", "tensor"), 2, "'tensor' is no setting: write name=value"),
        ((*SMALL, "--fix", "tensor=eight"), 2, "tensor is 'eight', must be a whole number"),
        ((*SMALL, "--fix", "sequence_parallel=perhaps"), 2, "must be true or false"),
        ((*SMALL, "--tokens", "-1"), 2, "tokens is -1.0, must be"),
        ((*SMALL, "--tokens", "1e308"), 2, "tokens is 1e+308, must be 1 to 1,000,000,000,000,000,000"),
        ((*SMALL, "--fix", "tensor=8", "tensor=4"), 2, "tensor is fixed to 8 and to 4; keep one of them"),
        ((*SMALL, "--fix", "batch=32"), 2, "batch is 64 and fixed to 32; ask for one of them"),
        ((*SMALL, "--fix"), 2, "'--fix' requires an argument"),
        ((*SMALL, "--top", "0"), 2, "0 is not in the range"),
        (("calibrate",), 2, "Missing option '--output'"),
        (("calibrate", "--output", "here.json"), 2, "--output is here.json, must be a .toml file in a folder"),
        (("calibrate", "--output", "no/such/here.toml"), 2, "must be a .toml file in a folder that is there"),
        (("lst",), 2, "Did you mean 'list'?"),
        (("--model", "gpt-1t", "--devices", "8", "--batch", "8"), 1, "nothing fits"),
        (("compare", "tensor=2,batch=2", "tensor=2,batch=2"), 2, "--model is missing"),
        (("compare", "none.toml", "none.toml"), 2, "none.toml cannot be read"),
        (
            ("simulate", "pipeline=2,batch=100000000", "--model", "gpt-1.7b"),
            2,
            "a timeline of 400,000,000 actions cannot be read; draw fewer: --microbatches 50000 at most",
        ),
        (
            ("simulate", "pipeline=2,batch=500,schedule=terapipe,token_slices=256", "--model", "{untied}"),
            2,
            "a timeline of 512,000 actions cannot be read; draw fewer: --microbatches 195 at most",
        ),
        (
            (
                *("simulate", "pipeline=2,batch=4,schedule=dualpipe-v,chunks=2", "--model", "gpt-1.7b"),
                *("--microbatches", "1"),
            ),
            2,
            "dualpipe-v needs at least as many microbatches as stages",
        ),
        (("simulate", "tensor=5,batch=2", "--model", "gpt-1.7b"), 2, "heads 24 is no multiple of tensor 5"),
    ],
)
def test_what_cannot_be_asked_ends_with_one_line(
    arguments: tuple[str, ...], status: int, text: str, tmp_path: Path
) -> None:
    untied = tmp_path / "untied.toml"
    untied.write_text("layers = 4\nhidden = 64\nheads = 4\nsequence = 256\nvocabulary = 256\ntied = false\n")
    done = invoke(*(argument.replace("{untied}", str(untied)) for argument in arguments))
    assert done.exit_code == status
    assert text in done.output
    assert done.output.count("\n") == 1


@pytest.mark.parametrize("text", ["tensor=8", "sequence-parallel=yes", "schedule=zb-v", "recompute=selective"])
def test_settings_are_read_with_their_kind(text: str) -> None:
    name, value = parse_setting(text)
    assert type(getattr(Plan(), name)) is type(value)


def test_the_planner_loads_neither_jax_nor_ray() -> None:
    program = "import sys, megatron_ptdp.planner.cli; sys.exit(bool({'jax', 'ray', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
