"""Compilers that end their process, or never end: no function that does this to XLA does it in every version."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping

from pathways_ray.executor.run import instructions as do
from pathways_ray.executor.run.driver import HostDriver
from pathways_ray.ir.plan import IslandPlan
from pathways_ray.transport.messages import Program


def break_compilers() -> None:
    """Has hosts of this process die of a program named "deadly", in the thread that compiles it; "slow" takes an
    hour."""
    prepared = HostDriver._prepared

    def broken(self: HostDriver, message: Program, plan: IslandPlan, functions: Mapping[str, bytes]) -> do.Event:
        if message.name == "deadly":
            os.kill(os.getpid(), signal.SIGSEGV)
        if message.name in ("deadly", "slow"):
            time.sleep(3600.0)
        return prepared(self, message, plan, functions)

    HostDriver._prepared = broken  # type: ignore[method-assign]
