"""Cores and thread counts of the devices of CPU hosts, by the rules of the runtime; only this file imports those."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

from pathways_ray.executor.compile.cpu_backend import CORES_VARIABLE, core_of, pinned, pool_threads


def threads(devices: int) -> str | None:
    """NPROC for a process with these devices, by the rule of the runtime's hosts; None leaves it to XLA."""
    found = pool_threads(devices)
    return str(found) if found else None


def on_listed_core(host: int) -> contextlib.AbstractContextManager[None]:
    """Device threads made inside run where those of a host of the runtime would."""
    return pinned(core_of(host, os.environ.get(CORES_VARIABLE, "")))


@contextlib.contextmanager
def devices_apart(hosts: int = 1) -> Iterator[bool]:
    """CPU devices of hosts that are started inside have a core that does not change.

    The devices of one host have the first core for themselves, and all else has the others: so device time is the
    devices' own, as on an accelerator. Of several hosts, each has a core for its devices, as hosts are machines of
    their own; everything else runs wherever it may. Either way collectives do not depend on which core the kernel puts
    a device on. Yields whether there are enough cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        yield False
        return
    os.sched_setaffinity(0, cores[1:] if hosts == 1 else cores)
    try:
        with patch.dict(os.environ, listed(cores[:hosts])):
            yield True
    finally:
        os.sched_setaffinity(0, cores)


def listed(cores: Sequence[int]) -> dict[str, str]:
    """The variable that gives these cores to the devices of hosts, in turn."""
    return {CORES_VARIABLE: ",".join(map(str, cores))} if cores else {}


def of_this_process(devices: int) -> Any:
    """The sharding over so many CPU devices, which JAX makes in this process with as many threads as a host has."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    if (found := threads(devices)) is not None:
        os.environ["NPROC"] = found
    import jax

    return jax.NamedSharding(jax.make_mesh((devices,), ("x",)), jax.sharding.PartitionSpec("x"))
