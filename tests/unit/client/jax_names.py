"""What becomes of a `pw.Array` in each public function of `jax.numpy`, and in each method and property of `jax.Array`.

`python -m tests.unit.client.jax_names` writes the lists of docs/arrays.md anew.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

import pathways_ray as pw
from pathways_ray.client import eager
from tests.unit.client.local import LocalSession, opened

PAGE = Path(__file__).resolve().parents[3] / "docs" / "arrays.md"

M = np.array([[4.0, 1.0, 0.5], [1.0, 3.0, 0.25], [0.5, 0.25, 2.0]], np.float32)
W = np.array([[2, 1, 0], [0, 2, 1], [1, 0, 2]], np.int32)
B = np.array([[True, False, True]] * 3)
V, N = M[0], W[0]

SPECIAL: dict[str, tuple[Any, ...]] = {
    "apply_along_axis": (lambda v: v * 2, 0, M),
    "apply_over_axes": (lambda v, axis: v.sum(axis, keepdims=True), M, [0]),
    "array_str": (V,),
    "block": ([[M, M]],),
    "bincount": (N,),
    "choose": (N, [V, V, V], None, "clip"),
    "compress": (np.array([True, False, True]), V),
    "delete": (V, 0),
    "dsplit": (np.ones((2, 2, 2), np.float32), 2),
    "expand_dims": (M, 0),
    "einsum": ("ij,jk->ik", M, M),
    "einsum_path": ("ij,jk->ik", M, M),
    "frompyfunc": (lambda a, b: a + b, 2, 1),
    "from_dlpack": (M,),
    "interp": (V, np.sort(V), V),
    "ix_": (N, N),
    "lexsort": ((N, N),),
    "pad": (M, 1),
    "piecewise": (V, [V > 1, V <= 1], [lambda v: v, lambda v: -v]),
    "fill_diagonal": (M, 0.0),
    "place": (M, B, V),
    "put": (M, N, V),
    "put_along_axis": (M, W, V, 1),
    "ravel_multi_index": ((N, N), (3, 3), "clip"),
    "polyfit": (V, V, 1),
    "repeat": (V, 2),
    "resize": (M, (2, 2)),
    "roll": (M, 1),
    "rot90": (M,),
    "tile": (M, 2),
    "unpackbits": (np.arange(3, dtype=np.uint8),),
    "where": (B, M, M),
    "select": ([V > 1, V <= 1], [V, V]),
    "tensordot": (M, M),
    "unravel_index": (N, (3, 3)),
    "vectorize": (lambda a: a,),
}
"""Arguments that no general choice finds."""

KEYWORDS: dict[str, dict[str, Any]] = {
    "bincount": {"length": 3},
    **{name: {"inplace": False} for name in ("fill_diagonal", "place", "put", "put_along_axis")},
}
"""Keywords of functions that need some."""

GENERAL: list[tuple[Any, ...]] = [
    *[(a,) for a in (M, V, W, N, B, [M, M], [V, V])],
    *itertools.product((M, V, W, N, B), (M, V, W, N, B)),
    *[(a, k) for a in (M, V, W, N) for k in (0, 1, 2, (3, 3), (9,), (0, 1), np.float32, "float32")],
    *[(a, *rest) for a in (M, V, W) for rest in ((0, 1), (1, 0), (1, V), (N, V), ([0], V), (M, M), (V, V), (W, M))],
    (M, W, 0),
    (M, W, 1),
    (B, M, M),
    (V, 3, 0.5),
    (np.float32(0), np.float32(2), 5),
    (3,),
    ((3, 3),),
    ((3, 3), np.float32(2)),
    (),
]
"""Arguments to try, the first that JAX takes with plain arrays is used."""

NO_COMPUTATION = {"Array", "bfloat16", "printoptions", "set_printoptions", "get_printoptions", "save", "savez", "load"}
NO_COMPUTATION |= {"fromfile", "asarray_chkfinite", "dtype", "iinfo", "finfo", "ufunc", "frompyfunc", "vectorize"}
"""Names of `jax.numpy` that take no arrays, or write files."""

WITHOUT_ARRAYS = {"fromfunction", "fromiter", "fromstring", "kaiser", "mask_indices"}
"""Functions for which no arguments are to be found: they take functions, texts or numbers alone."""

ON_SLICE, FETCHES, REFUSED, HERE, AS_JAX = "on the slice", "fetches", "refused", "here", "as JAX"


def numpy_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for module, prefix in ((jnp, ""), (jnp.linalg, "linalg."), (jnp.fft, "fft.")):
        for name in dir(module):
            found = getattr(module, name)
            if name.startswith("_") or name in NO_COMPUTATION or inspect.isclass(found) or not callable(found):
                continue
            yield prefix + name, found


def plain(value: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, value)


def on_slice(value: Any, where: Any) -> Any:
    return jax.tree.map(lambda leaf: pw.put(leaf, where) if isinstance(leaf, np.ndarray) else leaf, value)


def arguments_for(name: str, function: Callable[..., Any]) -> tuple[Any, ...] | None:
    """Arguments that plain JAX takes; None for those `WITHOUT_ARRAYS`.

    Raises:
        LookupError: none were found.
        Exception: JAX refuses those of `SPECIAL`.
    """

    def call(chosen: tuple[Any, ...]) -> tuple[Any, ...]:
        jax.block_until_ready(function(*plain(chosen), **KEYWORDS.get(name, {})))
        return chosen

    if name in SPECIAL:
        return call(SPECIAL[name])
    for chosen in GENERAL:
        with contextlib.suppress(Exception):
            return call(chosen)
    if name not in WITHOUT_ARRAYS:
        raise LookupError(f"jax.numpy.{name} takes none of the arguments that are tried: add some to SPECIAL")
    return None


@contextlib.contextmanager
def quick(session: LocalSession, where: Any) -> Iterator[None]:
    """What would be launched is computed at once; it took `evaluate`, so it would run on the slice."""

    def evaluate(arguments: Any, closed: Any, params: Any) -> list[Any]:
        def value(one: Any) -> Any:
            return one if not isinstance(one, pw.Array) else _value(session, one)

        consts = [value(one) for one in closed.consts]
        given = [value(one) for one in arguments]
        found = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(closed.jaxpr, consts))(*given)
        return [pw.put(one, where) for one in found]

    with mock.patch.object(eager._Rules, "evaluate", staticmethod(evaluate)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _value(session: LocalSession, array: pw.Array) -> Any:
    found = jnp.asarray(session.values[array._buffer.id])
    return jax.random.wrap_key_data(found) if array._type.extended is not None else found


def outcome(session: LocalSession, call: Callable[[], Any]) -> tuple[str, str]:
    """What becomes of a call, and the text of the error."""
    before = session.fetched
    try:
        found = call()
    except Exception as error:
        return REFUSED, re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")
    if session.fetched > before:
        return FETCHES, ""
    arrays = [leaf for leaf in jax.tree.leaves(found) if isinstance(leaf, jax.Array)]
    return (ON_SLICE if any(isinstance(leaf, pw.Array) for leaf in arrays) else HERE), ""


def functions_table() -> dict[str, tuple[str, str]]:
    """The outcome of each function of `jax.numpy`."""
    session = opened()
    where = session.virtual_slice((1,), ("x",))
    found = {}
    try:
        with quick(session, where):
            for name, function in numpy_functions():
                chosen = arguments_for(name, function)
                if chosen is None or not any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(chosen)):
                    found[name] = (AS_JAX, "")
                    continue
                given = on_slice(chosen, where)
                found[name] = outcome(session, partial(function, *given, **KEYWORDS.get(name, {})))
    finally:
        session.close()
    return found


METHODS: dict[str, tuple[Any, ...]] = {
    "addressable_data": (0,),
    "argpartition": (1,),
    "astype": (np.int32,),
    "choose": ([N, N, N], None, "clip"),
    "clip": (0, 1),
    "compress": (np.array([True, False, True]),),
    "dot": (M,),
    "item": (0,),
    "repeat": (2,),
    "reshape": ((9,),),
    "searchsorted": (1.0,),
    "swapaxes": (0, 1),
    "take": (N,),
    "to_device": (None,),
    "view": (np.int32,),
}
"""Arguments of methods that need some."""


def methods_table() -> dict[str, tuple[str, str]]:
    """The outcome of each public method and property of `jax.Array`."""
    session = opened()
    where = session.virtual_slice((1,), ("x",))
    found = {}
    try:
        with quick(session, where):
            for name in dir(jax.Array):
                if name.startswith("_"):
                    continue
                x = pw.put({"choose": N, "compress": V, "searchsorted": np.sort(V)}.get(name, M), where)

                def call(x: Any = x, name: str = name) -> Any:
                    attribute = getattr(x, name)
                    if name in ("at", "sharding"):
                        return attribute
                    return attribute(*METHODS.get(name, ())) if callable(attribute) else attribute

                found[name] = outcome(session, call)
    finally:
        session.close()
    return found


MEANINGS = (
    (ON_SLICE, "compute on the slice, and return arrays there"),
    (FETCHES, "fetch, as the result is a value or has a shape that depends on values"),
    (HERE, "need no value: the result is a fact, or a new array of this process"),
    (REFUSED, "are refused"),
    (AS_JAX, "take no array"),
)


def lists(table: dict[str, tuple[str, str]], prefix: str) -> list[str]:
    """The lines for one table."""
    lines: list[str] = []
    for kind, meaning in MEANINGS:
        names = sorted(name for name, (found, _) in table.items() if found == kind)
        if not names:
            continue
        lines += [f"**{len(names)}** {meaning}:", ""]
        if kind == REFUSED:
            lines += [f"- {prefix}{name}: {table[name][1]}" for name in names]
        else:
            lines += textwrap.wrap(", ".join(prefix + name for name in names) + ".", 150, break_on_hyphens=False)
        lines.append("")
    return lines


def text() -> str:
    """The lists of the page."""
    lines = ["## Functions of `jax.numpy`", "", *lists(functions_table(), "")]
    return "\n".join([*lines, "## Methods and properties of `jax.Array`", "", *lists(methods_table(), ".")])


def page(body: str) -> str:
    """The page with these lists."""
    head, _, _ = PAGE.read_text(encoding="utf-8").partition("## Functions of `jax.numpy`")
    return head + body


if __name__ == "__main__":
    PAGE.write_text(page(text()), encoding="utf-8")
