"""The carrier of a proxy: its core's commands about arrays and programs, carried out by a session of the runtime.

Everything is sent from one thread at a time, in the order of the commands; nothing waits for data. What takes long,
reading programs and values, is done by a few threads beside it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.client.array import Array
from pathways_ray.client.questions import Question
from pathways_ray.client.session import Session
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.errors import PathwaysError, to_failure
from pathways_ray.ir.graph import Graph
from pathways_ray.ir.regions import shard_boxes
from pathways_ray.ir.tilings import axis_names
from pathways_ray.ir.types import ArrayType
from pathways_ray.proxy import colocated, programs
from pathways_ray.proxy import events as do
from pathways_ray.proxy.arrays import Code, Refused, Sharding, Status
from pathways_ray.proxy.codec import Reader, Writer
from pathways_ray.proxy.fetching import Fetcher, outcome
from pathways_ray.proxy.handover import Handover
from pathways_ray.proxy.loaded import Loaded, MovingGraphs
from pathways_ray.proxy.piped_puts import PipedPuts
from pathways_ray.proxy.readers import Read, Readers
from pathways_ray.proxy.statuses import status_of
from pathways_ray.proxy.strides import viewed
from pathways_ray.transport.messages import encode

_log = logging.getLogger(__name__)

COMPILERS = 2
"""Threads that read programs and wait until hosts have compiled them."""


class Carrier:
    """Carries out commands.

    Args:
        wholes: slices of the session; the client's devices are theirs, counted through.
        readers: read programs.
        host_buffers: bytes of the client by their names.
        handover: takes files for the client.
        tell: takes an event to the core; called by threads of the carrier's own.
        look: has somebody call `settled` soon; called by any thread.
        resume: calls `resumed`; called by a thread of the carrier's own.
    """

    def __init__(
        self,
        session: Session,
        wholes: Sequence[VirtualSlice],
        messages: Any,
        readers: Readers,
        host_buffers: Any,
        handover: Handover,
        tell: Callable[[do.Event], None],
        look: Callable[[], None],
        resume: Callable[[], None],
    ) -> None:
        self.session = session
        self.messages = messages
        self.read, self.writer = Reader(messages), Writer(messages)
        self.readers = readers
        self.host_buffers = host_buffers
        self.tell = tell
        self.origins = [(whole, place) for whole in wholes for place in range(whole.size)]
        self.slices: dict[Any, VirtualSlice] = {}
        self.buffers: dict[int, tuple[Array, Sharding]] = {}
        self.failed: dict[int, Status] = {}
        self.loaded: dict[int, Loaded] = {}
        self.graphs = MovingGraphs(session)
        self.waiting: dict[int, tuple[tuple[Array, ...], list[Question]]] = {}
        self.fetcher = Fetcher(session, host_buffers, handover, tell, look)
        self.pipes = PipedPuts(session, host_buffers, handover, resume)
        self._slicing = threading.Lock()
        self._compilers = ThreadPoolExecutor(COMPILERS, "pathways-proxy-compile")

    def close(self) -> None:
        """Ends the session, which frees everything, and the threads once they see it."""
        self.session.close()
        self.pipes.close()
        self.fetcher.close()
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self.buffers.clear()
        self.waiting.clear()

    # --- commands -----------------------------------------------------------------------------------------------------

    def carry_out(self, command: do.Command) -> list[do.Event]:
        """Carries out a command; the events that follow at once: failures, and what needed no wait. Behind an array
        that is read here it is carried out later."""
        return [] if self.pipes.holds(command) else self._carried(command)

    def resumed(self) -> list[do.Event]:
        """Carries out what stood behind an array that has been read here; the events that follow."""
        return self.pipes.resumed(self._carried)

    def _carried(self, command: do.Command) -> list[do.Event]:
        try:
            return _CARRIED[type(command)](self, command) or []
        except PathwaysError as error:
            status = status_of(error.failure or to_failure(error))
        except Refused as refused:
            status = refused.status
        except Exception as error:  # a mistake of ours, of which the client hears
            _log.exception("%s failed", type(command).__name__)
            status = Status(Code.INTERNAL, f"{type(command).__name__} failed: {type(error).__name__}: {error}")
        match command:
            case do.Upload() | do.Regroup() | do.Move():
                return [self._broken((command.buffer,), status)]
            case do.Execute():
                return [self._broken(command.results, status)]
            case do.Fetch():
                return [self.fetcher.missed(command, status)]
            case do.Await() | do.Inspect():
                return [do.Settled(command.ticket, status)]
            case do.Compile():
                return [do.Compiled(command.executable, status)]
        return []

    def _broken(self, buffers: tuple[int, ...], status: Status) -> do.Event:
        """Buffers that could not be made. The core hears of it behind requests that it has taken already."""
        self.failed |= dict.fromkeys(buffers, status)
        return do.Broken(buffers, status)

    def _made(self, buffer: int) -> tuple[Array, Sharding]:
        """The array that a buffer is, and its sharding.

        Raises:
            Refused: it could not be made.
        """
        found = self.buffers.get(buffer)
        if found is None:
            raise Refused(*self.failed.get(buffer, Status(Code.NOT_FOUND, f"there is no buffer {buffer}")))
        return found

    def slice_of(self, sharding: Sharding) -> VirtualSlice:
        """The slice on the devices of a sharding.

        Raises:
            Refused: they are on several islands.
        """
        found = self.slices.get(sharding.place)
        if found is not None:
            return found
        with self._slicing:
            if sharding.place not in self.slices:
                origins = [self.origins[device] for device in sharding.devices]
                whole = origins[0][0]
                if any(other is not whole for other, _ in origins):
                    raise Refused(
                        Code.UNIMPLEMENTED, f"devices {sharding.devices} are on several islands; use those of one"
                    )
                places = [place for _, place in origins]
                names = axis_names(sharding.mesh)
                self.slices[sharding.place] = self.session.part_of(whole, places, sharding.mesh, names)
            return self.slices[sharding.place]

    def _kind(self, kind: ArrayType, sharding: Sharding) -> ArgumentType:
        return ArgumentType.of(kind, False, self.slice_of(sharding), sharding.spec)

    def _upload(self, command: do.Upload) -> None:
        kind, sharding = command.type, command.sharding
        shard = ArrayType(sharding.shard_shape(kind.shape), kind.dtype)
        boxes = shard_boxes(kind, sharding.spec, sharding.slice_type)
        found = None
        for piece in command.pieces:
            array = viewed(self.host_buffers.bytes_of(piece.handle), shard, piece.strides)
            if shard == kind:
                found = array
                break
            if found is None:
                found = np.empty(kind.shape, array.dtype)
            for box in {boxes[place] for place in piece.places}:
                found[tuple(slice(start, stop) for start, stop in box)] = array
        assert found is not None
        made = self.session.upload(found, self._kind(kind, sharding))
        self.buffers[command.buffer] = made, sharding

    def _lying(self, buffer: int) -> tuple[Array, programs.Lying]:
        array, sharding = self._made(buffer)
        return array, (array._type.array, sharding, self.slice_of(sharding).id)

    def _launch_graph(
        self, key: Any, graph: Callable[[], Graph], arrays: Sequence[Array], result: ArgumentType
    ) -> Array:
        """Launches a graph of one result without functions."""
        records = [array._buffer.record for array in arrays]
        return self.session.launch(self.graphs.number(key, graph), records, (result,))[0]

    def _regroup(self, command: do.Regroup) -> None:
        found = [self._lying(source) for source in command.sources]
        kind = self._kind(command.type, command.sharding)
        made = (command.type, command.sharding, self.slice_of(command.sharding).id)
        lying = tuple(each for _, each in found)
        array = self._launch_graph(
            (lying, command.shards, made),
            lambda: programs.regroup_graph(lying, command.shards, made),
            [array for array, _ in found],
            kind,
        )
        self.buffers[command.buffer] = array, command.sharding

    def _move(self, command: do.Move) -> None:
        source, lying = self._lying(command.source)
        kind = self._kind(command.type, command.sharding)
        made = (command.type, command.sharding, self.slice_of(command.sharding).id)
        array = self._launch_graph((lying, made), lambda: programs.move_graph(lying, made), [source], kind)
        self.buffers[command.buffer] = array, command.sharding

    def _execute(self, command: do.Execute) -> None:
        loaded = self.loaded[command.executable]
        if loaded.program.by_pipe:
            if (came := self.pipes.put(loaded, command)) is not None:
                self.buffers[command.results[0]] = came, loaded.program.signature.output_shardings[0]
            return
        number = self._registered(loaded, command.donated)
        records = [self._made(buffer)[0]._buffer.record for buffer in command.arguments]
        donated = [records[k] for k in command.donated]
        why = f"it was donated to {loaded.program.signature.name}" if donated else ""
        made = self.session.launch(number, records, loaded.results, donated, why)
        shardings = loaded.program.signature.output_shardings
        for buffer, array, sharding in zip(command.results, made, shardings, strict=True):
            self.buffers[buffer] = array, sharding

    def _registered(self, loaded: Loaded, donated: tuple[int, ...]) -> int:
        if donated not in loaded.registered:
            graph, program = loaded.graph(donated), loaded.program
            loaded.registered[donated] = self.session.register(graph, encode(graph), {program.digest: program.blob})
        return loaded.registered[donated]

    def _free(self, command: do.Free) -> None:
        for buffer in command.buffers:
            if self.buffers.pop(buffer, None) is None:
                self.failed.pop(buffer, None)

    def _discard(self, command: do.Discard) -> None:
        for handle in command.handles:
            self.host_buffers.drop(handle)

    def _unload(self, command: do.Unload) -> None:
        loaded = self.loaded.pop(command.executable, None)
        for number in loaded.registered.values() if loaded is not None else ():
            self.session.unregister(number)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _await(self, command: do.Await) -> list[do.Event]:
        if failed := next((self.failed[buffer] for buffer in command.buffers if buffer in self.failed), None):
            return [do.Settled(command.ticket, failed)]
        arrays = tuple(self.buffers[buffer][0] for buffer in command.buffers if buffer in self.buffers)
        found = outcome(arrays)
        if found is not None:
            return [do.Settled(command.ticket, found or None)]
        asked = [self.session.hasten(array) for array in arrays if array._buffer.record.early]
        self.waiting[command.ticket] = arrays, [question for question in asked if question is not None]
        return []

    def settled(self) -> list[do.Event]:
        """The events of all that was waited for and has come; with a failure once the session has ended."""
        reason = self.session.closed_because
        events = self.fetcher.asked(bool(reason))
        for ticket, (arrays, _) in list(self.waiting.items()):
            found = outcome(arrays)
            if found is None and reason:
                found = Status(Code.UNAVAILABLE, f"the session ended: {reason}")
            if found is not None:
                for question in self.waiting.pop(ticket)[1]:
                    question.take_back()
                events.append(do.Settled(ticket, found or None))
        return events

    def _fetch(self, command: do.Fetch) -> None:
        self.fetcher.fetch(command, self._made(command.buffer)[0])

    def _hand_over(self, command: do.HandOver) -> list[do.Event]:
        if command.buffer in self.buffers:
            self.fetcher.hand_over(command, self.buffers[command.buffer][0])
            return []
        self.fetcher.hand_over(command, None)
        return [do.Settled(command.ticket)]

    # --- programs -----------------------------------------------------------------------------------------------------

    def _compile(self, command: do.Compile) -> list[do.Event]:
        if (program := programs.understood(command.program, len(self.origins))) is None:
            self._compilers.submit(self._compiled, command)
            return []
        loaded = Loaded(program, self.slice_of(program.place))  # without a wait for programs that hosts compile
        if program.by_pipe and not self.session.takes_pipes(loaded.results[0]):
            raise Refused(Code.UNIMPLEMENTED, "an array is to come by a pipe, and its host is on another machine")
        self.loaded[command.executable] = loaded
        return [do.Compiled(command.executable, program.signature)]

    def _compiled(self, command: do.Compile) -> None:
        try:
            made: do.Signature | Status = self._loaded(command)
        except Refused as refused:
            made = refused.status
        except PathwaysError as error:
            made = status_of(error.failure or to_failure(error))
        except Exception as error:  # whatever a reader of foreign bytes may raise
            made = Status(Code.INTERNAL, f"the program cannot be compiled ({type(error).__name__}: {error})")
        self.tell(do.Compiled(command.executable, made))

    def _loaded(self, command: do.Compile) -> do.Signature:
        """Reads a program and has hosts compile it.

        Raises:
            Refused: it cannot be read, or is of another kind.
            PathwaysError: the cluster refuses it.
        """
        if command.program.type_name == colocated.CUSTOM_CALL:
            program = self._function(command.program)
        elif (kind := command.program.type_name) != programs.PROGRAM:
            raise Refused(Code.UNIMPLEMENTED, f"programs of type {kind!r} are not supported, {programs.PROGRAM!r} are")
        else:
            devices, overrides = programs.devices_of(self.messages, command.options)
            if unknown := [device for device in devices if not 0 <= device < len(self.origins)]:
                text = f"the program is for devices {unknown[:8]}; there are 0 to {len(self.origins) - 1}"
                raise Refused(Code.INVALID_ARGUMENT, text)
            asked = Read(bytes(command.program.data), devices, tuple(self.session.platforms), overrides)
            program = self.readers.read(asked)
        loaded = Loaded(program, self.slice_of(program.place))
        if loaded.results:
            donated = tuple(sorted(program.signature.donated))  # as most calls take them
            number = self._registered(loaded, donated)
            try:
                explained = self.session.explain(number, encode(loaded.graph(donated)))
            except PathwaysError:
                self.session.unregister(number)  # the client has nothing of it that it could unload
                raise
            loaded.temporary_bytes = max(explained.temporary_bytes.values(), default=0)
        self.loaded[command.executable] = loaded
        return program.signature

    def _function(self, serialized: Any) -> programs.Program:
        """Reads a function in Python. Raises as `_loaded` does."""
        trusted = self.session.trusted
        program = colocated.read_function(self.messages, self.read, serialized, len(self.origins), trusted)
        placed = self.slice_of(program.place).placed
        if len(placed.hosts) > 1:
            text = f"Python beside devices of several hosts ({program.signature.name}); use devices of one"
            raise Refused(Code.UNIMPLEMENTED, text)
        return program

    def _inspect(self, command: do.Inspect) -> list[do.Event]:
        loaded = self.loaded[command.executable]
        if command.what == "metadata":
            made = self.writer.metadata(loaded.program.signature, loaded.temporary_bytes, MEMORY_KINDS[0])
            return [do.Settled(command.ticket, value=made)]
        self._compilers.submit(self._inspected, command, loaded)
        return []

    def _inspected(self, command: do.Inspect, loaded: Loaded) -> None:
        try:
            about = loaded.program.module, len(loaded.program.signature.devices)
            if command.what == "cost":
                event = do.Settled(command.ticket, value=self.writer.cost(self.readers.cost(*about)))
            else:
                event = do.Settled(command.ticket, value={"human_readable_program_text": self.readers.text(*about)})
        except Refused as refused:
            event = do.Settled(command.ticket, refused.status)
        except Exception as error:
            event = do.Settled(command.ticket, Status(Code.INTERNAL, f"{type(error).__name__}: {error}"))
        self.tell(event)


MEMORY_KINDS = ("device", "pinned_host", "unpinned_host")
"""The kinds that JAX knows of CPU devices, the default one first. Here all of them are the device's one memory."""


_CARRIED: dict[type, Callable[[Carrier, Any], list[do.Event] | None]] = {
    do.Upload: Carrier._upload,
    do.Regroup: Carrier._regroup,
    do.Move: Carrier._move,
    do.Execute: Carrier._execute,
    do.Free: Carrier._free,
    do.Discard: Carrier._discard,
    do.Unload: Carrier._unload,
    do.Await: Carrier._await,
    do.Fetch: Carrier._fetch,
    do.HandOver: Carrier._hand_over,
    do.Compile: Carrier._compile,
    do.Inspect: Carrier._inspect,
}
