"""A failure in one node: all that consumes it fails with the same root cause, in bounded time; nothing else does."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from tests.integration.conftest import stopped

V = np.arange(8, dtype=np.float32)
TOO_MUCH = 1 << 42
"""Elements: more bytes than a process has addresses, so that no machine can allocate them."""

WITHIN_S = 20.0


@pytest.fixture
def there(slices):
    return pw.compiled(lambda v: v * 2, slice=slices.b2, in_specs=P("x"), out_specs=P("x"))


@pytest.fixture
def exhaust(slices):
    def exhaust(v):
        return jnp.sort(v[0] * jnp.arange(TOO_MUCH, dtype=jnp.float32))[:8]

    return pw.compiled(exhaust, slice=slices.a4)


def assert_root(error: pw.errors.PathwaysError) -> None:
    """The error names what happened, the node, the user's line and the host."""
    assert type(error) in (pw.errors.ExecutionError, pw.errors.CompileError)
    text = str(error)
    assert "exhaust" in text
    assert error.failure is not None
    assert error.failure.host == 0
    if type(error) is pw.errors.ExecutionError:
        assert str(TOO_MUCH * 4) in text, text
        assert "test_errors.py:" in text


def failure_of(array: pw.Array, look) -> pw.errors.PathwaysError:
    with pytest.raises(pw.errors.PathwaysError) as caught:
        look(array)
    return caught.value


@pytest.mark.parametrize("look", [np.asarray, pw.Array.block_until_ready], ids=["asarray", "block_until_ready"])
def test_failure_reaches_every_consumer(session, inc, there, exhaust, within, equal, look) -> None:
    """Consumers in the program on both islands, and later programs that take what failed."""

    @pw.program
    def f(v):
        bad = exhaust(v)
        return {"bad": bad, "same island": inc(bad), "other island": there(bad), "further": inc(there(inc(bad)))}

    with within(WITHIN_S):
        results = f(V)
        later = inc(there(results["other island"]))
        much_later = pw.program(lambda v, w: there(v) + inc(w))(later, V)
        errors = [failure_of(array, look) for array in [*results.values(), later, much_later]]
    for error in errors:
        assert_root(error)
    assert len({error.failure for error in errors}) == 1
    equal(there(inc(V)), (V + 1) * 2)


def test_failure_known_before_the_next_call_fails_it_at_once(session, inc, exhaust, within) -> None:
    bad = exhaust(V)
    assert_root(failure_of(bad, pw.Array.block_until_ready))
    assert bad.is_ready()
    launches = session.status()["launches"]
    with within(2):
        assert_root(failure_of(inc(bad), np.asarray))
        assert_root(failure_of(pw.program(lambda v: (inc(v), v))(bad)[0], np.asarray))
    assert session.status()["launches"] == launches, "nothing was sent"


def test_independent_launches_go_on(session, inc, there, exhaust, equal) -> None:
    """Good launches before, between and after failing ones, in flight together, from one client."""
    f = pw.program(lambda v: there(inc(v)))
    g = pw.program(lambda v: there(exhaust(v)))
    good, bad = [], []
    for k in range(20):
        good.append(f(V + np.float32(k)))
        bad.append(g(V))
    for k, array in enumerate(good):
        equal(array, (V + k + 1) * 2)
    for array in bad:
        assert_root(failure_of(array, np.asarray))


def test_independent_results_of_the_failed_launch_fail_with_it(session, inc, exhaust) -> None:
    """The outcome is the launch's: one of two."""
    bad, other = pw.program(lambda v: (exhaust(v), inc(v)))(V)
    assert_root(failure_of(bad, pw.Array.block_until_ready))
    assert_root(failure_of(other, pw.Array.block_until_ready))


def test_argument_of_a_failed_launch_stays(session, slices, inc, exhaust, equal) -> None:
    x = pw.put(V, slice=slices.a4, spec=P("x"))
    assert_root(failure_of(exhaust(x), np.asarray))
    equal(x, V)
    equal(inc(x), V + 1)


def test_unused_failure_hurts_nobody(session, inc, exhaust, equal) -> None:
    f = pw.program(lambda v: inc(v))
    for _ in range(5):
        exhaust(V)
        equal(f(V), V + 1)


def test_failed_compile(session, slices, inc, there, within, equal) -> None:
    """A function that traces and that XLA's CPU compiler refuses: it has no 6-bit floats."""
    bad = pw.compiled(lambda v: v.astype(ml_dtypes.float6_e2m3fn).astype(v.dtype), slice=slices.a1)
    with within(WITHIN_S):
        first = bad(V)
        second = there(first)
        third = inc(second)
        errors = [failure_of(array, np.asarray) for array in (first, second, third)]
    for error in errors:
        assert isinstance(error, pw.errors.CompileError)
        assert "<lambda> could not be compiled on host 0" in str(error)
    with pytest.raises(pw.errors.CompileError, match="could not be compiled on host 0"):
        bad.lower(V).explain()
    equal(inc(V), V + 1)


def test_an_array_that_cannot_be_counted_is_refused(session, slices) -> None:
    f = pw.compiled(lambda v: jnp.sort(jnp.zeros((1 << 40, 1 << 40)) * v[0])[0, :8], slice=slices.a1)
    with pytest.raises(
        pw.errors.TooLarge, match=r"makes float32\[1099511627776,1099511627776\] at test_errors.py:\d+: 1208"
    ):
        f(V)


# --- errors of the user's own Python ----------------------------------------------------------------------------------


class OwnError(Exception):
    pass


def raises(v):
    raise OwnError("this is mine")


def test_exception_while_tracing_a_program(session, inc) -> None:
    def f(v):
        inc(v)
        return raises(v)

    with pytest.raises(pw.errors.TraceError) as caught:
        pw.program(f)(V)
    assert isinstance(caught.value.__cause__, OwnError)
    line = raises.__code__.co_firstlineno + 1
    assert f"program 'f' (test_errors.py:{line}) cannot be traced: OwnError: this is mine" in str(caught.value)


def test_exception_while_tracing_a_compiled_function(session, slices, inc) -> None:
    bad = pw.compiled(raises, slice=slices.a4)
    for call in (bad, pw.program(lambda v: bad(inc(v)))):
        with pytest.raises(pw.errors.TraceError) as caught:
            call(V)
        assert isinstance(caught.value.__cause__, OwnError)
        line = raises.__code__.co_firstlineno + 1
        assert f"raises (test_errors.py:{line}) cannot be traced: OwnError: this is mine" in str(caught.value)


def test_exception_while_tracing_leaves_no_trace(session, inc, equal) -> None:
    """A later call of the same program, now well behaved, works."""
    angry = [True]

    @pw.program
    def f(v):
        x = inc(v)
        if angry:
            raises(v)
        return x

    with pytest.raises(pw.errors.TraceError, match="OwnError: this is mine"):
        f(V)
    angry.clear()
    equal(f(V), V + 1)


def test_errors_survive_pickling() -> None:
    import pickle

    error = pw.errors.from_failure(pw.errors.Failure("CompileError", "no", "node", "file.py:3", 1))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is pw.errors.CompileError
    assert str(again) == str(error) == "no [node node, file.py:3, host 1]"


def test_wait_has_a_limit(session, slices, inc) -> None:
    with stopped(session, 0):
        y = inc(V)
        with pytest.raises(pw.errors.WaitTimeout, match=r"the array was not ready within 0.2 s"):
            y.block_until_ready(timeout=0.2)
        assert not y.is_ready()
    assert np.asarray(y).tolist() == (V + 1).tolist()
