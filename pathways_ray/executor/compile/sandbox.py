"""The checker of a host: processes that read functions from clients, and may crash.

MLIR's reader trusts its input: of functions with a few bits turned, about one in a hundred ends the process that reads
it, or keeps it busy without end. So a host has a *checker*, a process that has loaded the readers and forks once for
each program. The fork reads (`allowlist`), sends its verdicts, and ends; it has limits on time and memory, no open
files but its pipe and no way to open others (`confinement`), and nothing of one client is left when the next one's
program is read.

Frames on the pipes: 8 bytes of length, then MessagePack: in, whether the client is trusted and a list of functions;
out, a list of verdicts, each with the number of devices that the function was made for.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, TypeAlias

import msgspec

from pathways_ray.errors import CompileError, ProgramRefused
from pathways_ray.executor.compile import confinement
from pathways_ray.transport.messages import encode

CPU_LIMIT_S = 4
BYTES_PER_SECOND = 4 << 20
"""A program whose functions take more of a core to read is refused. A usual one takes 20 ms, 15 MiB take 0.1 s."""

READ_LIMIT_S = 30.0
"""The same limit in time that passes, for a process that does nothing."""

MEMORY_BYTES = 4 << 30
"""Memory that reading may take beyond what the process has; the largest allowed functions take a quarter of it."""

REPLY_LIMIT_S = 120.0
"""The same for the checker itself, with the time in which it loads JAX on a busy machine."""

MAX_VERDICTS = 8192
"""Verdicts that are remembered, by digest."""

MAX_REPLY_BYTES = 64 << 20
"""Verdicts of one program: 2,000 characters for each of its functions, and no more than this."""

Verdict: TypeAlias = tuple[str, int]
"""What is wrong with a function, if anything; and the number of devices that it was made for, 0 for any."""

_VERDICTS = msgspec.msgpack.Decoder(list[Verdict])
_QUESTION = msgspec.msgpack.Decoder(tuple[bool, list[bytes]])
_SECRETS = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIAL")

CRASHED = "the process that read the program's functions crashed, or did not come to an end"


class Sandbox:
    """A host's checker. Safe to call from several threads; one program is read at a time.

    Args:
        host: for messages.
        command: what Python runs as the checker.
    """

    def __init__(self, host: int, command: Sequence[str] = ("-m", "pathways_ray.executor.compile.sandbox")) -> None:
        self.host = host
        self.command = command
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._known: OrderedDict[tuple[bool, str], Verdict] = OrderedDict()

    def start(self) -> None:
        """Starts the process ahead of the first program, without waiting for it."""
        with self._lock:
            self._running()

    def check(
        self, name: str, digests: Sequence[str], functions: Mapping[str, bytes], trusted: bool = False, devices: int = 0
    ) -> None:
        """Has functions read, with those that came with them, unless they were read before.

        Args:
            name: the user's name of the program.
            digests: the functions that have to be right.
            functions: all functions of the program, by digest.
            trusted: whether the operator trusts the client.
            devices: how many devices it will run on; 0 if that does not matter.

        Raises:
            ProgramRefused: one does what is not allowed, or cannot be read.
            CompileError: the checker does not run.
        """
        with self._lock:
            if any((trusted, digest) not in self._known for digest in digests):
                unknown = [digest for digest in functions if (trusted, digest) not in self._known]
                verdicts = self._ask(trusted, [functions[digest] for digest in unknown])
                if len(verdicts) != len(unknown):
                    # Not remembered: one of them is the cause, and the others may be in programs of other clients.
                    raise ProgramRefused(f"{name} is refused on host {self.host}: {CRASHED}")
                self._known.update(zip([(trusted, digest) for digest in unknown], verdicts, strict=True))
            for digest in digests:
                self._known.move_to_end((trusted, digest))
                refused, made_for = self._known[trusted, digest]
                if not refused and devices and made_for not in (0, devices):
                    refused = f"it was exported for {made_for} devices; its slice has {devices}"
                if refused:
                    raise ProgramRefused(f"{name} is refused on host {self.host}: {refused}")
            while len(self._known) > max(MAX_VERDICTS, len(functions)):
                self._known.popitem(last=False)

    def _ask(self, trusted: bool, blobs: list[bytes]) -> list[Verdict]:
        """The verdicts; an empty list when the process that read crashed."""
        for attempt in range(2):
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            too_late = threading.Timer(REPLY_LIMIT_S, process.kill)
            too_late.start()
            try:
                _write(process.stdin, encode((trusted, blobs)))
                reply = _read_frame(process.stdout, MAX_REPLY_BYTES)
                if reply is None:
                    raise BrokenPipeError
                return _VERDICTS.decode(reply)
            except (OSError, msgspec.MsgspecError) as error:
                self._stop()
                if attempt:
                    raise CompileError(f"host {self.host} cannot check functions: its checker does not run") from error
            finally:
                too_late.cancel()
        raise AssertionError

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._stop()
            environment = {k: v for k, v in os.environ.items() if not any(word in k.upper() for word in _SECRETS)}
            environment |= {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
            self._process = subprocess.Popen(
                [sys.executable, *self.command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def close(self) -> None:
        with self._lock:
            self._stop()


def _write(file: IO[bytes], data: bytes) -> None:
    file.write(len(data).to_bytes(8, "big"))
    file.write(data)
    file.flush()


def _read_frame(file: IO[bytes], limit: int | None = None) -> bytes | None:
    """The next frame, or None at the end, or for one of more bytes than the limit."""
    header = file.read(8)
    size = int.from_bytes(header, "big")
    if len(header) < 8 or (limit is not None and size > limit):
        return None
    data = file.read(size)
    return data if len(data) == size else None


# --- the checker's process --------------------------------------------------------------------------------------------


def main() -> None:
    """Reads frames from standard input until its end."""
    allowlist = load()
    # jax warns of forks by threaded processes. None of the threads here has work, or holds a lock.
    warnings.simplefilter("ignore", RuntimeWarning)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = sys.stdout.buffer
    while (frame := _read_frame(sys.stdin.buffer)) is not None:
        inside, outside = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(inside)
            _read_functions(outside, frame, allowlist.verdicts)
            os._exit(0)
        os.close(outside)
        del frame
        _write(replies, _verdict_of(child, inside))


def load() -> Any:
    """The module `allowlist`, with everything that reading loads: forks can open no file. MLIR's bindings look for the
    module of a dialect at each of its operations, until they find it."""
    from jaxlib.mlir.dialects import builtin, func  # noqa: F401

    from pathways_ray.executor.compile import allowlist

    allowlist.verdicts([b""])
    confinement.prepare()
    return allowlist


def _read_functions(pipe: int, frame: bytes, verdicts: Callable[[list[bytes], bool], list[Verdict]]) -> None:
    """The work of a fork: reads functions, and writes what it finds to the pipe."""
    trusted, blobs = _QUESTION.decode(frame)
    try:
        confinement.confine(pipe, MEMORY_BYTES + 8 * len(frame), CPU_LIMIT_S + len(frame) // BYTES_PER_SECOND)
        found = verdicts(blobs, trusted)
    except confinement.NotConfined as error:
        found = [(str(error), 0)] * len(blobs)
    data = encode(found)
    rest = memoryview(len(data).to_bytes(8, "big") + data)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def _verdict_of(child: int, pipe: int) -> bytes:
    """The verdicts of a fork, as a frame's content; an empty list when it crashed or took too long. Ends the fork."""
    deadline = time.monotonic() + READ_LIMIT_S
    said = bytearray()
    while len(said) <= MAX_REPLY_BYTES:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        part = os.read(pipe, 1 << 16) if ready else b""
        if not part:
            break
        said += part
    os.close(pipe)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    whole = len(said) >= 8 and len(said) - 8 == int.from_bytes(said[:8], "big")
    return bytes(said[8:]) if whole else encode([])


if __name__ == "__main__":
    main()
