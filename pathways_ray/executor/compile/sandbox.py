"""The checker of a host: a worker that reads functions from clients, in forks that may crash.

MLIR's reader trusts its input: of functions with a few bits turned, about one in a hundred ends the process that reads
it, or keeps it busy without end. So a host has a *checker*, a `Worker` that has loaded the readers and forks once for
each program. The fork reads (`allowlist`), sends its verdicts, and ends; beside the limits of every worker it has no
way to open files, connections or processes (`confinement`), and nothing of one client is left when the next one's
program is read.

A question is whether the client is trusted, and a list of functions, in MessagePack; the answer is a list of verdicts.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from pathways_ray.errors import CompileError, PathwaysError, ProgramRefused
from pathways_ray.executor.compile import confinement
from pathways_ray.formulas.formula import is_formulas
from pathways_ray.transport.messages import encode
from pathways_ray.worker import Limits, Worker, WorkerEnded, WorkerLate, serve

CPU_LIMIT_S = 4
BYTES_PER_SECOND = 4 << 20
"""A program whose functions take more of a core to read is refused. A usual one takes 20 ms, 15 MiB take 0.1 s."""

READ_LIMIT_S = 30.0
"""The same in time that passes, for a process that does nothing. On a busy machine others reach it: it refuses none."""

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

UNREAD = "its functions could not be read"
COMMAND = ("-m", "pathways_ray.executor.compile.sandbox")
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class Sandbox:
    """A host's checker. Safe to call from several threads; one program is read at a time.

    Args:
        host: for messages.
        command: what Python runs as the checker.
    """

    def __init__(self, host: int, command: Sequence[str] = COMMAND) -> None:
        self.host = host
        self.worker = Worker(command, ENVIRONMENT, REPLY_LIMIT_S, MAX_REPLY_BYTES)
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[bool, str], Verdict] = OrderedDict()

    def start(self) -> None:
        """Starts the process ahead of the first program, without waiting for it."""
        self.worker.start()

    def check(
        self, name: str, digests: Sequence[str], functions: Mapping[str, bytes], trusted: bool = False, devices: int = 0
    ) -> None:
        """Has functions read, with those that came with them, unless they were read before. Formulas are no code, and
        left to who takes them in.

        Args:
            name: the user's name of the program.
            digests: the functions that have to be right.
            functions: all functions of the program, by digest.
            trusted: whether the operator trusts the client.
            devices: how many devices it will run on; 0 if that does not matter.

        Raises:
            ProgramRefused: one does what is not allowed, or cannot be read.
            CompileError: the checker does not run, or has taken too long by the clock.
        """
        code = {digest: blob for digest, blob in functions.items() if not is_formulas(blob)}
        digests = [digest for digest in digests if digest in code]
        with self._lock:
            if any((trusted, digest) not in self._known for digest in digests):
                unknown = [digest for digest in code if (trusted, digest) not in self._known]
                verdicts = self._ask(name, trusted, [functions[digest] for digest in unknown])
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

    def check_ahead(self, functions: Mapping[str, bytes], trusted: bool) -> None:
        """Has functions read whose program is to come; it is refused as it comes if one of them is not allowed."""
        with contextlib.suppress(PathwaysError):
            self.check("functions ahead of their program", list(functions), functions, trusted)

    def _ask(self, name: str, trusted: bool, blobs: list[bytes]) -> list[Verdict]:
        """A verdict for each function. Of a program that cannot be read none is remembered: one of its functions is the
        cause, and the others may be in programs of other clients."""
        try:
            verdicts = _VERDICTS.decode(self.worker.ask(encode((trusted, blobs))))
            if len(verdicts) != len(blobs):
                raise WorkerEnded(f"{len(verdicts)} verdicts came for {len(blobs)} functions")
            return verdicts
        except WorkerLate as error:
            text = f"{name} could not be checked on host {self.host}: {error}, perhaps since its machine is busy"
            raise CompileError(f"{text}. The next call has it tried again") from None
        except (WorkerEnded, msgspec.MsgspecError) as error:
            raise ProgramRefused(f"{name} is refused on host {self.host}: {UNREAD}: {error}") from None
        except OSError as error:
            raise CompileError(f"host {self.host} cannot check functions: its checker does not run") from error

    def close(self) -> None:
        self.worker.close()


# --- the checker's process --------------------------------------------------------------------------------------------


def main() -> None:
    """Reads functions from standard input until its end."""
    allowlist = load()

    def answer(question: bytes) -> bytes:
        trusted, blobs = _QUESTION.decode(question)
        return encode(allowlist.verdicts(blobs, trusted))

    limits = Limits(CPU_LIMIT_S, READ_LIMIT_S, MEMORY_BYTES, BYTES_PER_SECOND, MAX_REPLY_BYTES)
    serve(answer, limits, confine=confinement.confine)


def load() -> Any:
    """The module `allowlist`, with everything that reading loads: forks can open no file. MLIR's bindings look for the
    module of a dialect at each of its operations, until they find it."""
    from jaxlib.mlir.dialects import builtin, func  # noqa: F401

    from pathways_ray.executor.compile import allowlist

    allowlist.verdicts([b""])
    confinement.prepare()
    return allowlist


if __name__ == "__main__":
    main()
