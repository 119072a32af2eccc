"""Changes that cannot be, on a runtime of one island: each is refused with a typed error that says why, and nothing of
the session is lost by it. Prints how many.

Arguments: a directory for suspensions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.errors import (
    BufferDeleted,
    PathwaysError,
    SessionSuspended,
    SuspensionDamaged,
    Unschedulable,
    UsageError,
)

folder = Path(sys.argv[1])
X = np.arange(8, dtype=np.float32)
refused = 0


def refuses(kind: type[PathwaysError], text: str, call: Callable[[], Any]) -> None:
    global refused
    try:
        found = call()
    except PathwaysError as error:
        assert type(error) is kind, f"{type(error).__name__}: {error}"
        assert text in str(error), str(error)
        refused += 1
    else:
        raise AssertionError(f"{found!r} instead of {kind.__name__}: {text}")


with pw.init(1, 1, 2) as session:
    where = session.virtual_slice((2,), ("x",), name="mine")
    double = pw.compiled(lambda v: v * 2.0, slice=where, in_specs=P("x"), out_specs=P("x"))
    kept = pw.put(X, where, P("x"))
    gone = pw.put(X, where, P("x"))
    gone.delete()

    def step(state: Any) -> Any:
        return double(state)

    # Islands.
    refuses(UsageError, "island 0 is the last one that takes slices", lambda: session.drain_island(0))
    refuses(UsageError, "island 0 is the last one that takes slices", lambda: session.remove_island(0))
    refuses(UsageError, "there is no island 3", lambda: session.remove_island(3))
    refuses(UsageError, "an island is named by its number", lambda: session.drain_island("0"))  # type: ignore[arg-type]
    refuses(UsageError, "an island is named by its number", lambda: session.remove_island(True))
    refuses(UsageError, "a number of seconds, not nan", lambda: session.drain_island(0, deadline_s=math.nan))
    refuses(UsageError, "not draining", lambda: session.undrain_island(0))
    refuses(UsageError, "platform must be one of", lambda: session.add_island(platform="abacus"))
    refuses(Unschedulable, "no Ray node has 1 devices of platform tpu", lambda: session.add_island(platform="tpu"))
    refuses(UsageError, "devices", lambda: session.add_island("cpu", devices=0))
    refuses(UsageError, "hosts", lambda: session.add_island("cpu", hosts=-1))
    # Moves.
    refuses(Unschedulable, "no island beside island 0, where it is, can hold", where.move)
    refuses(Unschedulable, "on island 7", lambda: where.move(island=7))
    refuses(UsageError, "island= takes the number of an island", lambda: where.move(island=1.5))  # type: ignore[arg-type]
    refuses(UsageError, "island= takes the number of an island", lambda: where.move(island=-2))
    # Snapshots and what is made of them.
    refuses(Unschedulable, "takes as many other islands that are up", lambda: pw.snapshot(kept))
    refuses(UsageError, "copies= is a number of islands", lambda: pw.snapshot(kept, copies=0))
    refuses(UsageError, "there is no pw.Array in the tree", lambda: pw.snapshot({"a": X}))
    refuses(BufferDeleted, "it was deleted", lambda: pw.snapshot([kept, gone]))
    refuses(Unschedulable, "takes as many other islands that are up", lambda: pw.elastic(step)(kept))
    refuses(UsageError, "takes a state with pw.Arrays", lambda: pw.elastic(step)(X))
    # Suspensions.
    refuses(UsageError, "the session is not suspended", session.resume)
    refuses(UsageError, "a directory, or None for memory, not 7", lambda: session.suspend(7))  # type: ignore[arg-type]
    (folder / "file").write_text("in the way")
    refuses(UsageError, "is no directory to suspend to", lambda: session.suspend(folder / "file"))
    refuses(UsageError, "is suspended to an empty directory", lambda: session.suspend(folder))
    session.suspend()
    refuses(SessionSuspended, "call its resume() before you use it", session.suspend)
    refuses(SessionSuspended, "call its resume() before you use it", where.move)
    refuses(SuspensionDamaged, "is not where the session was suspended to", lambda: session.resume(folder))
    session.resume()
    session.suspend(folder / "there")
    index = folder / "there" / "suspension.json"
    index.write_bytes(index.read_bytes()[:-1])
    refuses(SuspensionDamaged, "is damaged", session.resume)
    index.write_bytes(index.read_bytes() + b"}")
    session.resume()

    np.testing.assert_array_equal(np.asarray(kept), X)
    np.testing.assert_array_equal(np.asarray(double(kept)), X * 2.0)
    assert [one["state"] for one in session.status()["islands"]] == ["up"]
    assert [one["name"] for one in session.status()["slices"]] == ["mine"]
print(f"{refused} refused")
