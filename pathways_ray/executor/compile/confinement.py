"""The confinement of a process that reads what a client sent: no files, no network, no other processes, few resources.

A filter of system calls (seccomp) stays until the process ends. What a reader needs is allowed; what libraries try by
habit, such as looking for a file, fails with EPERM; anything else ends the process. Numbers are those of Linux on the
two architectures below; elsewhere there are limits of resources only, and hosts are not meant to be shared.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

from pathways_ray import worker

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_KILL_PROCESS, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in what the kernel gives the filter
_X32 = 0x40000000
"""System calls from here on are those of another calling convention, under other numbers."""

_SYSTEM_CALLS: dict[str, tuple[int | None, int | None]] = {
    # name: number on x86_64, on aarch64
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "nanosleep": (35, 101),
    "getpid": (39, 172),
    "exit": (60, 93),
    "gettimeofday": (96, 169),
    "getrusage": (98, 165),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "set_robust_list": (273, 99),
    "getrandom": (318, 278),
    "membarrier": (324, 283),
    "rseq": (334, 293),
}

_FAIL: dict[str, tuple[int | None, int | None]] = {
    "open": (2, None),
    "stat": (4, None),
    "lstat": (6, None),
    "ioctl": (16, 29),
    "access": (21, None),
    "uname": (63, 160),
    "fcntl": (72, 25),
    "getcwd": (79, 17),
    "readlink": (89, None),
    "sysinfo": (99, 179),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "prctl": (157, 167),
    "getdents64": (217, 61),
    "openat": (257, 56),
    "newfstatat": (262, 79),
    "readlinkat": (267, 78),
    "faccessat": (269, 48),
    "prlimit64": (302, 261),
    "statx": (332, 291),
    "openat2": (437, 437),
    "faccessat2": (439, 439),
}

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column of the tables, and the kernel's name for the architecture."""


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def filter_of(machine: str) -> bytes:
    """The filter for an architecture, as instructions of the kernel's packet filter."""
    column, architecture = _MACHINES[machine]
    allowed, failing = (
        [number for numbers in table.values() if (number := numbers[column]) is not None]
        for table in (_SYSTEM_CALLS, _FAIL)
    )
    checks = [(number, 2) for number in allowed] + [(number, 1) for number in failing]
    lines = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_JUMP_IF_EQUAL, architecture, 1, 0),
        _instruction(_RETURN, _KILL_PROCESS),
        _instruction(_LOAD, _NUMBER),
        _instruction(_JUMP_IF_AT_LEAST, _X32, len(checks), 0),
    ]
    for place, (number, beyond) in enumerate(checks):
        # Behind the checks stand three ends: kill, fail, allow.
        lines.append(_instruction(_JUMP_IF_EQUAL, number, len(checks) - place - 1 + beyond, 0))
    ends = (_KILL_PROCESS, _ERRNO | errno.EPERM, _ALLOW)
    return b"".join([*lines, *(_instruction(_RETURN, end) for end in ends)])


def prepare() -> None:
    """Loads what `confine` needs, while files can still be opened."""
    ctypes.CDLL(None, use_errno=True)


def confine(pipe: int, memory_bytes: int, cpu_s: int) -> None:
    """Leaves this process one pipe, and little memory and time. There is no way back.

    Args:
        memory_bytes: memory that it may take beyond what it has.
        cpu_s: seconds of a core.

    Raises:
        worker.NotConfined: the kernel knows no such filters.
    """
    worker.confine(pipe, memory_bytes, cpu_s)
    if sys.platform == "linux" and platform.machine() in _MACHINES:
        _set_filter(filter_of(platform.machine()))


def _set_filter(instructions: bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    found = _Filter(len(instructions) // 8, instructions)
    unused = ctypes.c_ulong(0)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), unused, unused, unused) or libc.prctl(
        _PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(found), unused, unused
    ):
        number = ctypes.get_errno()
        raise worker.NotConfined(
            f"the host cannot confine their reader: its kernel takes no filter of system calls ({os.strerror(number)})"
        )
