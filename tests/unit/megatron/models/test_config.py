"""Named sizes, refused sizes, and FLOPs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from megatron_ptdp.errors import ConfigError, PlanningError
from megatron_ptdp.models import DATA, TENSOR, Compute, Value, build, cut, flops_per_token, preset, presets, whole
from tests.unit.megatron.models.members import CONFIGS, leaves

TABLE_1 = {
    "gpt-1.7b": 1.7, "gpt-3.6b": 3.6, "gpt-7.5b": 7.5, "gpt-18b": 18.4, "gpt-39b": 39.1, "gpt-76b": 76.1,
    "gpt-145b": 145.6, "gpt-310b": 310.1, "gpt-530b": 529.6, "gpt-1t": 1008.0,
}  # fmt: skip
T5 = {"t5-base": 0.223, "t5-large": 0.738, "t5-3b": 2.85, "t5-11b": 11.31}


@pytest.mark.parametrize("name, billions", [*TABLE_1.items(), *T5.items(), ("pathways-3b", 3.19), ("gpt-10m", 0.0108)])
def test_named_sizes_have_the_papers_numbers_of_parameters(name: str, billions: float) -> None:
    """PTD-P table 1; t5x's T5.1.0; Pathways table 2 with the embeddings."""
    model = build(preset(name))
    total = 0
    for parameter in leaves(model.parameters(whole(model))):
        size = 1
        for n in parameter.shape:
            size *= n
        total += size
    assert name in presets()
    assert total / 1e9 == pytest.approx(billions, rel=0.005, abs=0.051 if name in TABLE_1 else 0.0)


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="there is no model 'gpt-tny'; did you mean 'gpt-tiny'"):
        preset("gpt-tny")
    with pytest.raises(ConfigError, match="'layer'; did you mean 'layers'"):
        preset("gpt-tiny", layer=3)
    with pytest.raises(ConfigError, match="can be planned, not trained: it has a gated feed-forward part"):
        preset("llama3-8b")
    assert not {"llama3-8b", "bloom-176b"} & set(presets())


@pytest.mark.parametrize(
    "more, message",
    [
        ("parallel = true", "it has attention and feed-forward part side by side"),
        ("encoder_layers = 2", "it has learned positions beside an encoder"),
        ("key_heads = 1", "it has fewer heads of keys than of queries"),
    ],
)
def test_a_file_of_the_planner_is_trained_or_refused_with_the_reason(tmp_path: Path, more: str, message: str) -> None:
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 64}
    path = tmp_path / "gpt-tiny.toml"
    path.write_text("".join(f"{name} = {size}\n" for name, size in sizes.items()))
    found = preset(str(path), heads=2)
    assert {**sizes, "heads": 2}.items() <= found.common().items()
    path.write_text(f"{path.read_text()}{more}\n")
    with pytest.raises(ConfigError, match=message):
        preset(str(path))
    with pytest.raises(PlanningError, match=r"there is no model file .*missing\.toml"):
        preset(str(tmp_path / "missing.toml"))


def test_changes_of_a_named_size() -> None:
    changed = preset("gpt-tiny", hidden=64)
    assert (changed.head_size, changed.ffn) == (16, 256)
    assert preset("t5-tiny", head_size=8).head_size == 8


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("gpt-tiny", {"layers": 0}, "model 'gpt': layers is 0, must be at least 1"),
        ("gpt-tiny", {"hidden": 130}, "hidden 130 is no multiple of heads 4"),
        ("gpt-tiny", {"ffn": -1}, "model 'gpt': ffn is -1, must not be negative"),
        ("gpt-tiny", {"encoder_layers": 2}, "a t5 needs both above 0, a gpt has neither"),
        ("gpt-tiny", {"kind": "bert"}, "there is no kind of model 'bert'"),
        ("gpt-tiny", {"activation": "swish"}, "there is no activation 'swish'"),
        ("gpt-tiny", {"experts": 2, "top_k": 3}, "top_k is 3 of 2 experts"),
        ("gpt-tiny", {"experts": 2, "capacity": -1.0}, "capacity is -1.0, must not be negative"),
        (
            "gpt-tiny",
            {"experts": 2, "capacity": float("inf")},
            "capacity is inf, must not be negative, and must be finite",
        ),
        (
            "gpt-tiny",
            {"experts": 2, "balance": float("nan")},
            "balance is nan, must not be negative, and must be finite",
        ),
    ],
)
def test_sizes_that_are_none_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preset(name, **changes)


@pytest.mark.parametrize(
    "name, changes, how, message",
    [
        ("gpt-tiny", {}, {"tensor": 3}, "heads 4 cannot be shared by tensor = 3 members"),
        ("gpt-tiny", {"ffn": 90}, {"tensor": 4}, "ffn 90 cannot be shared by tensor = 4"),
        ("gpt-tiny", {"experts": 6}, {"tensor": 4}, "experts 6 cannot be shared by tensor = 4"),
        ("gpt-tiny", {"sequence": 30}, {"tensor": 4, "sequence_parallel": True}, "sequence 30 .* without sequence_par"),
        ("t5-tiny", {"encoder_sequence": 3}, {"tensor": 2, "sequence_parallel": True}, "encoder_sequence 3 cannot"),
    ],
)
def test_sizes_that_members_cannot_share_are_refused(
    name: str, changes: dict[str, Any], how: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(preset(name, **changes), Compute(**how))


def test_unknown_ways_to_compute_are_refused() -> None:
    with pytest.raises(ConfigError, match="no recompute setting 'selectiv'; did you mean 'selective'"):
        Compute(recompute="selectiv")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no dtype setting 'float16'"):
        Compute(dtype="float16")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tensor is 0"):
        Compute(tensor=0)


def test_flops_are_those_of_the_papers_formulas() -> None:
    """72 B l s h² (1 + s/6h + V/12lh); 96 B l s h² (1 + s/6h + V/16lh); 72 B l s h² (1 + s/3h + V/12lh); B s = 1."""
    c = preset("gpt-1.7b")
    l, h, s, v = c.layers, c.hidden, c.sequence, c.vocabulary  # noqa: E741
    assert flops_per_token(c).model == pytest.approx(72 * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h)))
    assert flops_per_token(c).hardware == flops_per_token(c).model
    full = 96 * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))
    assert flops_per_token(c, "full").hardware == pytest.approx(full)
    selective = 72 * l * h**2 * (1 + s / (3 * h) + v / (12 * l * h))
    assert flops_per_token(c, "selective").hardware == pytest.approx(selective)


def test_flops_of_experts_count_those_that_a_token_goes_through() -> None:
    plain = preset("gpt-tiny")
    experts = preset("gpt-tiny", experts=8, top_k=2)
    one = 3 * 4 * plain.layers * plain.hidden * plain.ffn  # FLOPs of one expert of each layer, per token
    assert flops_per_token(experts).model - flops_per_token(plain).model == pytest.approx(one)
    assert flops_per_token(experts).hardware == flops_per_token(experts).model


def test_parameters_are_counted_all_and_those_for_a_token() -> None:
    c = preset("gpt-tiny")
    plain = build(c).counted()
    expert, router = 2 * c.hidden * c.ffn + c.ffn + c.hidden, c.hidden * 8
    assert plain.parameters == plain.for_a_token == c.planned().parameters + 2 * c.hidden  # and the last norm
    mixture = build(preset("gpt-tiny", experts=8, top_k=2)).counted()
    assert mixture.parameters == plain.parameters + c.layers * (7 * expert + router)
    assert mixture.for_a_token == plain.parameters + c.layers * (expert + router)


def test_batches_and_what_counts_in_them() -> None:
    model = build(CONFIGS["t5"], weighted=True)
    assert model.batch(3) == {
        "tokens": ((3, 9), "int32"),
        "encoder_tokens": ((3, 24), "int32"),
        "weights": ((3, 8), "float32"),
    }
    tokens = np.zeros((3, 9), np.int32)
    assert model.tokens({"tokens": tokens}) == 24
    assert model.tokens({"tokens": tokens, "weights": np.full((3, 8), 0.5, np.float32)}) == 12


def test_values_say_how_they_are_shared_and_what_could_be_sent_in_parts() -> None:
    stages = cut(build(CONFIGS["gpt-experts"]), [1, 1])
    whole_values = build(CONFIGS["gpt-experts"], Compute(tensor=2)).values(stages[1], 6)
    assert whole_values["hidden"] == Value((6, 8, 16), "float32", P(DATA, None, None), split=1)
    assert whole_values["balance"] == Value((6,), "float32", P(DATA), split=None)
    own = build(CONFIGS["gpt-experts"], Compute(tensor=2, sequence_parallel=True, dtype="bfloat16"))
    assert own.values(stages[1], 6)["hidden"] == Value((6, 8, 16), "bfloat16", P(DATA, TENSOR, None), split=None)
    assert own.values(stages[0], 6) == {}
