"""The configuration of a training: a TOML file with one table for each concern, and settings that override it.

    model = "gpt-tiny"            # short for [model] preset = "gpt-tiny"
    pipeline = 2                  # a setting outside of the tables goes to the table that has its name

    [data]
    path = "corpus.tokens"

Names of settings are unique over all tables: `--set pipeline=4` says as much as `--set parallel.pipeline=4`.
What `pathways-plan --config-out FILE` writes is such a file, less the path of the data.
"""

from __future__ import annotations

import runpy
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from megatron_ptdp.config.files import read_toml, split_setting
from megatron_ptdp.config.parallel import Recompute, Zero, batch_fault
from megatron_ptdp.errors import BadSizes, ConfigError
from megatron_ptdp.models.config import DType, ModelConfig, changed, preset, presets
from megatron_ptdp.schedules import schedule_names
from megatron_ptdp.train.rules import MIN_EPSILON, check_numbers


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the file."""


class Parallel(Section, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The parallel configuration: a plan of the planner, and what it leaves open.

    Attributes:
        pipeline, tensor, data: p, t, d
        chunks: v, stages on each pipeline device; 0: the default of the schedule
        lighter: layers that the first and the last stage have fewer; 0: the split of the planner, even or nearly so
        stage_layers: the layers of each stage, instead
        microbatch: b, examples of one microbatch on one replica
        microbatches: m; 0: B/(b·d) where a batch is given, else 1
        batch: examples of a step; 0: m·b·d
        schedule: one of `schedule_names()`
        zero: 0 nothing, 1 optimizer state, 2 gradients, 3 parameters are sharded over the replicas
        join: a forward of the last stage that its backward follows at once is one computation with it: faster, but not
            to the bit the same for all schedules
        scatter_gather: members send 1/t of what goes to the next stage, and gather it there
        placement: "apart" puts the pipeline devices of a replica on islands of their own where there are enough,
            "together" on one
        data_islands: over how many islands the replicas lie
        min_data: replicas with which training goes on at least, where islands are lost for good; 0: as many as `data`
        pieces: buckets per island in which the gradients of a stage cross to the others
        token_slices: n, into which a schedule of slices of tokens (terapipe) cuts each microbatch
        expert_slices: slices of their own for the experts, of expert_members devices each; 0: experts lie with their
            layers
    """

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    chunks: int = 0
    lighter: int = 0
    stage_layers: tuple[int, ...] = ()
    microbatch: int = 1
    microbatches: int = 0
    batch: int = 0
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    zero: Zero = 0
    scatter_gather: bool = True
    join: bool = False
    placement: Literal["apart", "together"] = "apart"
    data_islands: int = 1
    min_data: int = 0
    pieces: int = 1
    token_slices: int = 1
    expert_slices: int = 0
    expert_members: int = 1

    def counted(self) -> int:
        """m, from microbatches or batch.

        Raises:
            BadSizes: the batch does not divide, or both are given and do not agree.
        """
        if not self.batch:
            return self.microbatches or 1
        each = self.microbatch * self.data
        if fault := batch_fault(self.batch, self.data, self.microbatch):
            raise BadSizes(fault)
        if self.microbatches and self.microbatches * each != self.batch:
            raise BadSizes(
                f"batch {self.batch} is not microbatches {self.microbatches} × data {self.data} × microbatch "
                f"{self.microbatch}; make it {self.microbatches * each}, or leave microbatches out"
            )
        return self.batch // each

    def computed_again(self) -> Recompute:
        """The part of the forward that the backward computes again: of slices of tokens it is all, as they are cut."""
        return "full" if self.token_slices > 1 else self.recompute


class Optimizer(Section, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The optimizer and its learning rates.

    Attributes:
        optimizer: "adamw", or "sgd" with momentum beta1
        learning_rate: at its highest, after `warmup_steps`
        decay: how it falls to `final_learning_rate`, which it is after `decay_steps`, as in Megatron-LM; 0 of them:
            after the last step of the run, which is a little above it
        clip: the largest global norm of a gradient; 0: any
    """

    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 3e-4
    final_learning_rate: float = 3e-5
    warmup_steps: int = 0
    decay: Literal["constant", "linear", "cosine"] = "cosine"
    decay_steps: int = 0
    weight_decay: float = 0.1
    clip: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8


class Data(Section, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The token file and the order of its examples.

    Attributes:
        path: of a token file
        check: whether all of it is read once before training, to compare its check sum
        data_seed: of the order; left out, the seed of the run
        held_out: the share of the examples, the last of the file, that training leaves to evaluation; only where
            `eval_every` is set
        loader: whether this process reads the batches of steps and sends them to the devices, or each host reads the
            rows of its own devices, from a file of that path; for tenants that the operator trusts
    """

    path: str = ""
    check: bool = True
    loader: Literal["client", "hosts"] = "client"
    data_seed: int | None = None
    held_out: float = 0.01


class Run(Section, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The length of a run, and the files that it keeps.

    Attributes:
        steps: in all, those of earlier runs included
        seed: of the parameters, and of the order of the data
        dtype: of computation; parameters and their gradients are summed in float32 at least
        directory: for checkpoints, metrics and traces
        checkpoint_every: steps; 0: only at the end
        keep: the newest checkpoints that stay
        snapshot_every: steps between two snapshots of the state in the memory of other islands, from which training
            goes on after a loss; 0: none are taken
        log_every: steps between two lines where there is no terminal
        in_flight: steps that may be launched before the loss of an earlier one is there
        eval_every: steps between two evaluations on held-out examples, and one at the end; 0: no evaluation
        eval_batches: batches of an evaluation, each as large as that of a step; fewer where fewer examples are held out
        peak_flops: of one device, for the MFU; 0: measured at the start
    """

    steps: int = 100
    seed: int = 0
    dtype: DType = "float32"
    directory: str = "run"
    checkpoint_every: int = 0
    keep: int = 2
    snapshot_every: int = 0
    log_every: int = 10
    in_flight: int = 2
    eval_every: int = 0
    eval_batches: int = 4
    peak_flops: float = 0.0


class Cluster(Section, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The cluster to run on: one made for this run, or one that is there.

    Attributes:
        islands, hosts_per_island, devices_per_host, platform: of one's own cluster; 0 islands or devices: as many as
            the sizes need
        lost_after: seconds after which one of its islands that is away counts as lost
        address: of a Ray cluster to start it on; left out, on this machine
        url, token, ca: of a cluster that runs, in place of all these
    """

    islands: int = 0
    hosts_per_island: int = 1
    devices_per_host: int = 0
    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    lost_after: float = 120.0
    address: str = ""
    url: str = ""
    token: str = ""
    ca: str = ""


SECTIONS: dict[str, type[Section]] = {
    "parallel": Parallel,
    "optimizer": Optimizer,
    "data": Data,
    "run": Run,
    "cluster": Cluster,
}
MODEL_SETTINGS = ("preset", *(field.name for field in fields(ModelConfig)))
SETTINGS: dict[str, str] = {
    **dict.fromkeys(MODEL_SETTINGS, "model"),
    **{name: section for section, kind in SECTIONS.items() for name in kind.__struct_fields__},
}
"""The table of each setting, by its name."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """A whole configuration, checked as far as it can be without devices."""

    model: ModelConfig
    parallel: Parallel = Parallel()
    optimizer: Optimizer = Optimizer()
    data: Data = Data()
    run: Run = Run()
    cluster: Cluster = Cluster()


def load(path: str | Path | None, settings: Sequence[str] = ()) -> Config:
    """The configuration of a file, with settings `name=value` that go before it.

    Raises:
        ConfigError: the file cannot be read, or a name is unknown or a value invalid.
        BadSizes: the batch does not divide.
    """
    table = read_toml(Path(path), f"the configuration {path}", ConfigError) if path is not None else {}
    return config_of(table, dict(map(parse_setting, settings)), str(path or "the settings"))


def load_schedules(path: str | Path) -> None:
    """Runs a Python file that registers schedules of its user's own.

    Raises:
        ConfigError: it cannot be run; with its error.
    """
    try:
        runpy.run_path(str(path))
    except Exception as error:  # whatever a user's file may raise
        raise ConfigError(f"the schedules of {path} cannot be used: {type(error).__name__}: {error}") from error


def parse_setting(text: str) -> tuple[str, Any]:
    """`pipeline=4` as a name and a value, which is read as TOML where it is valid TOML, else as text.

    Raises:
        ConfigError: it has no value.
    """
    name, value = split_setting(text)
    if not name or "=" not in text:
        raise ConfigError(f"{text!r} is no setting: write name=value, as in pipeline=4 or run.steps=100")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value


def config_of(table: dict[str, Any], settings: dict[str, Any], where: str) -> Config:
    """The configuration of the tables of a file, and of settings by short or full name.

    Raises:
        ConfigError, BadSizes: as `load`.
    """
    merged: dict[str, dict[str, Any]] = {name: {} for name in ("model", *SECTIONS)}
    for name, value in table.items():
        if isinstance(value, dict):
            if name not in merged:
                raise ConfigError.unknown(f"table in {where}: ", name, merged)
            for inner, one in value.items():
                _enter(merged, f"{name}.{inner}", one, where)
        else:
            _enter(merged, name, value, where)
    for name, value in settings.items():
        _enter(merged, name, value, "--set")
    made = {name: _convert(merged[name], kind, name) for name, kind in SECTIONS.items()}
    config = Config(model=_model(merged["model"]), **made)
    _check(config)
    return config


def _enter(merged: dict[str, dict[str, Any]], name: str, value: Any, where: str) -> None:
    section, dot, short = name.rpartition(".")
    if name == "model" and isinstance(value, str):
        section, short = "model", "preset"
    elif not dot:
        short = name
        if short not in SETTINGS:
            raise ConfigError.unknown(f"setting in {where}:", name, SETTINGS)
        section = SETTINGS[short]
    if section not in merged:
        raise ConfigError.unknown(f"table in {where}:", section, merged)
    known = [setting for setting, home in SETTINGS.items() if home == section]
    if short not in known:
        raise ConfigError.unknown(f"setting in {where}, table {section}:", short, known)
    merged[section][short] = value


def _convert(values: dict[str, Any], kind: type[Section], section: str) -> Any:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"table {section}: {_in_words(str(error), values, kind)}") from error


def _in_words(message: str, values: dict[str, Any], kind: type[Section]) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.pipeline`" with the name in front, and the values that can be."""
    text, _, place = message.partition(" - at `$.")
    name = place.rstrip("`").partition("[")[0]
    if name not in values:
        return message
    allowed = get_type_hints(kind)[name]
    if get_origin(allowed) is Literal:
        return f"{name} is {values[name]!r}, must be one of {', '.join(map(str, get_args(allowed)))}"
    return f"{name} is {values[name]!r}: {text}"


def _model(values: dict[str, Any]) -> ModelConfig:
    rest = dict(values)
    name = rest.pop("preset", None)
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"table model: preset is {name!r}, must be one of {', '.join(presets())}")
    if not name and not rest:
        raise ConfigError(f"there is no model: set model to one of {', '.join(presets())}, or its sizes in [model]")
    hints = get_type_hints(ModelConfig)
    for setting, value in rest.items():
        try:
            msgspec.convert(value, hints[setting])
        except msgspec.ValidationError as error:
            raise ConfigError(f"table model: {setting} is {value!r}: {error}") from error
    if name:
        return changed(preset(name), rest)
    needed = ("layers", "hidden", "heads", "sequence", "vocabulary")
    if missing := [setting for setting in needed if setting not in rest]:
        raise ConfigError(f"table model: {', '.join(missing)} missing; or set preset to one of {', '.join(presets())}")
    return ModelConfig(**{"kind": "gpt", **rest})


def _check(config: Config) -> None:
    """Checks rules between settings, and those of single ones that msgspec does not know.

    Raises:
        ConfigError, BadSizes.
    """
    for section in SECTIONS:
        check_numbers(section, msgspec.structs.asdict(getattr(config, section)))
    if config.data.held_out >= 1:
        raise ConfigError(f"table data: held_out is {config.data.held_out}, must be below 1: it is a share")
    if config.parallel.min_data > config.parallel.data:
        raise ConfigError(
            f"table parallel: min_data is {config.parallel.min_data}, must be at most data, which is "
            f"{config.parallel.data}: training never has more replicas"
        )
    if any(layers < 0 for layers in config.parallel.stage_layers):
        raise ConfigError(f"table parallel: stage_layers is {config.parallel.stage_layers}, each must be 0 or more")
    if config.parallel.schedule not in schedule_names():
        raise ConfigError.unknown("schedule", config.parallel.schedule, schedule_names())
    _check_optimizer(config.optimizer)
    if bool(config.cluster.url) != bool(config.cluster.token):
        raise ConfigError(
            "table cluster: url and token belong together; set both, or neither; `pathways status` shows them"
        )
    config.parallel.counted()


def _check_optimizer(optimizer: Optimizer) -> None:
    for name in ("beta1", "beta2"):
        if getattr(optimizer, name) >= 1:
            raise ConfigError(f"table optimizer: {name} is {getattr(optimizer, name)}, must be below 1")
    if optimizer.optimizer == "adamw" and optimizer.epsilon < MIN_EPSILON:
        raise ConfigError(
            f"table optimizer: epsilon is {optimizer.epsilon}, must be at least {MIN_EPSILON}: a parameter whose "
            "gradient is 0 would become NaN"
        )
    if optimizer.decay != "constant" and optimizer.learning_rate < optimizer.final_learning_rate:
        raise ConfigError(
            f"table optimizer: learning_rate is {optimizer.learning_rate}, below final_learning_rate, which is "
            f"{optimizer.final_learning_rate}: it would rise to that; set final_learning_rate to at most "
            f"{optimizer.learning_rate}, or decay to constant"
        )
    if optimizer.decay != "constant" and 0 < optimizer.decay_steps <= optimizer.warmup_steps:
        raise ConfigError(
            f"table optimizer: decay_steps is {optimizer.decay_steps}, must be above warmup_steps, which is "
            f"{optimizer.warmup_steps}: the rate would rise after them; set decay_steps to 0 for as many as steps, or "
            "decay to constant"
        )
