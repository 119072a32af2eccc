"""Sizes of a run, how layers are cut, where slices lie, and what options cannot be."""

from __future__ import annotations

import pytest

from megatron_ptdp.errors import BadSizes, ConfigError
from megatron_ptdp.models import Stage
from megatron_ptdp.parallel import Options, Sizes, cut
from megatron_ptdp.parallel.layout import islands_of


def test_sizes_multiply() -> None:
    sizes = Sizes(pipeline=2, tensor=2, data=4, chunks=2, microbatches=8, examples=3, islands=2)
    assert (sizes.stages, sizes.members, sizes.devices, sizes.batch) == (4, 2, 16, 96)
    assert Sizes.for_batch(96, 2, 2, 4, 3, 2, 2) == sizes


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Sizes(pipeline=0), r"pipeline must be a whole number of at least 1, not 0; .*Sizes\(pipeline=0"),
        (lambda: Sizes(tensor=2.0), "tensor must be a whole number of at least 1, not 2.0"),  # type: ignore[arg-type]
        (lambda: Sizes(data=True), "data must be a whole number"),
        (lambda: Sizes(data=3, islands=2), "3 data-parallel replicas cannot lie evenly on 2 islands"),
        (
            lambda: Sizes.for_batch(10, 1, 1, 2, 2),
            "batch 10 is no multiple of data 2 × microbatch 2; make it a multiple",
        ),
        (lambda: Sizes(2, 2, 3).require_devices(8), "pipeline 2 × tensor 2 × data 3 are 12 devices, but there are 8"),
    ],
)
def test_sizes_that_cannot_be(make, says: str) -> None:
    with pytest.raises(BadSizes, match=says):
        make()


def layers(stages: tuple[Stage, ...]) -> list[int]:
    return [stage.last - stage.first for stage in stages]


def test_layers_are_cut_evenly_or_with_lighter_ends() -> None:
    assert layers(cut(12, 4)) == [3, 3, 3, 3]
    assert layers(cut(62, 4, lighter=1)) == [15, 16, 16, 15]  # as in Pathways, Table 2
    assert layers(cut(62, 16, lighter=1)) == [3, *[4] * 14, 3]
    assert layers(cut(4, 2, lighter=1)) == [2, 2]  # both are ends
    assert layers(cut(3, 1, lighter=1)) == [3]
    assert layers(cut(5, 3, counts=[1, 4, 0])) == [1, 4, 0]


def test_first_and_last_stage_have_embedding_and_loss() -> None:
    stages = cut(6, 3)
    assert stages == (Stage(0, 2, True, False), Stage(2, 4, False, False), Stage(4, 6, False, True))
    assert cut(2, 1) == (Stage(0, 2, True, True),)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: cut(3, 6), "3 layers cannot fill 6 stages"),
        (lambda: cut(9, 4), "9 layers do not divide into 4 stages, with or without one fewer at the ends"),
        (lambda: cut(12, 4, lighter=1), "12 layers do not divide into 4 stages where the first and the last have 1"),
        (lambda: cut(4, 3, lighter=2), "do not divide"),
        (lambda: cut(4, 2, counts=[2, 1]), r"layers per stage are \[2, 1\]: 2 stages with 3 layers"),
        (lambda: cut(4, 2, counts=[5, -1]), "with 4 layers together are needed"),
    ],
)
def test_layers_that_do_not_divide(make, says: str) -> None:
    with pytest.raises(BadSizes, match=says):
        make()


def test_replicas_get_islands_of_their_own() -> None:
    assert islands_of(Sizes(pipeline=2, data=2, islands=2), [0, 1], "together") == [[0, 0], [1, 1]]
    assert islands_of(Sizes(pipeline=4), [0, 1], "apart") == [[0, 0, 1, 1]]
    assert islands_of(Sizes(pipeline=4), [0, 1], "together") == [[0, 0, 0, 0]]
    assert islands_of(Sizes(pipeline=2, data=2, islands=2), [5, 6, 7, 8], "apart") == [[5, 6], [7, 8]]
    with pytest.raises(BadSizes, match="replicas are to lie on 2 islands, but there are 1"):
        islands_of(Sizes(data=2, islands=2), [0], "together")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (Options(zero=4), "zero is 0, 1, 2 or 3, not 4"),
        (Options(zero=3), "zero 3 gathers the parameters for each use.*pipeline 2 × chunks 1"),
        (Options(clip=0.0), "clip is a norm above 0"),
        (Options(keep="all"), "keep is 'input' or 'residuals', not 'all'"),  # type: ignore[arg-type]
        (Options(pieces=0), "pieces is a whole number of at least 1, not 0"),
        (Options(master="int8"), "master is one of .*, not 'int8'"),
        (Options(compute="float64"), "float64 needs jax.config.update"),
    ],
)
def test_options_that_cannot_be(options: Options, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        options.check(Sizes(pipeline=2))
