"""Arguments that come with their launch, on a host."""

from __future__ import annotations

from typing import Any

import pytest

from pathways_ray.executor.run.instructions import Handed
from pathways_ray.limits import MAX_EARLY_TEMPORARY_BYTES
from pathways_ray.transport.messages import AllowEarly, IslandLaunch, LaunchEarly
from tests.unit.executor.run.test_core import Host, host_with_call, run
from tests.unit.executor.run.test_early import MARK, host_that_takes_calls
from tests.unit.helpers import VECTOR, Sketch


def value(text: str) -> bytes:
    """As many bytes as the array has that a program takes."""
    return text.encode().ljust(VECTOR.nbytes, b".")


def sent(sequence: int, results: int, **inline: str) -> IslandLaunch:
    given = tuple((k, value(text)) for k, text in enumerate(inline.values()))
    return IslandLaunch(sequence, 1, 1, (0,) * len(given), results, inline=given)


def handed(results: int, inline: tuple[tuple[int, bytes], ...], arguments: tuple[int, ...] = (0,)) -> Handed:
    return Handed(1, MARK, LaunchEarly(1, arguments, results, inline))


@pytest.mark.parametrize("multi_host", [False, True])
def test_a_launch_takes_what_it_carries_and_the_store_does_not_have_it(multi_host: bool) -> None:
    host = host_with_call(multi_host=multi_host)
    host.handle(sent(1, 100, x="v"), sent(2, 200, x="w"))
    assert host.enqueued == ["f(v)", "f(w)"]
    assert host.buffers() == {1: "x", 100: "f(v)", 200: "f(w)"}


def test_it_takes_other_arguments_from_the_store() -> None:
    host, sketch = Host(), Sketch()
    here = sketch.slice("0.0")
    host.program(1, sketch, sketch.call("f", sketch.argument(here), sketch.argument(here), slice=here))
    host.store.put(1, 1, "x")
    host.handle(IslandLaunch(1, 1, 1, (1, 0), 100, inline=((1, value("v")),)))
    assert host.enqueued == ["f(x,v)"]


def test_a_call_whose_value_went_with_the_host_before_is_lost_with_that() -> None:
    """The host said the value; the launch came without the arguments' bytes, and to the host's successor."""
    host = host_with_call()
    host.handle(IslandLaunch(1, 1, 1, (0,), 100))
    failure = host.buffers()[100]
    assert (failure.kind, failure.host) == ("HostLost", 0)
    assert "what the call carried went with it; call again" in failure.message


def test_a_call_that_is_handed_over_with_it_is_the_launch_that_is_sent_with_it() -> None:
    host = host_that_takes_calls()
    host.handle(handed(600, ((0, value("v")),)), sent(6, 600, x="v"))
    assert (host.enqueued, host.confirmed, host.refused) == (["f(v)"], [(-1, 6)], [])


def test_one_that_is_sent_without_its_value_is_the_call_that_was_handed_over_with_it() -> None:
    host = host_that_takes_calls()
    host.handle(handed(600, ((0, value("v")),)), IslandLaunch(6, 1, 1, (0,), 600))
    assert (host.enqueued, host.confirmed, host.refused) == (["f(v)"], [(-1, 6)], [])


def test_one_that_is_sent_with_another_value_is_what_counts() -> None:
    host = host_that_takes_calls()
    host.handle(handed(600, ((0, value("v")),)), sent(6, 600, x="w"))
    assert host.confirmed == [(-1, 0)]
    assert host.buffers()[600] == "f(w)"


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(handed(600, ()), id="without it"),
        pytest.param(handed(600, ((0, value("v")[:-1]),)), id="too short"),
        pytest.param(handed(600, ((0, value("v") * 2),)), id="too long"),
        pytest.param(handed(600, ((1, value("v")),)), id="of another place"),
        pytest.param(handed(600, ((0, value("v")), (0, value("v")))), id="twice"),
        pytest.param(handed(600, ((0, value("v")),), (1,)), id="and names a buffer"),
        pytest.param(handed(600, ((0, value("v")), (1, value("v"))), (0, 0)), id="with one too many"),
        pytest.param(handed(0, ((0, value("v")),)), id="for no buffer"),
    ],
)
def test_a_call_that_carries_anything_else_is_left_to_the_scheduler(call: Handed) -> None:
    """Nobody has looked at what a client hands over itself."""
    host = host_that_takes_calls()
    before = host.buffers()
    host.handle(call)
    assert host.refused == [call.message.results]
    assert (host.enqueued, host.buffers()) == ([], before)


def test_a_program_that_takes_much_inside_does_not_begin_early(monkeypatch: Any) -> None:
    monkeypatch.setattr(Host, "temporary_bytes", MAX_EARLY_TEMPORARY_BYTES + 1)
    host = host_with_call()
    host.handle(AllowEarly(MARK), run(5, 1), handed(600, (), (1,)))
    assert host.refused == [600]
