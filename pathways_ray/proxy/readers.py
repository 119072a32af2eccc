"""The processes that read the programs of a proxy's clients (`program_reader`).

One that crashes over a program, or takes too long, ends alone: its client gets an error, and the next program is read
by a new one. They are the proxy's, and so all of one tenant.
"""

from __future__ import annotations

import queue
import threading
from typing import TypeAlias

import msgspec

from pathways_ray import limits
from pathways_ray.proxy.arrays import Code, Refused
from pathways_ray.proxy.programs import Overrides, Program
from pathways_ray.worker import Worker, WorkerEnded

COMMAND = ("-m", "pathways_ray.proxy.program_reader")

MAX_READERS = 4
"""Processes at a time; each has loaded JAX."""

PATIENCE_S = 1.0
"""A program waits for one of those that are busy, before a further one is started, which takes longer than that."""

START_S = 60.0
"""Time to load JAX on a busy machine, beside that of the compiler."""

MEMORY_BYTES = 32 << 30
"""Address space that one may take for programs; a compiler takes some gigabytes of it for its threads alone."""

CPU_S = 4 * int(limits.COMPILE_LIMIT_S)
"""Seconds of a core for a program: those of four cores in the time that hosts have for it."""

MIN_DEVICES = 16


class Read(msgspec.Struct, frozen=True, tag=True):
    """A question: what is this module, for these devices?"""

    module: bytes
    devices: tuple[int, ...]
    platforms: tuple[str, ...]
    overrides: Overrides = ()


class LookAt(msgspec.Struct, frozen=True, tag=True):
    """A question: what does XLA make of this module for as many devices? "cost", or else its text."""

    module: bytes
    devices: int
    what: str


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """An answer: a code of gRPC's, and a text."""

    code: int
    message: str


Question: TypeAlias = Read | LookAt
Answer: TypeAlias = Program | dict[str, float] | str | Refusal

_PROGRAM = msgspec.msgpack.Decoder(Program | Refusal)
_COST = msgspec.msgpack.Decoder(dict[str, float] | Refusal)
_TEXT = msgspec.msgpack.Decoder(str | Refusal)


class Readers:
    """Asks processes, which are started when they are needed. Any thread may ask.

    Args:
        devices: as many as programs may be for.
    """

    def __init__(self, devices: int) -> None:
        count = str(max(devices, MIN_DEVICES))
        self._environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": count, "JAX_ENABLE_X64": "1"}
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        self._all: list[Worker] = []
        self._lock = threading.Lock()
        self._closed = False
        self._idle.put(self._further())

    def start(self) -> None:
        """Starts the first process ahead of the first program, without waiting for it."""
        self._all[0].start()

    def read(self, asked: Read) -> Program:
        """A program of a client.

        Raises:
            Refused: it cannot be read.
        """
        found = self._ask(asked, _PROGRAM)
        assert isinstance(found, Program)
        return found

    def cost(self, module: bytes, devices: int) -> dict[str, float]:
        """XLA's cost analysis of a module. Raises `Refused`."""
        found = self._ask(LookAt(module, devices, "cost"), _COST)
        assert isinstance(found, dict)
        return found

    def text(self, module: bytes, devices: int) -> str:
        """The text of a module as XLA compiles it. Raises `Refused`."""
        found = self._ask(LookAt(module, devices, "text"), _TEXT)
        assert isinstance(found, str)
        return found

    def _ask(self, asked: Question, decoder: msgspec.msgpack.Decoder[Answer]) -> Answer:
        size, most = len(asked.module), limits.MAX_PROGRAM_BYTES
        if size > most:
            text = f"a program of {size} bytes; {most} are the limit. Pass big constants as arguments"
            raise Refused(Code.RESOURCE_EXHAUSTED, text)
        worker = self._taken()
        try:
            found = decoder.decode(worker.ask(msgspec.msgpack.encode(asked)))
        except (WorkerEnded, OSError) as error:
            raise Refused(Code.INVALID_ARGUMENT, f"the program could not be read: {error}") from None
        except msgspec.MsgspecError as error:
            raise Refused(Code.INTERNAL, f"the program's reader answered something else: {error}") from None
        finally:
            self._idle.put(worker)
            if self._closed:  # who asked then has started it again
                worker.close()
        if isinstance(found, Refusal):
            raise Refused(found.code, found.message)
        return found

    def _taken(self) -> Worker:
        try:
            return self._idle.get(timeout=PATIENCE_S)
        except queue.Empty:
            with self._lock:
                further = self._further() if len(self._all) < MAX_READERS else None
            return further or self._idle.get()

    def _further(self) -> Worker:
        made = Worker(COMMAND, self._environment, START_S + limits.COMPILE_LIMIT_S, forks=False)
        self._all.append(made)
        return made

    def close(self) -> None:
        """Ends the processes, also over a program."""
        self._closed = True
        for worker in self._all:
            worker.close()
