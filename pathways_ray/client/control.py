"""`pw.cond`, `pw.switch`, `pw.while_loop`, `pw.fori_loop`, `pw.scan`: branches and loops of a program.

They take what their namesakes of `jax.lax` take and follow the same rules: JAX traces the branches and bodies, and
compares their types. What their calls of compiled functions become is decided where graphs are built (`bodies`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pathways_ray.client import source_info
from pathways_ray.client.array import Array
from pathways_ray.client.context import tracing
from pathways_ray.client.tracer import operand
from pathways_ray.errors import GraphError, UsageError

_NONE_GIVEN = object()


def cond(
    pred: Any,
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    *operands: Any,
    operand: Any = _NONE_GIVEN,
) -> Any:
    """Runs one of two functions on the operands, as `jax.lax.cond` does: `true_fun` where `pred` is true.

        y = pw.cond(loss < 1.0, on_a, on_b, state)  # inside a pw.program

    Inside a `pw.program`. The functions call compiled functions on any slices, and ordinary `jnp` operations; both have
    to give values of the same types that lie in the same layouts. Where all their calls are on one slice, both become
    one computation there.

    Args:
        pred: a scalar on any slice.
        operand: the only operand, by this name.

    Raises:
        UsageError: outside of a program.
        TypeError: `operand` beside other operands.
        GraphError: the types or layouts of the branches differ; the message has the lines of both.
    """
    _check_traced("cond", "if float(y) > 0: ...")
    given = _operands("cond", operands, operand)
    return _traced(jax.lax.cond, _value(pred), _body(true_fun), _body(false_fun), *given)


def switch(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any, operand: Any = _NONE_GIVEN) -> Any:
    """Runs function number `index` of `branches` on the operands, as `jax.lax.switch` does: an index that is out of
    range is taken for the first or the last. Otherwise like `pw.cond`.

        y = pw.switch(number, [on_a, on_b, on_c], state)  # inside a pw.program

    Raises:
        ValueError: there are no branches.
        As `pw.cond`.
    """
    _check_traced("switch", "branches[int(y)](...)")
    given = _operands("switch", operands, operand)
    return _traced(jax.lax.switch, _value(index), [_body(branch) for branch in branches], *given)


def while_loop(cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any) -> Any:
    """Runs `body_fun` on its own result, first on `init_val`, while `cond_fun` of that is true, as `jax.lax.while_loop`
    does.

        state = pw.while_loop(lambda state: state["loss"] > 0.1, step, state)  # inside a pw.program

    Inside a `pw.program`. The body may call compiled functions on any slices. What it carries from round to round keeps
    its type and its layout. Where all calls are on one slice, the loop becomes one computation there.

    Raises:
        UsageError: outside of a program.
        GraphError: the body changes the type or the layout of what it carries.
    """
    _check_traced("while_loop", "while float(y) > 0: ...")
    return _traced(jax.lax.while_loop, _body(cond_fun), _body(body_fun), _values(init_val))


def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, Any], Any],
    init_val: Any,
    *,
    unroll: int | bool | None = None,
) -> Any:
    """Runs `val = body_fun(i, val)` for each `i` from `lower` up to `upper`, as `jax.lax.fori_loop` does; both may be
    scalars on any slice. Otherwise like `pw.while_loop`.

        state = pw.fori_loop(0, 10, lambda k, state: step(state), state)  # inside a pw.program

    Args:
        unroll: rounds that become one, where both bounds are Python integers.

    Raises:
        GraphError: `unroll` with bounds that are known on devices only; and as of `pw.while_loop`.
    """
    _check_traced("fori_loop", "for i in range(int(n)): ...")
    bounds = _value(lower), _value(upper)
    return _traced(jax.lax.fori_loop, *bounds, _body(body_fun), _values(init_val), unroll=unroll)


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """Runs `carry, y = f(carry, x)` for each slice `x` of `xs` along its first dimension, as `jax.lax.scan` does.
    Otherwise like `pw.while_loop`.

        state, losses = pw.scan(step, state, batches)  # inside a pw.program

    Returns:
        The last carry, and all `y` stacked.

    Raises:
        ValueError: arrays of `xs` differ in their first dimension, or from `length`.
        As `pw.while_loop`.
    """
    _check_traced("scan", "a loop over launches")
    found = _traced(jax.lax.scan, _body(f), _values(init), _values(xs), length=length, reverse=reverse, unroll=unroll)
    carry, ys = found
    return carry, ys


def _check_traced(name: str, instead: str) -> None:
    if not tracing.is_inside:
        raise UsageError(
            f"pw.{name} was called outside of a program. Call it from a pw.program, or decide in Python ({instead}), "
            f"which waits for the value; inside a compiled function use jax.lax.{name}"
        )


def _traced(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return function(*args, **options)
    except (TypeError, ValueError) as error:
        if _is_ours(error):
            at = source_info.here()
            raise GraphError(f"{error} (pw.{function.__name__} at {at})" if at else f"{error}") from error
        raise


def _is_ours(error: BaseException) -> bool:
    """Whether JAX itself refused the call, and not something that a body did."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        if traceback.tb_frame.f_code is _CALL:
            return False
        traceback = traceback.tb_next
    return True


def _body(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under a name of its own: JAX remembers what it traced by function, and what a trace of another
    program captured is not there any more. Handles among its results are captured."""
    if not callable(function):
        raise UsageError(f"branches and bodies are functions, not {function!r}")

    @functools.wraps(function)
    def body(*args: Any) -> Any:
        return _values(_call(function, args))

    return body


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


_CALL = _call.__code__


def _operands(name: str, operands: tuple[Any, ...], operand: Any) -> tuple[Any, ...]:
    """The operands of a branch, which may be one by name."""
    if operand is _NONE_GIVEN:
        return tuple(_values(operands))
    if operands:
        raise TypeError(
            f"pw.{name} takes operand= or positional operands, and was given {len(operands)} of these as well"
        )
    return (_values(operand),)


def _values(tree: Any) -> Any:
    return jax.tree.map(_value, tree)


def _value(leaf: Any) -> Any:
    return operand(leaf, "control flow", 0) if isinstance(leaf, Array) else leaf
