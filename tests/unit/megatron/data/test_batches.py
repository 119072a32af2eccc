"""The order of the data: a function of seed and step, each example once in a pass, whatever the parallel sizes."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest

from megatron_ptdp.data import Batches, HostRows, TokenFile, TokenWriter
from megatron_ptdp.data.batches import lengths_of
from megatron_ptdp.errors import ConfigError, TokenFileError


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    """Tokens 0, 1, 2, …: a token tells its place."""
    with TokenWriter(tmp_path / "a", 1000, "count") as writer:
        writer.add(np.arange(81))
    return TokenFile.open(tmp_path / "a")


def starts(batch: dict[str, np.ndarray]) -> list[int]:
    return batch["tokens"][:, 0].tolist()


def test_each_token_is_predicted_once_in_a_pass(file: TokenFile) -> None:
    batches = Batches(file, {"tokens": 5}, 4, seed=1)  # 80 tokens to predict, 4 in an example, 4 examples: 5 steps
    seen = np.concatenate([batches.at(step)["tokens"] for step in range(5)])
    assert seen.shape == (20, 5)
    assert sorted(seen[:, 1:].ravel().tolist()) == list(range(1, 81))
    assert (np.diff(seen, axis=1) == 1).all()
    assert batches.passes(5) == 1.0


def test_passes_differ_and_batches_reach_over_their_border(file: TokenFile) -> None:
    batches = Batches(file, {"tokens": 5}, 6, seed=1)
    seen = list(itertools.chain.from_iterable(starts(batches.at(step)) for step in range(10)))
    passes = [seen[at : at + 20] for at in (0, 20, 40)]
    assert [sorted(one) for one in passes] == [list(range(0, 80, 4))] * 3
    assert passes[0] != passes[1] != passes[2]


def test_the_seed_alone_decides(file: TokenFile) -> None:
    def order(seed: int) -> list[list[int]]:
        batches = Batches(file, {"tokens": 5}, 4, seed)
        return [starts(batches.at(step)) for step in range(12)]

    assert order(3) == order(3)
    assert order(3) != order(4)


def test_the_order_does_not_depend_on_the_size_of_batches(file: TokenFile) -> None:
    small, large = Batches(file, {"tokens": 5}, 2, 7), Batches(file, {"tokens": 5}, 8, 7)
    for step in range(5):
        parts = [small.at(4 * step + k)["tokens"] for k in range(4)]
        np.testing.assert_array_equal(np.concatenate(parts), large.at(step)["tokens"])


@pytest.mark.parametrize("step", [0, 1, 4, 5, 17, 1_000_000])
def test_it_goes_on_at_any_step(file: TokenFile, step: int) -> None:
    batches = Batches(file, {"tokens": 5}, 4, seed=2)
    for k, batch in enumerate(itertools.islice(batches.starting_at(step), 7)):
        np.testing.assert_array_equal(batch["tokens"], batches.at(step + k)["tokens"])


def test_what_is_held_out_is_the_end_of_the_file_and_never_trained_on(file: TokenFile) -> None:
    batches = Batches(file, {"tokens": 5}, 3, seed=1, held_out=0.33)  # 7 of 20 examples
    assert batches.there == 13
    trained = itertools.chain.from_iterable(starts(batches.at(step)) for step in range(13))
    assert set(trained) == set(range(0, 52, 4))
    assert [starts(batch) for batch in batches.held_out(9)] == [[52, 56, 60], [64, 68, 72]]
    assert [starts(batch) for batch in batches.held_out(1)] == [[52, 56, 60]]
    assert batches.held_out(1)[0]["tokens"].dtype == np.int32


@pytest.mark.parametrize(
    ("share", "message"),
    [(0.0, "0 of 20 examples are held out, and an evaluation takes at least the 3"), (0.1, "2 of 20 examples are")],
)
def test_too_little_held_out_is_refused(file: TokenFile, share: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Batches(file, {"tokens": 5}, 3, 1, share).held_out(1)


def test_a_share_that_leaves_nothing_to_train_on_is_refused(file: TokenFile) -> None:
    with pytest.raises(ConfigError, match=r"held_out 0\.99 of 20 examples leaves none"):
        Batches(file, {"tokens": 5}, 3, 1, 0.99)


def test_an_encoder_reads_what_comes_before_the_decoder_s_text(file: TokenFile) -> None:
    batch = Batches(file, {"encoder": 6, "decoder": 3}, 2, seed=1).at(0)
    assert batch["encoder"].shape == (2, 6)
    assert batch["decoder"].shape == (2, 3)
    assert batch["encoder"].dtype == np.int32
    np.testing.assert_array_equal(batch["decoder"][:, 0], batch["encoder"][:, -1] + 1)


def test_a_file_that_is_too_short_is_refused(file: TokenFile) -> None:
    with pytest.raises(ConfigError, match="has 81 tokens, too few for one example of 129"):
        Batches(file, {"tokens": 129}, 4, seed=1)


def test_the_model_says_what_an_example_is() -> None:
    assert lengths_of({"encoder": ((1, 8), "int32"), "decoder": ((1, 4), "int32")}) == {"encoder": 8, "decoder": 4}
    with pytest.raises(ConfigError, match=r"wants image as float32\[1, 8, 8\]"):
        lengths_of({"image": ((1, 8, 8), "float32")})


def test_a_host_that_has_the_file_reads_its_rows_of_a_batch(file: TokenFile) -> None:
    """Wherever a batch is cut, and in whatever pass: what travels is the name of the file."""
    batches = Batches(file, {"encoder_tokens": 3, "tokens": 2}, 6, seed=1)
    sent = pickle.dumps(HostRows(batches, ("tokens",)))
    assert len(sent) < 1000
    on_host = pickle.loads(sent)
    for step in (0, 3, 11):
        whole = batches.at(step)["tokens"]
        for places in (np.arange(6, dtype=np.int32).reshape(2, 3), np.array([[5], [0]], np.int32)):
            found = on_host(np.int32(step), places)
            np.testing.assert_array_equal(found["tokens"], whole[places])
    assert found["tokens"].dtype == np.int32
    assert list(found) == ["tokens"]


def test_a_host_that_has_another_file_at_the_path_reads_nothing(file: TokenFile) -> None:
    sent = pickle.dumps(HostRows(Batches(file, {"tokens": 5}, 6, seed=1), ("tokens",)))
    for tokens in (np.arange(81)[::-1], np.arange(90)):
        with TokenWriter(file.path, 1000, "count") as writer:
            writer.add(tokens)
        with pytest.raises(TokenFileError, match=rf"is not that of the training: it has {len(tokens)} tokens .* 81 wi"):
            pickle.loads(sent)
