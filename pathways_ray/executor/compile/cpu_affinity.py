"""Which cores the devices of a CPU host run on, for measurements on a small machine.

PATHWAYS_CPU_CORES lists cores, say `0` or `0,1`: the threads of host k's devices all run on the k-th of them, round
robin. The host's other threads run wherever the process may. Without it the kernel moves the threads as it likes, and
two that wait for each other in a collective take twice as long on two virtual cores as on one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

VARIABLE = "PATHWAYS_CPU_CORES"


def core_of(host: int, listed: str) -> int | None:
    """The core of a host's devices; None when no cores are listed.

    Raises:
        ValueError: what is listed are no numbers.
    """
    try:
        cores = [int(core) for core in listed.split(",") if core.strip()]
    except ValueError:
        raise ValueError(f"{VARIABLE} lists cores, such as 0,1, and is {listed!r}") from None
    return cores[host % len(cores)] if cores else None


@contextlib.contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Threads that are made inside, and those that they make, stay on a core; None leaves everything as it is.

    Raises:
        OSError: this machine has no such core for this process.
    """
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
