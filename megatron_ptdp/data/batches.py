"""Batches of steps: a pure function of the seed and the step's number, whatever the parallel sizes.

Tokens are split into consecutive examples. Grain shuffles them again for each pass, and splits the endless row
of them into batches; microbatches and replicas are parts of a batch. So the position in the data is the number of the
step, and a checkpoint needs nothing else. The last examples of the file may be held out: training never sees them, and
an evaluation takes them in their order.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grain
import numpy as np

from megatron_ptdp.data.tokenfile import Header, TokenFile
from megatron_ptdp.errors import ConfigError, TokenFileError

Lengths = Mapping[str, int]
"""Tokens of one example, by the name of their array, in order."""

_AHEAD = 4
"""Batches that are read ahead."""


def lengths_of(batch: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, int]:
    """Tokens of one example of a model, from `Model.batch(1)`.

    Raises:
        ConfigError: the model wants more than rows of tokens, which a token file does not have.
    """
    for name, (shape, dtype) in batch.items():
        if len(shape) != 2 or not np.issubdtype(np.dtype(dtype), np.integer):
            raise ConfigError(f"the model wants {name} as {dtype}{list(shape)}; a token file has rows of whole numbers")
    return {name: shape[1] for name, (shape, _) in batch.items()}


class Examples:
    """A token file as examples: row k begins with the last token of row k - 1, so that each is predicted once.

    An example with several arrays is cut into them, the first tokens to the first array: an encoder reads a text, and
    the decoder goes on with it.

    Args:
        held_out: the share of the rows, rounded up, that are not among these examples: the last ones of the file.
    """

    def __init__(self, file: TokenFile, lengths: Lengths, held_out: float = 0.0) -> None:
        self.tokens, self.lengths = file.tokens, dict(lengths)
        self.row = sum(lengths.values())
        rows = max(0, file.header.count - 1) // (self.row - 1)
        self.count = rows - math.ceil(rows * held_out)
        if not rows:
            raise ConfigError(
                f"token file {file.path} has {file.header.count:,} tokens, too few for one example of {self.row}"
            )
        if not self.count:
            raise ConfigError(f"held_out {held_out} of {rows:,} examples leaves none to train on; lower held_out")
        self.rows = rows

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> dict[str, np.ndarray]:
        start = k * (self.row - 1)
        row = np.asarray(self.tokens[start : start + self.row], np.int32)
        cuts = np.cumsum(list(self.lengths.values()))[:-1]
        return dict(zip(self.lengths, np.split(row, cuts), strict=True))


class Batches:
    """The batches of all steps, of `examples` each. Pickled, they are the name of their file and the order.

    Args:
        held_out: as `Examples` has it
    """

    def __init__(self, file: TokenFile, lengths: Lengths, examples: int, seed: int, held_out: float = 0.0) -> None:
        self._source = source = Examples(file, lengths, held_out)
        self.size, self.there = examples, len(source)
        self._opened = str(Path(file.path).absolute()), file.header, dict(lengths), examples, seed, held_out
        self._rows: Any = grain.MapDataset.source(source).seed(seed).shuffle().repeat()
        self._batches: Any = self._rows.batch(examples, drop_remainder=True)

    def __reduce__(self) -> Any:
        return _opened, self._opened

    def at(self, step: int) -> dict[str, np.ndarray]:
        """The batch of a step, counted from 0: each array (examples, tokens of one), int32."""
        batch: dict[str, np.ndarray] = self._batches[step]
        return batch

    def rows(self, places: Iterable[int]) -> dict[str, np.ndarray]:
        """Examples by their places in the row of all batches: that of step s begins at s times `examples`."""
        found = [self._rows[place] for place in places]
        return {name: np.stack([one[name] for one in found]) for name in self._source.lengths}

    def held_out(self, count: int) -> list[dict[str, np.ndarray]]:
        """The first `count` whole batches of the held-out rows, or as many as there are.

        Raises:
            ConfigError: the held-out rows make no whole batch.
        """
        first, rows = len(self._source), self._source.rows
        found = min(count, (rows - first) // self.size)
        if not found:
            raise ConfigError(
                f"{rows - first:,} of {rows:,} examples are held out, and an evaluation takes at least the {self.size} "
                "of one step; raise held_out"
            )
        starts = range(first, first + found * self.size, self.size)
        batches = ([self._source[k] for k in range(start, start + self.size)] for start in starts)
        return [{name: np.stack([row[name] for row in rows]) for name in rows[0]} for rows in batches]

    def starting_at(self, step: int) -> Iterator[dict[str, np.ndarray]]:
        """The batches of this step and all later ones, some read ahead by threads."""
        ahead: Any = iter(self._batches.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=_AHEAD)))
        ahead.set_state({"next_index": step})
        return ahead

    def passes(self, step: int) -> float:
        """The number of passes over the file after `step` steps."""
        return step * self.size / self.there


def _opened(path: str, header: Header, lengths: Lengths, examples: int, seed: int, held_out: float) -> Batches:
    """Batches on a host that has the file. Its tokens were checked where training began.

    Raises:
        TokenFileError: it cannot be read, or is another file.
    """
    file = TokenFile.open(path, check=False)
    there, here = ((one.count, one.crc32) for one in (header, file.header))
    if there != here:
        raise TokenFileError(
            f"token file {path} on host {platform.node()} is not that of the training: it has {here[0]:,} tokens with "
            f"CRC-32 {here[1]:08x}, the training's {there[0]:,} with {there[1]:08x}; copy that one to all hosts"
        )
    return Batches(file, lengths, examples, seed, held_out)
