"""Parameters and FLOPs equal the papers' formulas, and what counting them one by one gives."""

from __future__ import annotations

import pytest

from megatron_ptdp.config import load
from megatron_ptdp.config.model import Model
from megatron_ptdp.errors import BadFigure
from megatron_ptdp.planner.layers import Split, score_products, weight_products
from tests.unit.megatron.planner.helpers import gpt


@pytest.mark.parametrize(("layers", "hidden", "heads"), [(1, 64, 1), (24, 2304, 24), (96, 12288, 96)])
def test_parameters_equal_equation_2(layers: int, hidden: int, heads: int) -> None:
    model = gpt(layers, hidden, heads)
    wanted = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (1024 + 512) / (12 * layers * hidden))
    assert model.parameters == pytest.approx(wanted, rel=1e-12)


def test_parameters_equal_a_count_of_every_array() -> None:
    l, h, f, V, s = 3, 64, 256, 1000, 32  # noqa: E741
    arrays: list[tuple[int, ...]] = [(V, h), (s, h)]
    for _ in range(l):
        arrays += [(h, 3 * h), (3 * h,), (h, h), (h,), (h, f), (f,), (f, h), (h,), (h,), (h,), (h,), (h,)]
    count = sum(a[0] * (a[1] if len(a) == 2 else 1) for a in arrays)
    assert Model("x", l, h, 4, s, V).parameters == count


def test_grouped_keys_and_gated_ffn_are_counted() -> None:
    """Llama 3 8B: 8.03 billion parameters, as its model card prints."""
    assert load.model("llama3-8b").parameters / 1e9 == pytest.approx(8.03, abs=0.01)
    assert load.model("llama3-70b").parameters / 1e9 == pytest.approx(70.55, abs=0.1)
    assert load.model("llama3-405b").parameters / 1e9 == pytest.approx(405.8, abs=0.5)


@pytest.mark.parametrize(("name", "billions"), [("base", 0.223), ("large", 0.738), ("3b", 2.85), ("11b", 11.31)])
def test_encoder_decoders_are_counted(name: str, billions: float) -> None:
    """The sizes of T5.1.0, by arithmetic from its configurations."""
    assert load.model(f"t5-{name}").parameters / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(("batch", "layers", "hidden", "heads"), [(1, 1, 64, 1), (512, 24, 2304, 24)])
def test_flops_equal_the_papers_formulas(batch: int, layers: int, hidden: int, heads: int) -> None:
    model, s, V = gpt(layers, hidden, heads), 512, 1024
    whole = 96 * batch * s * layers * hidden**2 * (1 + s / (6 * hidden) + V / (16 * layers * hidden))
    needed = 72 * batch * s * layers * hidden**2 * (1 + s / (6 * hidden) + V / (12 * layers * hidden))
    selective = 72 * batch * s * layers * hidden**2 * (1 + s / (3 * hidden) + V / (12 * layers * hidden))
    assert model.paper_flops(batch) == pytest.approx(whole, rel=1e-12)
    assert model.model_flops(batch) == pytest.approx(needed, rel=1e-12)
    assert model.hardware_flops(batch, "selective") == pytest.approx(selective, rel=1e-12)
    assert model.hardware_flops(batch, "none") == model.model_flops(batch)
    assert model.hardware_flops(batch, "full") == model.paper_flops(batch)


@pytest.mark.parametrize("model", ["gpt-1.7b", "llama3-70b", "t5-large"])
def test_flops_equal_the_sum_over_the_products_that_run(model: str) -> None:
    whole = load.model(model)
    for layer in dict.fromkeys(whole.row):
        split = Split(tensor=1, microbatch=1, sequence_parallel=False, recompute="none")
        products = weight_products(layer, split) + score_products(layer, split, load.software("ptdp"))
        assert sum(product.flops for product in products) == pytest.approx(layer.forward_flops, rel=1e-12)


def test_tensor_parallel_products_sum_to_the_whole() -> None:
    layer = load.model("gpt3-175b").row[0]
    for t in (2, 4, 8):
        split = Split(tensor=t, microbatch=2, sequence_parallel=False, recompute="none")
        products = weight_products(layer, split) + score_products(layer, split, load.software("ptdp"))
        assert t * sum(product.flops for product in products) == pytest.approx(2 * layer.forward_flops, rel=1e-12)


@pytest.mark.parametrize("field", ["layers", "hidden", "heads", "sequence", "vocabulary"])
def test_impossible_sizes_are_refused(field: str) -> None:
    with pytest.raises(BadFigure, match=f"{field} is 0, must be at least 1"):
        gpt(**{field: 0})


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(BadFigure, match="hidden 100 is no multiple of heads 16"):
        gpt(hidden=100)
