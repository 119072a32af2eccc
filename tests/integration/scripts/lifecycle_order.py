"""Calls before `pw.init`, after `pw.shutdown`, and twice."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import pathways_ray as pw

V = np.arange(4, dtype=np.float32)


def refused(kind: type[Exception], message: str, call: Callable[..., Any], *args: Any) -> None:
    try:
        call(*args)
    except kind as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"{call} was not refused")


double = pw.compiled(lambda v: v * 2)  # may be made before there is a cluster
program = pw.program(lambda v: double(double(v)))
calls: list[tuple[Any, ...]] = [
    (double, V),
    (program, V),
    (program.lower, V),
    (pw.put, V),
    (pw.virtual_slice, (2,)),
    (pw.islands,),
    (pw.devices,),
]
for call in calls:
    refused(pw.errors.NotInitialized, "call pw.init() to start one here, or pw.connect(url, token=...)", *call)
pw.shutdown()  # nothing to stop

refused(pw.errors.UsageError, "devices_per_host must be a whole number of at least 1, not 0", pw.init, 1, 1, 0)
refused(pw.errors.UsageError, "dispatch must be 'parallel' or 'sequential'", lambda: pw.init(dispatch="other"))

session = pw.init(islands=1, devices_per_host=2)
refused(pw.errors.AlreadyInitialized, f"runs a cluster at {session.url} already; pw.shutdown() stops it", pw.init)
assert np.asarray(program(V)).tolist() == [0, 4, 8, 12]
held, s = program(V), pw.virtual_slice((2,))
bound = pw.compiled(lambda v: v + 1, slice=s)
np.asarray(bound(V))
pw.shutdown()
pw.shutdown()
for call in calls:
    refused(pw.errors.NotInitialized, "call pw.init()", *call)
for call in ((np.asarray, held), (held.block_until_ready,), (session.status,), (session.virtual_slice, (1,))):
    refused(pw.errors.SessionClosed, "it was shut down", *call)
refused(pw.errors.UsageError, "", bound, V)
held.delete()

with ThreadPoolExecutor() as pool:  # what is started in a thread outlives the thread
    again = pool.submit(pw.init, 2, 1, 1).result()
with again:
    assert again.url != session.url
    assert np.asarray(program(V)).tolist() == [0, 4, 8, 12]
    refused(pw.errors.UsageError, "another session", bound, V)
    del held
refused(pw.errors.NotInitialized, "call pw.init()", double, V)
print("in order")
