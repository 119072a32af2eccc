"""Failures of the runtime as the protocol says them. Pure."""

from __future__ import annotations

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


def status_of(failure: Failure) -> Status:
    """A failure of the runtime as the protocol says it."""
    return Status(_CODES.get(failure.kind, Code.INTERNAL), f"{failure.kind}: {failure.message}")
