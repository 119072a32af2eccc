"""The hosts' side of a checkpoint: they write their parts of its leaves by TensorStore, and read them.

The functions that are made here run in a host's process for Python, which loads this file and nothing else of a client.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Leaf(NamedTuple):
    """An array in a checkpoint: TensorStore's description of it and of its context, and how many blocks it has along
    each dimension."""

    store: dict[str, Any]
    context: dict[str, Any]
    shape: tuple[int, ...]
    blocks: tuple[int, ...]

    def box(self, numbers: Sequence[Any]) -> tuple[slice, ...]:
        """The place of a host's part, from the numbers of its blocks along each dimension that has several."""
        rest = iter(numbers)
        found = []
        for size, count in zip(self.shape, self.blocks, strict=True):
            mine = next(rest) if count > 1 else (0,)
            found.append(slice(int(mine[0]) * size // count, (int(mine[-1]) + 1) * size // count))
        return tuple(found)


def digest_of(path: str) -> str:
    """The digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def looker(digests: Mapping[str, str]) -> Callable[[Any], Any]:
    """A function that raises where files with these digests, by path, are not seen."""

    def see_files(_: Any) -> Any:
        for path, digest in digests.items():
            if digest_of(path) != digest:
                raise FileNotFoundError(f"another {path} is here")
        return np.int32(len(digests))

    return see_files


def writer(leaves: Sequence[Leaf]) -> Callable[..., Any]:
    """A function of a host's parts, and of the numbers of their blocks, that writes them."""

    def write_checkpoint(parts: Sequence[Any], numbers: Sequence[Any]) -> Any:
        import tensorstore as ts

        stores = [
            ts.open(ts.Spec(leaf.store), create=True, open=True, context=ts.Context(leaf.context)) for leaf in leaves
        ]
        written = [
            store.result()[leaf.box(mine)].write(part)
            for store, leaf, part, mine in zip(stores, leaves, parts, numbers, strict=True)
        ]
        for one in written:
            one.result()
        return np.int32(len(written))

    return write_checkpoint


def reader(leaves: Sequence[Leaf], dtypes: Sequence[Any]) -> Callable[..., Any]:
    """A function of the numbers of a host's blocks that gives its parts, as arrays of these types."""

    def read_checkpoint(numbers: Sequence[Any]) -> Any:
        import tensorstore as ts

        stores = [ts.open(ts.Spec(leaf.store), open=True, context=ts.Context(leaf.context)) for leaf in leaves]
        coming = [
            store.result()[leaf.box(mine)].read() for store, leaf, mine in zip(stores, leaves, numbers, strict=True)
        ]
        return [np.asarray(one.result()).astype(dtype) for one, dtype in zip(coming, dtypes, strict=True)]

    return read_checkpoint
