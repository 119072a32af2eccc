"""Launches that call host functions: where they stop, what goes on meanwhile, and what comes of a call that fails."""

from __future__ import annotations

from pathways_ray.errors import Failure
from pathways_ray.transport.messages import Abort, BarrierReached, BarrierReleased, DropSession
from tests.unit.executor.run.test_core import BOOM, AskedCall, Host, run
from tests.unit.helpers import Sketch


def host_that_calls(*devices: str, multi_host: bool = False, host: int = 0) -> Host:
    """Program 1 is f, the host function h of what f made, and k of what h gives; program 2 is g. Buffer 1 is there."""
    made, sketch = Host(multi_host, host), Sketch()
    here = sketch.slice(*(devices or ("0.0", "0.1")))
    f = sketch.call("f", sketch.argument(here), slice=here)
    h = sketch.call("h", f, slice=here, host_limit_ms=1000)
    made.program(1, sketch, sketch.call("k", h, slice=here))
    other = Sketch()
    here = other.slice("0.0", "0.1")
    made.program(2, other, other.call("g", other.argument(here), slice=here))
    made.store.put(1, 1, "x")
    return made


def over(host: Host, call: AskedCall, sequence: int, came: object = "done") -> None:
    """A call is over, and the host hears of it as of inputs that have arrived."""
    call.value = came
    (barrier,) = [barrier for asked, barrier in host.awaited if asked == sequence]
    host.arrived(sequence, barrier)


def test_other_launches_run_while_a_launch_waits_for_its_host_function() -> None:
    """
    1. Launch 1 enqueues f, has h called, and stops. Launch 2 runs to its end.
    2. The call is over: k takes what it gave.
    """
    host = host_that_calls()
    host.handle(run(1, 1))
    assert [call.text for call in host.asked] == ["h(f(x))"]
    host.handle(run(2, 1, program=2))
    assert host.enqueued == ["f(x)", "g(x)"]
    assert 200 in host.buffers()
    assert 100 not in host.buffers()
    over(host, host.asked[0], 1)
    assert host.enqueued == ["f(x)", "g(x)", "k(h(f(x)))"]
    assert host.buffers()[100] == "k(h(f(x)))"


def test_a_call_that_fails_is_the_value_of_all_that_follows() -> None:
    host = host_that_calls()
    host.handle(run(1, 1))
    boom = Failure("HostFunctionError", "h raised ValueError: no", "h", "user.py:3", 0)
    over(host, host.asked[0], 1, boom)
    assert host.buffers()[100] == boom
    assert host.enqueued == ["f(x)"]


def test_an_argument_that_failed_is_not_called_with() -> None:
    host = host_that_calls()
    host.store.put(1, 1, BOOM)
    host.handle(run(1, 1))
    assert host.asked == []
    assert host.buffers()[100] == BOOM


def test_a_launch_that_has_ended_elsewhere_waits_for_no_call() -> None:
    host = host_that_calls()
    host.handle(run(1, 1))
    host.handle(Abort(((1, 1),), BOOM))
    assert host.asked[0].value == BOOM
    assert host.buffers()[100] == BOOM
    assert not host.core.active


def test_hosts_of_a_slice_take_what_they_called_for_together() -> None:
    """Each makes its own call; k is a gang of both, so what failed on one has failed on the other."""
    host = host_that_calls("0.0", "1.0", multi_host=True)
    host.handle(run(1, 1))
    over(host, host.asked[0], 1)
    (reached,) = [message for message in host.messages if isinstance(message, BarrierReached)]
    assert reached.failure is None
    assert host.enqueued == ["f(x)"]
    host.handle(BarrierReleased(1, reached.barrier, BOOM))
    assert host.buffers()[100] == BOOM


def test_the_processes_of_a_session_end_with_it() -> None:
    host = host_that_calls()
    host.handle(DropSession(1))
    assert host.ended == [1]
