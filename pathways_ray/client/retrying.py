"""`pw.retry`: a function whose results are waited for, and that is called again after a loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any

import jax

from pathways_ray.client.array import Array
from pathways_ray.client.numbers import seconds, whole
from pathways_ray.errors import BufferLost, HostLost, PathwaysError, UsageError

ATTEMPTS = 3


def retry(
    fun: Callable[..., Any] | None = None,
    *,
    on: type[BaseException] | tuple[type[BaseException], ...] = (HostLost, BufferLost),
    rebuild: Callable[[], Any] | None = None,
    attempts: int = ATTEMPTS,
    timeout: float | None = None,
) -> Any:
    """Makes a function one that waits for the arrays that it returns, and calls it again where they were lost.

        @pw.retry(on=pw.errors.HostLost, rebuild=weights.restore)
        def rollout(step):
            return sample(weights.latest().tree, prompts(step))

    What the function does has to be repeatable: it takes its arrays where they are remade, and donates none that it
    needs again. A launch that needs a lost host waits for its successor by itself.

    Args:
        fun: returns a pytree; its `pw.Array`s are waited for.
        on: the errors after which it is called again; all others come out.
        rebuild: is called before each further attempt, to make again what was lost with the hosts. What it raises
            comes out, unless it is one of `on`: then it counts as an attempt.
        attempts: calls in all.
        timeout: seconds for each wait.

    Raises:
        UsageError: an option of the wrong kind. Beside it, the last error when there are no attempts left.
    """
    kinds = on if isinstance(on, tuple) else (on,)
    if not kinds or not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
        raise UsageError(f"on= of pw.retry takes classes of errors, such as pw.errors.HostLost; not {on!r}")
    calls = whole(attempts, 1)
    if calls is None:
        raise UsageError(f"attempts= of pw.retry is a number from 1 on, not {attempts!r}")
    if rebuild is not None and not callable(rebuild):
        raise UsageError(f"rebuild= of pw.retry takes a function, not {rebuild!r}")
    limit = seconds(timeout)
    if limit is not None and limit <= 0:
        raise UsageError(f"timeout= of pw.retry is seconds, or None for no limit of its own; not {timeout!r}")
    if fun is None:
        return lambda f: retry(f, on=on, rebuild=rebuild, attempts=attempts, timeout=timeout)
    if not callable(fun):
        raise UsageError(f"pw.retry decorates a function, not {fun!r}")
    if any(kind(fun) for kind in (iscoroutinefunction, isgeneratorfunction, isasyncgenfunction)):
        raise UsageError(f"pw.retry calls a function and waits for what it returns; {fun!r} has only begun by then")

    @functools.wraps(fun, updated=())
    def retried(*args: Any, **kwargs: Any) -> Any:
        for left in range(calls - 1, -1, -1):
            try:
                if left < calls - 1 and rebuild is not None:
                    rebuild()
                return _waited(fun(*args, **kwargs), limit)
            except kinds as error:
                if not left:
                    if isinstance(error, PathwaysError):
                        error.add_note(f"pw.retry called it {calls} times")
                    raise
        raise AssertionError("no attempt")

    return retried


def _waited(result: Any, timeout: float | None) -> Any:
    for leaf in jax.tree.leaves(result):
        if isinstance(leaf, Array):
            leaf._wait(timeout)
    return result
