"""The checker of a host: processes that read functions from clients, and may crash.

MLIR's reader trusts its input: of functions with a few bits turned, about one in a hundred ends the process that reads
it, or keeps it busy without end. So a host has a *checker*, a process that has loaded the readers and forks once for
each program. The fork reads (`allowlist`), sends its verdicts, and ends; it has limits on time and memory, no open
files but its pipe, and nothing of one client is left when the next one's program is read.

MessagePack: a list of functions in, a list of verdicts out.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

from pathways_ray.errors import CompileError, ProgramRefused
from pathways_ray.transport.messages import encode
from pathways_ray.worker import Limits, Worker, WorkerEnded, serve

CPU_LIMIT_S = 4
BYTES_PER_SECOND = 4 << 20
"""A program whose functions take more of a core to read is refused. A usual one takes 20 ms, 15 MiB take 0.1 s."""

READ_LIMIT_S = 30.0
"""The same limit in time that passes, for a process that does nothing."""

MEMORY_BYTES = 4 << 30
"""Memory that reading may take beyond what the process has; the largest allowed functions take a quarter of it."""

MAX_VERDICTS = 8192
"""Verdicts that are remembered, by digest."""

_VERDICTS = msgspec.msgpack.Decoder(list[str])
_FUNCTIONS = msgspec.msgpack.Decoder(list[bytes])
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

CRASHED = "the process that read the program's functions crashed, or did not come to an end"


class Sandbox:
    """A host's checker. Safe to call from several threads; one program is read at a time.

    Args:
        host: for messages.
        command: what Python runs as the checker.
    """

    def __init__(self, host: int, command: Sequence[str] = ("-m", "pathways_ray.executor.compile.sandbox")) -> None:
        self.host = host
        self._lock = threading.Lock()
        self._worker = Worker(command, _ENVIRONMENT)
        self._known: OrderedDict[str, str] = OrderedDict()

    def start(self) -> None:
        """Starts the process ahead of the first program, without waiting for it."""
        self._worker.start()

    def check(self, name: str, digests: Sequence[str], functions: Mapping[str, bytes]) -> None:
        """Has functions read, with those that came with them, unless they were read before.

        Args:
            name: the user's name of the program.
            digests: the functions that have to be right.
            functions: all functions of the program, by digest.

        Raises:
            ProgramRefused: one does what is not allowed, or cannot be read.
            CompileError: the checker does not run.
        """
        with self._lock:
            if any(digest not in self._known for digest in digests):
                unknown = [digest for digest in functions if digest not in self._known]
                verdicts = self._ask([functions[digest] for digest in unknown])
                if len(verdicts) != len(unknown):
                    # Not remembered: one of them is the cause, and the others may be in programs of other clients.
                    raise ProgramRefused(f"{name} is refused on host {self.host}: {CRASHED}")
                self._known.update(zip(unknown, verdicts, strict=True))
            for digest in digests:
                self._known.move_to_end(digest)
                if verdict := self._known[digest]:
                    raise ProgramRefused(f"{name} is refused on host {self.host}: {verdict}")
            while len(self._known) > max(MAX_VERDICTS, len(functions)):
                self._known.popitem(last=False)

    def _ask(self, blobs: list[bytes]) -> list[str]:
        """The verdicts; an empty list when the process that read crashed."""
        try:
            return _VERDICTS.decode(self._worker.ask(encode(blobs)))
        except WorkerEnded:
            return []
        except (OSError, msgspec.MsgspecError) as error:
            raise CompileError(f"host {self.host} cannot check functions: its checker does not run") from error

    def close(self) -> None:
        self._worker.close()


def main() -> None:
    """Reads frames from standard input until its end."""
    from pathways_ray.executor.compile import allowlist

    limits = Limits(CPU_LIMIT_S, READ_LIMIT_S, MEMORY_BYTES, BYTES_PER_SECOND)
    serve(lambda frame: encode(allowlist.verdicts(_FUNCTIONS.decode(frame))), limits)


if __name__ == "__main__":
    main()
