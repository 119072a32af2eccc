"""Failures of the runtime as the protocol says them. Pure."""

from __future__ import annotations

import re

from pathways_ray.errors import Failure
from pathways_ray.proxy.arrays import Code, Status

_CODES = {
    "AuthenticationError": Code.UNAUTHENTICATED,
    "BufferDeleted": Code.INVALID_ARGUMENT,
    "BufferLost": Code.UNAVAILABLE,
    "Cancelled": Code.CANCELLED,
    "ControllerLost": Code.UNAVAILABLE,
    "GraphError": Code.INVALID_ARGUMENT,
    "HostLost": Code.UNAVAILABLE,
    "InvalidArray": Code.INVALID_ARGUMENT,
    "LaunchTimeout": Code.DEADLINE_EXCEEDED,
    "OutOfMemory": Code.RESOURCE_EXHAUSTED,
    "ProgramRefused": Code.INVALID_ARGUMENT,
    "QuotaExceeded": Code.RESOURCE_EXHAUSTED,
    "SessionClosed": Code.UNAVAILABLE,
    "SessionSuspended": Code.UNAVAILABLE,
    "SpecError": Code.INVALID_ARGUMENT,
    "TooLarge": Code.RESOURCE_EXHAUSTED,
    "Unschedulable": Code.RESOURCE_EXHAUSTED,
    "UsageError": Code.INVALID_ARGUMENT,
    "WaitTimeout": Code.DEADLINE_EXCEEDED,
}


_OF_XLA = re.compile(r"(?:^|: )([A-Z]+(?:_[A-Z]+)*): ")


def status_of(failure: Failure) -> Status:
    """A failure of the runtime as the protocol says it."""
    code = _CODES.get(failure.kind, Code.INTERNAL)
    if failure.kind == "CompileError":
        code = code_of_xla(failure.message, code)
    return Status(code, f"{failure.kind}: {failure.message}")


def code_of_xla(text: str, otherwise: int) -> int:
    """The code that XLA begins its errors with, as in `NOT_FOUND: No FFI handler`, in a text that quotes one."""
    codes = (getattr(Code, name, None) for name in _OF_XLA.findall(text))
    return next((code for code in codes if code is not None), otherwise)
