"""The example programs against plain JAX, on the shared cluster and as a user runs them."""

from __future__ import annotations

import numpy as np
import pytest

from examples import figure2, language_model, ping_pong


def test_figure_2_of_the_paper(session, equal) -> None:
    y, z = figure2.main(session)
    equal((y, z), (np.array([3, 5], np.float32), np.array([2, 4], np.float32)))


def test_back_and_forth_between_two_islands(session, equal) -> None:
    result = ping_pong.main(session)
    v = np.linspace(0.1, 0.45, 8, dtype=np.float32)
    equal(result, ping_pong.plain_jax(v))
    assert ping_pong.ROUND_TRIPS == 100


@pytest.fixture(scope="module", params=[40, pytest.param(language_model.STEPS, marks=pytest.mark.long)])
def trained(request, cluster) -> language_model.Training:
    return language_model.train_pathways(request.param)


def test_language_model_learns(session, trained) -> None:
    assert np.isfinite(trained.losses).all()
    assert trained.losses[:5].mean() > 5, "before it has learnt anything a byte costs ln 256 nats"
    assert trained.losses[-10:].mean() < 2.9


def test_language_model_has_the_bits_of_plain_jax(session, trained) -> None:
    reference = language_model.train_reference(len(trained.losses))
    assert np.array_equal(trained.losses, reference.losses)
    assert language_model.same_bits(trained, reference)


def test_language_model_agrees_with_the_unsplit_one(session, trained) -> None:
    unsplit = language_model.train_unsplit(20)
    np.testing.assert_allclose(trained.losses[:20], unsplit.losses, rtol=0, atol=1e-5)


def test_same_bits_sees_a_difference(trained) -> None:
    off = trained._replace(losses=np.nextafter(trained.losses, np.float32(9)))
    assert not language_model.same_bits(trained, off)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("figure2", (), "f([1. 2.]) = [3. 5.], [2. 4.]"),
        ("ping_pong", (), "bit-equal to plain JAX: True"),
        ("language_model", ("--steps", "3"), "losses and parameters bit-equal to plain JAX: True"),
    ],
)
def test_each_runs_as_a_program(python, name, arguments, said) -> None:
    out = python.finish(python.command("-m", f"examples.{name}", *arguments))
    assert said in out
    python.assert_none_left()
