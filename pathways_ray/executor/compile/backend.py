"""The seam between the runtime and the platform of a host's devices: everything that differs from one to another.

Accelerators need next to nothing. XLA on CPU needs several settings and precautions; they are all in `cpu_backend`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pathways_ray.executor.run.parts import Keeps

Function = Callable[..., Sequence[Any]]
"""A function of arrays that JAX traces."""

Rebuild = Callable[[Callable[[Function], Function]], Any]
"""Compiles a computation again, its function changed, whose last output is a replicated scalar."""


class Backend(Protocol):
    """One platform. Made before JAX makes its devices; `adopt_environment` comes behind `configure`.

    `shares_memory` says whether the devices of a machine have one memory; `seals`, whether a seal keeps the bits of
    functions that are composed (`composition`); `elements_apart`, how many elements a device may make in a computation
    that is called on each device by itself (`by_device`): none where one call for all is as good; `moving`, how long a
    thread `within_calls` is kept by what moves data between devices.
    """

    shares_memory: bool
    seals: bool
    elements_apart: int
    moving: Keeps

    def configure(self, devices: int) -> None:
        """Sets the variables that XLA and JAX read at start, for a host with this number of devices."""

    def making_devices(self, host: int) -> contextlib.AbstractContextManager[None]:
        """Surrounds the first look at the devices, which makes their threads."""

    def before_group(self, address: str) -> None:
        """Called before the hosts of an island form a JAX group, which this host joins from an address."""

    def memory(self, device: Any) -> int:
        """Bytes that a device has for arrays; 0 where it does not say."""

    def options(self, fused: bool, loops: bool, elements: int) -> dict[str, str | bool] | None:
        """The compiler's options for a computation.

        Args:
            fused: several functions were composed into it.
            loops: some of them are repeated in a loop that the runtime made.
            elements: of what only runs lines, the elements that they make in all; 0 of anything else.
        """

    def rewritten(self, module: bytes, hosts: int) -> bytes:
        """A client's own module as it is to be compiled for a group of this number of hosts."""

    def check(self, compiled: Any, hosts: int) -> None:
        """Raises `CompileError` for a computation that would be wrong in a group of this number of hosts."""

    def prepare(self, compiled: Any, devices: int, rebuild: Rebuild, nbytes: int = 0) -> Any:
        """The computation as it is to be called, on `devices` devices of this host: as it is, or built again.

        Args:
            nbytes: what it reads and writes, where that is known.
        """

    def over_hosts(self, compiled: Function, devices: int) -> Function:
        """A computation of several hosts, `devices` of them here, as it is to be called: those of the same devices run
        in the order in which they are called. Its last output is its end."""

    def queues(self, compiled: Any, devices: int) -> bool:
        """Whether a computation that is `prepare`d may be in a device's queue when the call that enqueues it returns;
        else it is over by then."""

    def keeps(self, compiled: Any, devices: int) -> Keeps:
        """The time for which a call of a computation that is `prepare`d keeps a thread `within_calls`."""

    def within_calls(self, run: Callable[[], None]) -> None:
        """Runs a function, within which this thread computes what it calls, for one device, before the call returns, if
        the platform can do that. Where nobody else has something to do meanwhile, it is sooner over: there is no other
        thread to wake."""

    def beside(self, moves: Function, is_busy: Callable[[], bool]) -> Function:
        """A compiled computation of one device as it is to be called, which only moves what others have made: where its
        arguments are there it need not wait for computations that were enqueued before it.

        Args:
            is_busy: whether there may be some.
        """


# The first is for all transfers, and sets the others.
_GUARDS = (
    "jax_transfer_guard",
    "jax_transfer_guard_host_to_device",
    "jax_transfer_guard_device_to_device",
    "jax_transfer_guard_device_to_host",
)

_NOT_DEBUGGING: dict[str, bool | str] = {
    "jax_disable_jit": False,
    "jax_debug_nans": False,
    "jax_debug_infs": False,
    **dict.fromkeys(_GUARDS, "allow"),
}


def adopt_environment() -> None:
    """Has JAX go by the variables of this moment, but for those by which who started the runtime debugs programs: a
    host runs what clients have traced, with the checks that they asked for in it. JAX reads variables when it is
    imported, which the process that forked this one has done."""
    import jax

    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS"))
    jax.config.update("jax_num_cpu_devices", int(os.environ.get("JAX_NUM_CPU_DEVICES", -1)))
    jax.config.update("jax_enable_x64", os.environ.get("JAX_ENABLE_X64") == "1")
    for name, value in _NOT_DEBUGGING.items():
        jax.config.update(name, value)


class AcceleratorBackend:
    """GPUs and TPUs."""

    shares_memory = False
    seals = False
    elements_apart = 0
    moving = Keeps.BRIEFLY

    def configure(self, devices: int) -> None:
        if os.environ.get("JAX_PLATFORMS") == "cpu":
            del os.environ["JAX_PLATFORMS"]  # it was meant for the client that started the runtime
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    def making_devices(self, host: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def before_group(self, address: str) -> None:
        """JAX's own collectives need nothing."""

    def memory(self, device: Any) -> int:
        return int((device.memory_stats() or {}).get("bytes_limit", 0))

    def options(self, fused: bool, loops: bool, elements: int) -> dict[str, str | bool] | None:
        return None

    def rewritten(self, module: bytes, hosts: int) -> bytes:
        return module

    def check(self, compiled: Any, hosts: int) -> None:
        """Every computation is as good in a group as on one host."""

    def prepare(self, compiled: Any, devices: int, rebuild: Rebuild, nbytes: int = 0) -> Any:
        return compiled

    def over_hosts(self, compiled: Function, devices: int) -> Function:
        """Each device has one queue for the computations of all threads."""
        return compiled

    def queues(self, compiled: Any, devices: int) -> bool:
        return True

    def keeps(self, compiled: Any, devices: int) -> Keeps:
        return Keeps.BRIEFLY

    def within_calls(self, run: Callable[[], None]) -> None:
        """It is devices that compute."""
        run()

    def beside(self, moves: Function, is_busy: Callable[[], bool]) -> Function:
        """Their devices have one queue for computations."""
        return moves
