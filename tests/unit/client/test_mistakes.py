"""What people type wrong: each line of mistakes.txt, and the text that they read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from tests.unit.client.local import LocalSession, opened

LINES = (Path(__file__).parent / "mistakes.txt").read_text(encoding="utf-8").splitlines()[1:]
MISTAKES = list(zip(LINES[::2], LINES[1::2], strict=True))

V = np.arange(8, dtype=np.float32)


def inc(v: Any) -> Any:
    return v + 1


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, Any]]:
    """The names that the lines use, in a session with two slices."""
    session: LocalSession = opened()
    a = session.virtual_slice((4,), ("x",), name="a")
    gone = pw.put(V, a)
    gone.delete()
    yield {
        "np": np, "jax": jax, "jnp": jnp, "pw": pw, "P": P, "NamedSharding": NamedSharding, "V": V, "a": a,
        "b": session.virtual_slice((2, 2), ("x", "y"), name="b"),
        "x": pw.put(V, a, P("x")),
        "m": pw.put(np.ones((8, 4), np.float32), a, P("x")),
        "k": pw.put(jax.random.key(0), a),
        "inc": pw.compiled(inc, slice=a, in_specs=P("x"), out_specs=P("x")),
        "gone": gone,
    }  # fmt: skip
    session.close()


def test_there_are_many() -> None:
    assert len(MISTAKES) >= 300
    assert len(dict(MISTAKES)) == len(MISTAKES)


@pytest.mark.parametrize(("line", "expected"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_refused_with_its_text(names, line: str, expected: str) -> None:
    kind, _, text = expected.strip().partition(": ")
    with pytest.raises(Exception, match="^" + re.escape(text)) as caught:
        eval(line, dict(names))
    assert type(caught.value).__name__ == kind
