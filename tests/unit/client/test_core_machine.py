"""The client's core under any order of calls and outcomes, against a controller that takes one message at a time."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pathways_ray.client.buffer import DELETED, FAILED, PENDING, READY, BufferRecord
from pathways_ray.client.events import Disconnected
from pathways_ray.errors import Failure
from pathways_ray.transport.messages import BuffersLost, Completed, Free, Launch, LaunchFailed, Message, Put, Register
from tests.unit.client.scripted import Script
from tests.unit.strategies import repeatable


class Core(RuleBasedStateMachine):
    """Every message must be one that the controller can take: programs and buffers known, and freed once.

    `known` are the buffers of the controller's side; `open` the launches that it has yet to answer; `handles` those of
    the user; `failures` the failure that each failed buffer must have.
    """

    def __init__(self) -> None:
        super().__init__()
        self.script = Script(max_launches=1 << 20)
        self.program = self.script.register()
        self.handles: list[BufferRecord] = []
        self.results: dict[int, list[BufferRecord]] = {}
        self.known: set[int] = set()
        self.freed: set[int] = set()
        self.programs: set[int] = set()
        self.open: list[int] = []
        self.last_launch = 0
        self.failures = (Failure("ExecutionError", f"number {k}") for k in itertools.count())
        self.observe()

    def observe(self) -> None:
        """The controller takes what has left."""
        for message in self.script.take():
            self.arrive(message)

    def arrive(self, message: Message) -> None:
        match message:
            case Register():
                self.programs.add(message.program)
            case Put():
                assert message.buffer not in self.known
                self.known.add(message.buffer)
            case Free():
                assert self.known.issuperset(message.buffers) or self.never_made(message.buffers)
                assert not self.freed & set(message.buffers), "freed once"
                self.freed.update(message.buffers)
            case Launch():
                assert message.launch > self.last_launch, "in the order of the calls"
                self.last_launch = message.launch
                assert message.program in self.programs
                assert set(message.arguments) <= self.known - self.freed, "names what the controller has"
                results = self.results[message.launch]
                self.known.update(record.id for record in results)
                assert [message.results + k for k in range(len(results))] == [record.id for record in results]
                self.open.append(message.launch)

    def never_made(self, buffers: tuple[int, ...]) -> bool:
        """Whether their launch failed in the client: the controller ignores a free of what it does not know."""
        return all(buffer > 0 and buffer not in self.known for buffer in buffers)

    def chosen(self, data: st.DataObject, most: int) -> list[BufferRecord]:
        return [data.draw(st.sampled_from(self.handles)) for _ in range(data.draw(st.integers(0, most)))]

    @rule()
    def register(self) -> None:
        self.program = self.script.register()
        self.observe()

    @rule(hosts=st.integers(1, 3))
    def put(self, hosts: int) -> None:
        self.handles.append(self.script.put(*range(hosts)))
        self.observe()

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), results=st.integers(0, 2))
    def launch(self, data: st.DataObject, results: int) -> None:
        arguments = self.chosen(data, 3)
        before = set(self.script.core.pending)
        failure = next((record.failure for record in arguments if record.failure is not None), None)
        number = max(self.results, default=0) + 1
        made = self.script.launch(*arguments, program=self.program, results=results)
        if failure is None:
            self.results[number] = made
            assert set(self.script.core.pending) - before <= {number}
        else:
            assert [record.failure for record in made] == [failure] * results
        self.handles += made
        self.observe()

    @precondition(lambda self: any(r.upload and r.upload.missing and not r.upload.done for r in self.handles))
    @rule(data=st.data(), fails=st.booleans())
    def acknowledge(self, data: st.DataObject, fails: bool) -> None:
        under_way = [r for r in self.handles if r.upload and r.upload.missing and not r.upload.done]
        record = data.draw(st.sampled_from(under_way))
        assert record.upload is not None
        host = data.draw(st.sampled_from(sorted(record.upload.missing)))
        self.script.acknowledge(record, host, next(self.failures) if fails else None)
        self.observe()

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from(self.handles))
        if record.upload is not None and not record.upload.done:
            return  # its acknowledgements need the handle here
        self.handles.remove(record)
        self.script.free(record)
        self.observe()

    @precondition(lambda self: self.open)
    @rule(data=st.data(), fails=st.booleans())
    def answer(self, data: st.DataObject, fails: bool) -> None:
        launch = data.draw(st.sampled_from(self.open))
        self.open.remove(launch)
        waiting = [record for record in self.results[launch] if record.state is PENDING]
        if fails:
            failure = next(self.failures)
            self.script.handle(LaunchFailed(launch, failure))
            assert all(record.failure == failure for record in waiting)
        else:
            self.script.handle(Completed((launch,), (10,)))
            assert all(record.state is READY for record in waiting)
        assert launch not in self.script.core.pending
        self.observe()

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        lost = self.chosen(data, 2)
        self.script.handle(BuffersLost(tuple(record.id for record in lost), next(self.failures)))
        assert all(record.state in (FAILED, DELETED) for record in lost)
        self.observe()

    @invariant()
    def tables_agree(self) -> None:
        core = self.script.core
        queued = [entry.message.launch for entry in core.queue if isinstance(entry.message, Launch)]
        assert sorted([*self.open, *queued]) == list(core.pending), "each launch is on its way or in the queue"
        assert {record.id for record in self.handles} <= set(core.buffers)
        for record in self.handles:
            assert (record.failure is not None) == (record.state is FAILED)
        if not any(r.upload is not None and not r.upload.done for r in self.handles):
            assert not core.queue, "nothing waits when nothing is uploaded"

    def teardown(self) -> None:
        """However far it came: the end of the session leaves nothing pending."""
        self.script.handle(Disconnected("the machine is over"))
        assert not self.script.core.pending
        assert all(record.state is not PENDING for made in self.results.values() for record in made)


TestCore = Core.TestCase
TestCore.settings = repeatable(120, stateful_step_count=40)
