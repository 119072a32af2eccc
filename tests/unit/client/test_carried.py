"""Small values in calls: those that go with the launch, and those that are uploaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pathways_ray as pw
from pathways_ray.client import context
from pathways_ray.client.buffer import INLINE, BufferRecord
from pathways_ray.errors import InvalidArray
from pathways_ray.limits import MAX_INLINE, MAX_INLINE_BYTES, MAX_SENT_INLINE_BYTES
from pathways_ray.transport.messages import InlineLaunch, Launch, PrioritizedLaunch
from tests.unit.client.local import LocalSession
from tests.unit.client.scripted import Script

MOST = MAX_SENT_INLINE_BYTES // 4
"""Elements of float32."""


class Counting(LocalSession):
    """Notes the bytes of what is uploaded and of what goes with launches."""

    def __init__(self) -> None:
        super().__init__()
        self.uploaded: list[int] = []
        self.carried: list[int] = []

    def put(self, value: Any, where: Any, spec: Any, alone: bool = False) -> Any:
        made = super().put(value, where, spec)
        self.uploaded.append(made.nbytes)
        return made

    def launch(self, *given: Any) -> Any:
        self.carried += [len(data) for _, data in given[-1]] if len(given) == 6 else []
        return super().launch(*given)


@pytest.fixture
def session() -> Iterator[Counting]:
    found = Counting()
    context.sessions.append(found)
    yield found
    found.close()


def slice_of(session: Counting, devices: int = 1) -> Any:
    return session.virtual_slice((devices,), ("x",))


@pytest.mark.parametrize(
    "value",
    [
        np.arange(8, dtype=np.float32),
        np.arange(8.0),
        np.float32(3),
        np.array([True, False]),
        np.arange(6, dtype=np.int8).reshape(2, 3).T,
        np.arange(4, dtype=np.float32).astype(ml_dtypes.bfloat16),
        pytest.param(lambda: jnp.arange(5), id="of JAX"),  # made in the test: JAX's devices are
        2.5,
        7,
        True,
    ],
    ids=str,
)
def test_a_small_value_goes_with_its_launch(session: Counting, value: Any) -> None:
    value = value() if callable(value) else value
    where = slice_of(session)
    double = pw.compiled(lambda v: jnp.concatenate([jnp.ravel(v), jnp.ravel(v)]), slice=where)
    expected = np.concatenate([np.ravel(jnp.asarray(value))] * 2)
    np.testing.assert_array_equal(np.asarray(double(value)), expected)
    assert (session.uploaded, session.carried) == ([], [expected.nbytes // 2])


def test_a_value_that_changes_behind_the_call_is_what_it_was(session: Counting) -> None:
    value = np.ones(4, np.float32)
    made = pw.compiled(lambda v: v + 1, slice=slice_of(session))(value)
    value[:] = 7
    np.testing.assert_array_equal(np.asarray(made), 2.0)


@pytest.mark.parametrize(
    ("sizes", "carried"),
    [
        ([MOST], [MOST]),
        ([MOST + 1], []),
        ([MOST // 2, MOST // 2, 1, 1], [MOST // 2, MOST // 2]),
        ([MOST, 1], [MOST]),
        ([0, 3], [3]),
        ([1] * (MAX_INLINE + 2), [1] * MAX_INLINE),
    ],
    ids=lambda sizes: str(sizes[:4]),
)
def test_a_launch_carries_no_more_than_the_limit(session: Counting, sizes: list[int], carried: list[int]) -> None:
    values = [np.full(size, k, np.float32) for k, size in enumerate(sizes)]
    made = pw.compiled(lambda vs: sum(v.sum() for v in vs), slice=slice_of(session))(values)
    assert float(np.asarray(made)) == sum(value.sum() for value in values)
    assert session.carried == [4 * size for size in carried]
    assert len(session.uploaded) == len(sizes) - len(carried)


@pytest.mark.parametrize(("more", "carried"), [(0, [MAX_INLINE_BYTES]), (1, [])])
def test_a_launch_that_its_host_gets_at_once_carries_more(
    session: Counting, monkeypatch: pytest.MonkeyPatch, more: int, carried: list[int]
) -> None:
    monkeypatch.setattr(session._core, "carries", lambda program, priority: MAX_INLINE_BYTES)
    value = np.arange(MAX_INLINE_BYTES // 4 + more, dtype=np.float32)
    made = pw.compiled(lambda v: v + 1, slice=slice_of(session))(value)
    np.testing.assert_array_equal(np.asarray(made), value + 1)
    assert (session.carried, len(session.uploaded)) == (carried, more)


def test_what_is_donated_captured_or_handed_back_is_an_array(session: Counting) -> None:
    where = slice_of(session)
    kept, value = np.arange(3, dtype=np.float32), np.ones(3, np.float32)
    donating = pw.compiled(lambda v: v + 1, slice=where, donate_argnums=0)
    add = pw.compiled(lambda v, w: v + w, slice=where)

    @pw.program
    def both(v: Any) -> Any:
        return add(v, kept), v

    np.testing.assert_array_equal(np.asarray(donating(value)), 2.0)
    assert (session.carried, len(session.uploaded)) == ([], 1)
    total, same = both(value)
    np.testing.assert_array_equal(np.asarray(total), kept + 1)
    np.testing.assert_array_equal(np.asarray(same), value)
    assert (session.carried, len(session.uploaded)) == ([], 3)


@pytest.mark.parametrize("size", [3, 2 * MOST], ids=["carried", "uploaded"])
def test_what_a_program_captures_is_what_it_was_when_it_was_traced(session: Counting, size: int) -> None:
    scale = np.ones(size, np.float32)
    times = pw.compiled(lambda v, w: v * w, slice=slice_of(session))

    @pw.program
    def both(v: Any) -> Any:
        return times(v, scale), v + scale

    for _ in range(2):
        made = [np.asarray(array) for array in both(np.float32(3))]
        np.testing.assert_array_equal(made, np.full((2, size), [[3.0], [4.0]]))
        scale[:] = 5


def test_a_launch_that_goes_in_parts_takes_arrays(session: Counting) -> None:
    up, down = (pw.compiled(lambda v, k=k: v + k, slice=slice_of(session)) for k in (1, -1))

    @pw.program
    def either(v: Any) -> Any:
        return jax.lax.cond(v[0] > 0, lambda w: down(up(w)), lambda w: down(w), v)

    np.testing.assert_array_equal(np.asarray(either(np.ones(2, np.float32))), 1.0)
    assert (session.carried, len(session.uploaded)) == ([], 1)


def test_what_is_no_array_is_refused_by_its_name(session: Counting) -> None:
    with pytest.raises(InvalidArray, match="argument v of"):
        pw.compiled(lambda v: v, slice=slice_of(session))("text")


@pytest.mark.parametrize(("priority", "kind"), [(0, InlineLaunch), (3, PrioritizedLaunch)])
def test_a_launch_waits_for_uploads_with_what_it_carries(priority: int, kind: type[Launch]) -> None:
    script, inline = Script(), ((1, b"1234"),)
    script.register()
    script.take()
    x = script.put()
    made = script.core.new_buffers(1)
    assert script.core.launch(1, [x, INLINE], made, priority=priority, inline=inline) is None
    script.take()
    script.acknowledge(x)
    (message,) = script.take()
    assert type(message) is kind
    assert (message.arguments, message.inline) == ((x.id, 0), inline)


def test_a_launch_fails_at_once_for_another_argument_that_has_failed() -> None:
    script = Script()
    script.register()
    script.take()
    broken = BufferRecord(99)
    broken.fail(pw.errors.Failure("ExecutionError", "boom"))
    (made,) = script.core.new_buffers(1)
    assert script.core.launch(1, [INLINE, broken], [made], inline=((0, b"1234"),)) is None
    assert made.failure is not None
    assert INLINE.failure is None
