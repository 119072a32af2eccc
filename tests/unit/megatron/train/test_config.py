"""Configurations: what they may say, and what is said back when they may not."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from megatron_ptdp.errors import BadSizes, ConfigError
from megatron_ptdp.planner.plan import Plan
from megatron_ptdp.planner.settings import config_text
from megatron_ptdp.schedules import registry
from megatron_ptdp.train.config import MODEL_SETTINGS, SECTIONS, Config, load, load_schedules, parse_setting
from megatron_ptdp.train.setup import schedule_of

EXAMPLES = Path(__file__).resolve().parents[4] / "examples" / "train"
TINY = "model=gpt-tiny"


def of(*settings: str) -> Config:
    return load(None, settings)


def test_names_of_settings_are_unique_over_all_tables() -> None:
    names = Counter(MODEL_SETTINGS)
    for kind in SECTIONS.values():
        names.update(kind.__struct_fields__)
    assert [name for name, count in names.items() if count > 1] == []


def test_tables_and_short_names_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text(
        '[model]\npreset = "gpt-tiny"\nlayers = 6\n[parallel]\npipeline = 3\ndata = 2\n'
        '[data]\npath = "x"\n[run]\nsteps = 7\n'
    )
    (tmp_path / "short.toml").write_text('model = "gpt-tiny"\nlayers = 6\npipeline = 3\npath = "x"\nsteps = 7\n')
    long = load(tmp_path / "long.toml")
    assert long == load(tmp_path / "short.toml", ["data=2"])
    assert (long.model.layers, long.model.hidden, long.parallel.pipeline, long.run.steps) == (6, 128, 3, 7)


def test_settings_go_before_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('model = "gpt-tiny"\n[parallel]\npipeline = 2\nschedule = "gpipe"\n')
    config = load(tmp_path / "a.toml", ["pipeline=4", "parallel.schedule=zb-h1", "learning-rate=1e-3", "directory=a b"])
    assert (config.parallel.pipeline, config.parallel.schedule) == (4, "zb-h1")
    assert (config.optimizer.learning_rate, config.run.directory) == (1e-3, "a b")


def test_a_plan_of_the_planner_is_a_configuration(tmp_path: Path) -> None:
    plan = Plan(pipeline=2, tensor=2, data=2, microbatch=2, batch=32, chunks=2, schedule="interleaved", zero=1)
    (tmp_path / "plan.toml").write_text(config_text("gpt-tiny", plan))
    config = load(tmp_path / "plan.toml", ["path=corpus.tokens"])
    parallel = config.parallel
    assert (parallel.pipeline, parallel.tensor, parallel.data, parallel.chunks) == (2, 2, 2, 2)
    assert (parallel.counted(), parallel.microbatch, parallel.zero, parallel.recompute) == (8, 2, 1, "full")
    assert (config.model.hidden, config.data.path) == (128, "corpus.tokens")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["pipelin=4"], "no setting in --set: 'pipelin'; did you mean 'pipeline'?"),
        (["parallel.tensors=4"], "no setting in --set, table parallel: 'tensors'; did you mean 'tensor'?"),
        (["paralel.tensor=4"], "no table in --set: 'paralel'; did you mean 'parallel'?"),
        (["data.pipeline=4"], "no setting in --set, table data: 'pipeline'"),
        (["pipeline=four"], "table parallel: pipeline is 'four': Expected `int`"),
        (["pipeline=0"], "table parallel: pipeline is 0, must be at least 1"),
        (["steps=-1"], "table run: steps is -1, must be at least 1"),
        (["steps=2147483648"], "table run: steps is 2147483648, must be at most 2,147,483,647"),
        (["warmup_steps=3000000000"], "table optimizer: warmup_steps is 3000000000, must be at most 2,147,483,647"),
        (["decay_steps=3000000000"], "table optimizer: decay_steps is 3000000000, must be at most 2,147,483,647"),
        (["microbatch=99999999999999999999"], "microbatch is 99999999999999999999, must be at most 100,000,000"),
        (["tensor=1000000000000000"], "table parallel: tensor is 1000000000000000, must be at most 10,000,000"),
        (["pieces=1000000000"], "table parallel: pieces is 1000000000, must be at most 10,000"),
        (["islands=1000000"], "table cluster: islands is 1000000, must be at most 10,000"),
        (["hosts_per_island=1000000"], "table cluster: hosts_per_island is 1000000, must be at most 10,000"),
        (["devices_per_host=1000000"], "table cluster: devices_per_host is 1000000, must be at most 10,000"),
        (["expert_slices=1000000"], "table parallel: expert_slices is 1000000, must be at most 10,000"),
        (["expert_members=1000000"], "table parallel: expert_members is 1000000, must be at most 10,000"),
        (["clip=nan"], "table optimizer: clip is nan, must be 0 or more, and finite"),
        (["learning_rate=inf"], "table optimizer: learning_rate is inf, must be 0 or more, and finite"),
        (["beta2=1.0"], "table optimizer: beta2 is 1.0, must be below 1"),
        (
            ["epsilon=0"],
            "table optimizer: epsilon is 0.0, must be at least 1.2e-38: a parameter whose gradient is 0 would",
        ),
        (["epsilon=1e-46"], "table optimizer: epsilon is 1e-46, must be at least 1.2e-38"),
        (
            ["learning_rate=1e-5"],
            "table optimizer: learning_rate is 1e-05, below final_learning_rate, which is 3e-05: it would rise to "
            "that; set final_learning_rate to at most 1e-05, or decay to constant",
        ),
        (
            ["warmup_steps=10", "decay_steps=10"],
            "table optimizer: decay_steps is 10, must be above warmup_steps, which is 10: the rate would rise",
        ),
        (["zero=4"], "table parallel: zero is 4, must be one of 0, 1, 2, 3"),
        (["stage_layers=[1,x]"], "table parallel: stage_layers is '[1,x]'"),
        (["stage_layers=[1,-1]"], "stage_layers is (1, -1), each must be 0 or more"),
        (["schedule=1f1v"], "no schedule '1f1v'; did you mean '1f1b'?"),
        (["optimizer=adam"], "table optimizer: optimizer is 'adam'"),
        (["layers=x"], "table model: layers is 'x': Expected `int`"),
        (["heads=0"], "model 'gpt': heads is 0, must be at least 1"),
        (["url=grpc://here:1"], "url and token belong together"),
        (["pipeline"], "'pipeline' is no setting: write name=value"),
    ],
)
def test_what_cannot_be_is_refused_with_the_name_and_the_value(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        of(TINY, *settings)


def test_a_low_learning_rate_has_a_lower_end_or_none() -> None:
    for more in (["final_learning_rate=1e-5"], ["final_learning_rate=0"], ["decay=constant"]):
        assert of(TINY, "learning_rate=1e-5", *more).optimizer.learning_rate == 1e-5


def test_a_run_may_end_while_its_rate_rises() -> None:
    """As one of a few steps does, that tries a configuration out."""
    assert of(TINY, "warmup_steps=10", "steps=3").run.steps == 3
    assert of(TINY, "warmup_steps=10", "decay_steps=5", "decay=constant").optimizer.decay_steps == 5
    assert of(TINY, "warmup_steps=10", "decay_steps=11").optimizer.decay_steps == 11


def test_sgd_has_no_epsilon() -> None:
    assert of(TINY, "optimizer=sgd", "epsilon=0").optimizer.epsilon == 0


def test_a_model_must_be_named() -> None:
    with pytest.raises(ConfigError, match=r"there is no model: set model to one of gpt-1\.7b"):
        of("pipeline=2")
    with pytest.raises(ConfigError, match="no model 'gpt-tinny'; did you mean 'gpt-tiny'"):
        of("model=gpt-tinny")
    with pytest.raises(ConfigError, match="table model: hidden, heads, sequence, vocabulary missing"):
        of("layers=2")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["batch=10", "data=4"], "batch 10 is no multiple of data 4 × microbatch 1; make it a multiple of 4"),
        (["batch=8", "microbatches=3"], "batch 8 is not microbatches 3 × data 1 × microbatch 1; make it 3, or leave"),
    ],
)
def test_batches_that_do_not_divide_are_refused_with_the_sizes(settings: list[str], message: str) -> None:
    with pytest.raises(BadSizes, match=message):
        of(TINY, *settings)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("pipeline = = 2")
    with pytest.raises(ConfigError, match="cannot be read: Invalid value"):
        load(tmp_path / "bad.toml")
    (tmp_path / "table.toml").write_text("[paralel]\npipeline = 2")
    with pytest.raises(ConfigError, match=r"no table in .*'paralel'; did you mean 'parallel'"):
        load(tmp_path / "table.toml")


def test_slices_of_tokens_are_computed_again_whatever_is_said() -> None:
    assert of(TINY, "recompute=selective").parallel.computed_again() == "selective"
    sliced = of(TINY, "pipeline=2", "schedule=terapipe", "token_slices=2", "tied=false")
    assert sliced.parallel.computed_again() == "full"


def test_a_file_may_register_a_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule of the page, in a file."""
    monkeypatch.setattr(registry, "_GENERATORS", {**registry._GENERATORS})
    page = (EXAMPLES.parents[1] / "docs" / "schedules.md").read_text()
    code = next(block for block in page.split("```python\n")[1:] if "@register" in block).split("```")[0]
    file = tmp_path / "waves.py"
    file.write_text(code.replace('"waves"', '"waves-of-a-test"'))
    with pytest.raises(ConfigError, match="there is no schedule 'waves-of-a-test'"):
        of(TINY, "schedule=waves-of-a-test")
    load_schedules(file)
    assert schedule_of(of(TINY, "schedule=waves-of-a-test", "pipeline=2", "microbatches=4")).stages == 2


@pytest.mark.parametrize(("text", "said"), [("1 / 0", "ZeroDivisionError: division by zero"), ("def", "SyntaxError")])
def test_a_file_of_schedules_that_fails_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ConfigError, match=rf"the schedules of .*bad\.py cannot be used: {said}"):
        load_schedules(tmp_path / "bad.py")
    with pytest.raises(ConfigError, match=r"none\.py cannot be used: FileNotFoundError"):
        load_schedules(tmp_path / "none.py")


@pytest.mark.parametrize(
    ("text", "value"), [("a=1", 1), ("a=1.5", 1.5), ("a=true", True), ("a=x=y", "x=y"), ("a=", ""), ("a=[1]", [1])]
)
def test_values_are_read_as_toml_where_they_are_some(text: str, value: object) -> None:
    assert parse_setting(text) == ("a", value)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_examples_can_be_read(path: Path) -> None:
    assert load(path).data.path


def test_there_are_examples() -> None:
    assert len(list(EXAMPLES.glob("*.toml"))) >= 2
