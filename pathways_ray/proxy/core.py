"""The decisions of a proxy, for one client: requests in, commands out. Pure.

Four rules of the protocol:

*Order.* Requests take effect in the order in which they come. One that needs bytes which are still on their way (they
come by a call of their own) is parked, and all later ones behind it, until they have come or are given up.

*Names.* The client names arrays before they exist. Only the results of the first call of a program are named here,
since the client does not know yet how many there are; and programs, and futures.

*Failures are values.* A request that fails leaves its results poisoned with its status: most clients wait for no
answer. Who uses such an array gets the same status, and what is made of it has it too.

*Answers.* Every request is answered once. The client keeps the stack traces of a request until the answer gives back
its context; it looks at answers in the order of their numbers, so those it does not count have none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from pathways_ray.proxy import events as do
from pathways_ray.proxy.array_requests import ARRAY_REQUESTS, BRING_BYTES, QUESTIONS, ArrayRequests
from pathways_ray.proxy.arrays import Array, Arrays, Code, Refused, Status
from pathways_ray.proxy.events import Command, Event, Pending, Signature
from pathways_ray.proxy.parking import Parking

FIRST_HANDLE = 1 << 62
"""Names given here; the client counts its own from 1."""

MAX_EARLY = 16
"""Fetches that are answered before the value is there. The client then asks for the bytes, and has a thread wait for
each, while they are on their way; so a value that somebody waits for takes one round trip less."""

AHEAD_BYTES = 1 << 20
"""Shards of fewer bytes JAX begins to read ahead, many at a time."""


class ProxyCore:
    """The state of one client.

    Args:
        read: reads parts of requests (`codec.Reader`).
        islands: by the numbers of the devices that the client has, the island of each.
    """

    def __init__(self, read: Any, islands: Mapping[int, int]) -> None:
        self.arrays = Arrays()
        self.requests = ArrayRequests(self.arrays, read, islands)
        self.parked = Parking(self.requests.bytes_needed)
        self.executables: dict[int, Signature | None] = {}
        self.futures: dict[int, Status | None] = {}
        self.statuses: dict[int, tuple[int, ...] | Status] = {}
        self.pending: dict[int, Pending] = {}
        self.fetching: dict[int, int] = {}
        """The buffer of each fetch under way, by its ticket."""
        self.uncounted: set[int] = set()
        self._made = self._handed = 0

    def handle(self, event: Event) -> list[Command]:
        """The commands that follow from an event."""
        match event:
            case do.Requested() if event.kind not in BRING_BYTES and not self.parked:
                commands = self._carry_out(event)
            case do.Requested():
                self.parked.add(event)
                commands = self._advance() if len(self.parked) == 1 else []
            case do.Stored():
                kept = self.parked.store(event.handle, event.failure)
                commands = self._advance() if kept else [do.Discard((event.handle,))]
            case do.Compiled():
                commands = self._compiled(event)
            case do.Settled():
                commands = self._settled(event)
            case do.Broken():
                for buffer in event.buffers:
                    if buffer in self.arrays.buffers:
                        self.arrays.buffers[buffer].failure = event.failure
                commands = []
        self.arrays.give_back()
        if self.arrays.unused:
            commands.append(do.Free(tuple(self.arrays.unused)))
            self.arrays.unused.clear()
        return commands

    def _advance(self) -> list[Command]:
        """Carries out requests in order, up to one whose bytes have not come."""
        commands: list[Command] = []
        for request, taken, failure in self.parked.ready():
            if failure is None:
                commands += self._carry_out(request, taken)
            else:
                commands += [self._refuse(request, failure), do.Discard(taken)]
        return commands

    def _carry_out(self, request: do.Requested, taken: tuple[int, ...] = ()) -> list[Command]:
        handler = _HANDLERS.get(request.kind)
        commands: list[Command] = []
        try:
            if request.kind in ARRAY_REQUESTS:
                kind, body = self.requests.carry_out(request, commands)
                awaited = request.kind in QUESTIONS
                commands.append(do.Reply(request.op, request.context, kind, body, awaited=awaited))
            elif handler is not None:
                commands += handler(self, request)
            else:
                raise Refused(Code.UNIMPLEMENTED, f"{request.kind} is not among what this proxy does")
        except Refused as refused:
            commands.append(self._refuse(request, refused.status))
        except (IndexError, KeyError, ValueError) as error:  # lists of one request that do not belong together
            text = f"{request.kind} is malformed: {type(error).__name__}: {error}"
            commands.append(self._refuse(request, Status(Code.INVALID_ARGUMENT, text)))
        if taken:
            commands.append(do.Discard(taken))
        return commands

    def _refuse(self, request: do.Requested, status: Status) -> Command:
        """The answer to a request that fails, whose results have that status from now on."""
        self.arrays.poison(self.requests.names_given(request), status)
        if request.kind == "loaded_executable_execute_request" and request.body.result_status_handle:
            self.statuses[request.body.result_status_handle] = status
        return do.Reply(request.op, request.context, status=status)

    def new_handle(self) -> int:
        """A name for something that the client does not name itself."""
        self._made += 1
        return FIRST_HANDLE + self._made

    def _wait(self, request: do.Requested, kind: str) -> int:
        """The ticket under which a request waits."""
        ticket = self.new_handle()
        self.pending[ticket] = Pending(request.op, request.context, kind)
        return ticket

    # --- the client, futures ------------------------------------------------------------------------------------------

    def _init(self, request: do.Requested) -> list[Command]:
        return [do.Reply(request.op, request.context, "init_response", counted=False)]

    def _check_future(self, request: do.Requested) -> list[Command]:
        """Each future is asked for once; those of deletions by the part of the client that counts no answers."""
        handle = request.body.future_handle
        counted = handle not in self.uncounted
        self.uncounted.discard(handle)
        if handle not in self.futures:
            status: Status | None = Status(Code.NOT_FOUND, f"there is no future with handle {handle}")
        else:
            status = self.futures.pop(handle)
        kind = "" if status is not None else "check_future_response"
        return [do.Reply(request.op, request.context, kind, None, status, counted)]

    def _check_value_ready(self, request: do.Requested) -> list[Command]:
        buffers: dict[int, None] = {}
        for handle in request.body.value_handles:
            if handle in self.statuses:
                found = self.statuses[handle]
                if isinstance(found, Status):
                    raise Refused(*found)
                buffers.update(dict.fromkeys(found))
            else:
                buffers.update((buffer, None) for buffer, _ in self.arrays.usable(handle).shards)
        ticket = self._wait(request, "check_value_ready_response")
        return [do.Await(ticket, tuple(buffers))]

    def _copy_to_host(self, request: do.Requested) -> list[Command]:
        body = request.body
        array = self.arrays.usable(body.array_handle)
        if array.shard_type != array.type:
            raise Refused(
                Code.UNIMPLEMENTED,
                f"array {body.array_handle} is split over devices {array.sharding.devices}; read its shards one by one",
            )
        strides = tuple(body.byte_strides.strides) if body.HasField("byte_strides") else ()
        buffer, place = array.shards[0]
        kind = "copy_to_host_buffer_response"
        early = len(self.fetching) < MAX_EARLY
        ticket = self.new_handle() if early else self._wait(request, kind)
        self.fetching[ticket] = buffer
        fetch = do.Fetch(ticket, buffer, place, body.host_buffer_handle, strides, early)
        return [fetch, do.Reply(request.op, request.context, kind)] if early else [fetch]

    def _delete(self, request: do.Requested) -> list[Command]:
        for handle in request.body.array_handle:
            if handle in self.arrays.arrays:
                self.arrays.delete(self.arrays.arrays[handle])
        future = self.new_handle()
        self.futures[future] = None
        self.uncounted.add(future)
        body = {"deletion_future_handle": future}
        return [do.Reply(request.op, request.context, "delete_array_response", body, counted=False)]

    def _destruct(self, request: do.Requested) -> list[Command]:
        for handle in request.body.array_handle:
            self.arrays.forget(handle)
            self.statuses.pop(handle, None)
        return [do.Reply(request.op, request.context, "destruct_array_response", counted=False, awaited=False)]

    def _is_deleted(self, request: do.Requested) -> list[Command]:
        body = {"deleted": self.arrays.find(request.body.array_handle).deleted}
        return [do.Reply(request.op, request.context, "is_array_deleted_response", body)]

    # --- programs -----------------------------------------------------------------------------------------------------

    def _compile(self, request: do.Requested) -> list[Command]:
        if request.body.host_callbacks:
            raise Refused(Code.UNIMPLEMENTED, "programs that call back to the client's host are not supported")
        number = self.new_handle()
        self.executables[number] = None
        self.pending[number] = Pending(request.op, request.context, "compile_response")
        return [do.Compile(number, request.body.program, request.body.compile_options)]

    def _compiled(self, event: do.Compiled) -> list[Command]:
        waiting = self.pending.pop(event.executable)
        made = event.signature
        if isinstance(made, Status):
            del self.executables[event.executable]
            return [do.Reply(waiting.op, waiting.context, status=made)]
        self.executables[event.executable] = made
        future = self.new_handle()
        self.futures[future] = None
        body = {
            "loaded_executable_handle": event.executable,
            "name": made.name,
            "num_devices": len(made.devices),
            "device_ids": made.devices,
            "addressable_device_ids": made.devices,
            "fingerprint_value": made.fingerprint,
            "ready_future_handle": future,
        }
        return [do.Reply(waiting.op, waiting.context, "compile_response", body)]

    def _executable(self, handle: int) -> Signature:
        found = self.executables.get(handle)
        if found is None:
            raise Refused(Code.NOT_FOUND, f"there is no program with handle {handle}")
        return found

    def _execute(self, request: do.Requested) -> list[Command]:
        body = request.body
        number, options = body.loaded_executable_handle, body.execute_options
        program = self._executable(number)
        if program.hands_over:
            return self._hand_over(request, program)
        arrays = [self.arrays.find(handle) for handle in body.args_handles]
        if len(arrays) != len(program.inputs):
            text = f"{program.name} takes {len(program.inputs)} arguments, not {len(arrays)}"
            raise Refused(Code.INVALID_ARGUMENT, text)
        names = list(body.result_array_handle)
        named_here = not names
        if named_here:
            names = [self.new_handle() for _ in program.outputs]
        if len(names) != len(program.outputs):
            text = f"{program.name} gives {len(program.outputs)} results, not {len(names)}"
            raise Refused(Code.INVALID_ARGUMENT, text)
        donated: list[int] = []
        if program.donated:
            donated = sorted(program.donated.difference(options.non_donatable_input_indices))
        commands: list[Command] = []
        try:
            made = self._launch(number, program, arrays, donated, commands)
        except Refused as refused:  # arguments before that one may lie in other buffers now
            return [*commands, self._refuse(request, refused.status)]
        if isinstance(made, Status):
            for k, name in enumerate(names):
                self.arrays.name(name, Array(program.outputs[k], program.output_shardings[k], (), made))
        else:
            for name, buffer in zip(names, made, strict=True):
                self.arrays.name(name, self.arrays.alone(buffer))
        for k in donated:
            if not arrays[k].deleted:
                self.arrays.delete(arrays[k])
        status = body.result_status_handle
        if options.fill_status or status:
            status = status or self.new_handle()
            self.statuses[status] = made
        reply = None
        if status or named_here:
            reply = {"status_handle": status, "program": program, "handles": names if named_here else None}
        kind = "loaded_executable_execute_response"
        commands.append(do.Reply(request.op, request.context, kind, reply, awaited=named_here))
        return commands

    def _hand_over(self, request: do.Requested, program: Signature) -> list[Command]:
        """Gives the client an array in a file. One that has none is asked for in the ordinary way, and says why."""
        self._handed += 1
        ticket, buffer, place = self.new_handle(), 0, 0
        for handle in request.body.args_handles[:1]:
            array = self.arrays.arrays.get(handle)
            if array and array.shards and array.shard_type == array.type and self.arrays.failure_of(array) is None:
                buffer, place = array.shards[0]
                self.fetching[ticket] = buffer
        body = {"status_handle": 0, "program": program, "handles": []}
        kind, awaited = "loaded_executable_execute_response", self._handed == 1
        given = do.HandOver(ticket, self._handed, buffer, place)
        return [given, do.Reply(request.op, request.context, kind, body, awaited=awaited)]

    def _launch(
        self, number: int, program: Signature, arrays: list[Array], donated: list[int], commands: list[Command]
    ) -> tuple[int, ...] | Status:
        """Adds the commands of a call; the buffers of its results, or the status that they get."""
        arguments = []
        for k, (array, kind, sharding) in enumerate(zip(arrays, program.inputs, program.input_shardings, strict=True)):
            if array.deleted:
                raise Refused(Code.INVALID_ARGUMENT, f"argument {k} of {program.name} has been deleted or donated")
            if (failure := self.arrays.failure_of(array)) is not None:
                return failure
            if program.outputs:  # what has none is not run
                arguments.append(self.requests.as_buffer(array, kind, sharding, commands))
        given_away = self._given_away(arrays, arguments, donated) if donated and arguments else ()
        results = zip(program.outputs, program.output_shardings, strict=True)
        made = tuple(self.arrays.new(kind, sharding) for kind, sharding in results)
        if made:
            commands.append(do.Execute(number, tuple(arguments), made, given_away))
        return made

    def _given_away(self, arrays: list[Array], arguments: list[int], donated: list[int]) -> tuple[int, ...]:
        """The donated arguments whose memory nothing else has, and nobody is about to read. Each choice of them is
        compiled by itself, so small ones, of which any may be read just now, are spared together."""
        times, read = Counter(arguments), set(self.fetching.values())
        found = [k for k in donated if times[arguments[k]] == 1 and self.arrays.is_alone_in(arrays[k], arguments[k])]
        if any(arguments[k] in read for k in found):
            found = [k for k in found if arguments[k] not in read and arrays[k].shard_type.nbytes >= AHEAD_BYTES]
        return tuple(found)

    def _fetch_result(self, request: do.Requested) -> list[Command]:
        handle = request.body.result_status_handle
        found = self.statuses.pop(handle, None)
        if found is None:
            raise Refused(Code.NOT_FOUND, f"there is no execution with handle {handle}")
        if isinstance(found, Status):
            raise Refused(*found)
        ticket = self._wait(request, "loaded_executable_fetch_execute_result_response")
        return [do.Await(ticket, tuple(buffer for buffer in found if buffer in self.arrays.buffers))]

    def _inspect(self, request: do.Requested) -> list[Command]:
        what, kind = _INSPECTED[request.kind]
        self._executable(request.body.loaded_executable_handle)
        ticket = self._wait(request, kind)
        return [do.Inspect(ticket, request.body.loaded_executable_handle, what)]

    def _delete_executable(self, request: do.Requested) -> list[Command]:
        self._executable(request.body.loaded_executable_handle)
        future = self.new_handle()
        self.futures[future] = None
        kind = "loaded_executable_delete_response"
        return [*self._unload(request), do.Reply(request.op, request.context, kind, {"future_handle": future})]

    def _is_executable_deleted(self, request: do.Requested) -> list[Command]:
        body = {"is_deleted": request.body.loaded_executable_handle not in self.executables}
        return [do.Reply(request.op, request.context, "loaded_executable_is_deleted_response", body)]

    def _destruct_executable(self, request: do.Requested) -> list[Command]:
        reply = do.Reply(request.op, request.context, "loaded_executable_destruct_response")
        return [*self._unload(request), reply]

    def _unload(self, request: do.Requested) -> list[Command]:
        handle = request.body.loaded_executable_handle
        return [do.Unload(handle)] if self.executables.pop(handle, None) is not None else []

    # --- what was waited for ------------------------------------------------------------------------------------------

    def _settled(self, event: do.Settled) -> list[Command]:
        self.fetching.pop(event.ticket, None)
        waiting = self.pending.pop(event.ticket, None)
        if waiting is None:
            return []
        if event.failure is not None:
            return [do.Reply(waiting.op, waiting.context, status=event.failure)]
        return [do.Reply(waiting.op, waiting.context, waiting.kind, event.value)]


_INSPECTED = {
    "loaded_executable_metadata_request": ("metadata", "loaded_executable_metadata_response"),
    "loaded_executable_cost_analysis_request": ("cost", "loaded_executable_cost_analysis_response"),
    "loaded_executable_human_readable_program_text_request": (
        "text",
        "loaded_executable_human_readable_program_text_response",
    ),
}

_HANDLERS: dict[str, Callable[[ProxyCore, do.Requested], list[Command]]] = {
    "init_request": ProxyCore._init,
    "check_future_request": ProxyCore._check_future,
    "check_value_ready_request": ProxyCore._check_value_ready,
    "copy_to_host_buffer_request": ProxyCore._copy_to_host,
    "delete_array_request": ProxyCore._delete,
    "destruct_array_request": ProxyCore._destruct,
    "is_array_deleted_request": ProxyCore._is_deleted,
    "compile_request": ProxyCore._compile,
    "loaded_executable_execute_request": ProxyCore._execute,
    "loaded_executable_fetch_execute_result_request": ProxyCore._fetch_result,
    "loaded_executable_delete_request": ProxyCore._delete_executable,
    "loaded_executable_is_deleted_request": ProxyCore._is_executable_deleted,
    "loaded_executable_destruct_request": ProxyCore._destruct_executable,
    **dict.fromkeys(_INSPECTED, ProxyCore._inspect),
}
