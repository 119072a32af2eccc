"""Debug calls of functions that run on slices: `jax.debug.print`, `jax.debug.callback`, the checks of `jax_debug_nans`.

Nothing of the user's runs on hosts. A function with such calls is rewritten: what a call takes leaves the function as
further results, which come to the client like any other array, and there the call is made (`debug_calls`). What a loop
or a branch does in each round or not at all has leading axes, and a count beside it that says what was done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.sharding import PartitionSpec

from pathways_ray.client import prng, source_info
from pathways_ray.client.batched_loops import with_scalar_test
from pathways_ray.client.jaxprs import INLINED, body_of, equations_of, inner_equations
from pathways_ray.client.routed_rows import RowCheck
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.errors import TraceError
from pathways_ray.jax_hooks import setting

CALLS = ("debug_print", "debug_callback")
"""The primitives of debug calls. Other callbacks return values, which a function would have to wait for."""

ROUNDS = 32
"""The last rounds of a `while_loop` whose debug calls are made: it has no bound, and its results have."""

NANS, INFS = setting("jax_debug_nans"), setting("jax_debug_infs")


@dataclass(frozen=True, eq=False)
class DebugCall:
    """A debug call in a function, without its values.

    `kinds` are the types of its values as the call takes them. `devices` is the leading axis that counts the devices of
    a `jax.shard_map`, or -1.
    """

    primitive: Any
    params: Mapping[str, Any]
    kinds: tuple[Any, ...]
    where: str
    devices: int = -1

    @property
    def count(self) -> int:
        """The number of results that it adds."""
        return len(self.kinds) + 1

    def make(self, results: Sequence[np.ndarray[Any, Any]], devices: Sequence[str]) -> None:
        """Makes the call with what the function returned for it, once for each round and device that it was made in.

        Args:
            devices: the names of the slice's devices.
        """
        *values, done = results
        for place in np.ndindex(done.shape):
            if not done[place]:
                continue
            params = dict(self.params)
            if "fmt" in params:
                before = f"({done[place] - 1} earlier rounds are not shown)\n" if done[place] > 1 else ""
                at = place[self.devices] if self.devices >= 0 else -1
                device = f"[device {devices[at]}] " if 0 <= at < len(devices) else ""
                params["fmt"] = before + device + params["fmt"]
            given = [prng.from_data(value[place], kind) for value, kind in zip(values, self.kinds, strict=True)]
            self.primitive.impl(*given, **params)


@dataclass(frozen=True, eq=False)
class NanCheck:
    """The check of a function's operations under `jax_debug_nans` or `jax_debug_infs`: one flag for each of `lines`."""

    lines: tuple[str, ...]
    what: str
    count: int = 1

    def check(self, results: Sequence[np.ndarray[Any, Any]], name: str, where: str) -> None:
        """Raises `FloatingPointError`, with the first operation that made such a value. `name` is that of the node,
        `where` the user's line."""
        (flags,) = results
        first = next((line for line, found in zip(self.lines, flags, strict=True) if found), "")
        if first:
            called = f", called at {where}" if where else ""
            raise FloatingPointError(f"invalid value ({self.what}) made by {first} in {name}{called}")


Report = DebugCall | NanCheck | RowCheck
"""What a function adds to its results."""


@dataclass(frozen=True, eq=False)
class Reported:
    """The results that a node adds for debugging, and which of the program's results that is.

    `name`, `slice` and `where` are the node's.
    """

    report: Report
    name: str
    slice: VirtualSlice
    where: str
    results: tuple[int, ...] = ()


def checks_asked() -> str:
    """The values that JAX is set to look for: "nan", "inf", or both; "" for neither."""
    if NANS.value:  # without a list: each call looks here
        return "nan or inf" if INFS.value else "nan"
    return "inf" if INFS.value else ""


def reports(closed: Any) -> bool:
    """Whether a traced function has to be rewritten."""
    return bool(checks_asked()) or any(one.primitive.name in CALLS for one in equations_of(closed.jaxpr))


def has_such(value: Any, what: str) -> jax.Array:
    """Whether an array has a value that is looked for (`checks_asked`)."""
    bad = jnp.isnan(value) if "nan" in what else jnp.zeros(value.shape, bool)
    bad |= jnp.isinf(value) if "inf" in what else False
    return bad.any()


def is_debugging(effects: Any) -> bool:
    """Whether a function has no other effects than those of debug calls."""
    return all(str(effect) in ("Debug", "OrderedDebug") for effect in effects)


def reporting(closed: Any, made: list[Report]) -> Callable[..., tuple[Any, ...]]:
    """A traced function with what its debug calls take as further results. Tracing it fills `made`.

    Raises:
        TraceError: when traced: a debug call where its values cannot leave.
    """

    def run(*arguments: Any) -> tuple[Any, ...]:
        asked = checks_asked()
        rewriting = _Rewriting(_Checks(asked) if asked else None)
        results, carried = rewriting.run(closed.jaxpr, closed.consts, arguments)
        made[:] = [one.call for one in carried]
        for one in carried:
            results += [*one.values, one.done]
        if rewriting.checks is not None and rewriting.checks.lines:
            made.append(NanCheck(tuple(rewriting.checks.lines), asked))
            results.append(jnp.stack(rewriting.checks.flags))
        return tuple(results)

    return run


@dataclass
class _Carried:
    """A debug call with its values; `done` is how often it was made, for each place of the leading axes: above 1 where
    earlier rounds are left out."""

    call: DebugCall
    values: list[Any]
    done: Any


class _Checks:
    """Flags of the operations of a function that made a value that is looked for."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.flags: list[Any] = []
        self.lines: list[str] = []

    def add(self, equation: Any, values: Sequence[Any]) -> None:
        """Notes an operation."""
        for value in values:
            if jnp.issubdtype(value.dtype, jnp.inexact):
                self.flags.append(has_such(value, self.what))
                line = source_info.of_equation(equation)
                self.lines.append(f"{equation.primitive.name} ({line})" if line else equation.primitive.name)


class _Rewriting:
    """One evaluation of a jaxpr that gathers its debug calls. `checks` look at operations outside of loops, branches
    and `jax.shard_map`, which count as one operation."""

    def __init__(self, checks: _Checks | None) -> None:
        self.checks = checks

    def run(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> tuple[list[Any], list[_Carried]]:
        known = dict(zip(jaxpr.constvars, consts, strict=True))
        known.update(zip(jaxpr.invars, arguments, strict=True))
        carried: list[_Carried] = []

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, jex_core.Literal) else known[atom]

        for equation in jaxpr.eqns:
            with jax.threefry_partitionable(equation.ctx.threefry_partitionable):
                made, found = self._equation(equation, [read(atom) for atom in equation.invars])
            carried += found
            known.update(zip(equation.outvars, made, strict=True))
        return [read(atom) for atom in jaxpr.outvars], carried

    def _closed(self, closed: Any, arguments: Sequence[Any]) -> tuple[list[Any], list[_Carried]]:
        return self.run(getattr(closed, "jaxpr", closed), getattr(closed, "consts", ()), arguments)

    def _equation(self, equation: Any, values: list[Any]) -> tuple[list[Any], list[_Carried]]:
        name = equation.primitive.name
        if name in CALLS:
            types: list[Any] = [jax.typeof(value) for value in values]
            kinds = tuple(map(prng.logical, types))
            call = DebugCall(equation.primitive, equation.params, kinds, source_info.of_equation(equation))
            return [], [_Carried(call, [prng.to_data(value) for value in values], jnp.int32(1))]
        calls = any(one.primitive.name in CALLS for one in inner_equations(equation))
        if name in INLINED and (calls or self.checks is not None):
            return self._closed(body_of(equation), values)
        if not calls:
            made = equation.primitive.bind(*values, **equation.primitive.get_bind_params(equation.params))
            made = list(made) if equation.primitive.multiple_results else [made]
            found: list[_Carried] = []
        elif name in _INNER:
            made, found = _INNER[name](_Rewriting(None), equation, values)
        else:
            raise TraceError(f"a debug call inside {name} ({source_info.of_equation(equation)}) cannot leave it")
        if self.checks is not None:
            self.checks.add(equation, made)
        return made, found

    # --- what holds bodies --------------------------------------------------------------------------------------------

    def _scan(self, equation: Any, values: list[Any]) -> tuple[list[Any], list[_Carried]]:
        params = equation.params
        shared, count = params["num_consts"], params["num_carry"]
        calls: list[DebugCall] = []

        def step(carry: Any, row: Any) -> Any:
            made, found = self._closed(params["jaxpr"], [*values[:shared], *carry, *row])
            return tuple(made[:count]), (tuple(made[count:]), _arrays(found, calls))

        first, rows = tuple(values[shared : shared + count]), tuple(values[shared + count :])
        last, (stacked, arrays) = jax.lax.scan(step, first, rows, params["length"], params["reverse"], params["unroll"])
        if params["reverse"]:
            arrays = jax.tree.map(lambda array: array[::-1], arrays)
        return [*last, *stacked], _carried(calls, arrays, outer=True)

    def _cond(self, equation: Any, values: list[Any]) -> tuple[list[Any], list[_Carried]]:
        branches = equation.params["branches"]
        calls: list[list[DebugCall]] = [[] for _ in branches]
        kinds = [
            jax.eval_shape(lambda *given, k=k: _arrays(self._closed(branches[k], given)[1], calls[k]), *values[1:])
            for k in range(len(branches))
        ]

        def branch(k: int, *given: Any) -> Any:
            made, found = self._closed(branches[k], given)
            nothing = jax.tree.map(lambda kind: jnp.zeros(kind.shape, kind.dtype), kinds)
            return tuple(made), [_arrays(found, []) if other == k else nothing[other] for other in range(len(branches))]

        functions = [lambda *given, k=k: branch(k, *given) for k in range(len(branches))]
        made, arrays = jax.lax.switch(values[0], functions, *values[1:])
        return list(made), [one for names, own in zip(calls, arrays, strict=True) for one in _carried(names, own)]

    def _while(self, equation: Any, values: list[Any]) -> tuple[list[Any], list[_Carried]]:
        equation, values = with_scalar_test(equation, values)
        params = equation.params
        tests, shared = params["cond_nconsts"], params["body_nconsts"]
        known, constants, first = values[:tests], values[tests : tests + shared], values[tests + shared :]
        if any(one.primitive.name in CALLS for one in equations_of(params["cond_jaxpr"].jaxpr)):
            at = source_info.of_equation(equation)
            raise TraceError(
                f"a debug call in the condition of a while_loop ({at}) is made nowhere; put it in the body"
            )
        calls: list[DebugCall] = []
        kinds = jax.eval_shape(
            lambda *given: _arrays(self._closed(params["body_jaxpr"], given)[1], calls), *constants, *first
        )
        kept = jax.tree.map(lambda kind: jnp.zeros((ROUNDS, *kind.shape), kind.dtype), kinds)

        def body(state: Any) -> Any:
            carry, count, kept = state
            made, found = self._closed(params["body_jaxpr"], [*constants, *carry])
            now = jax.tree.map(lambda all, one: all.at[count % ROUNDS].set(one), kept, _arrays(found, []))
            return tuple(made), count + 1, now

        def test(state: Any) -> Any:
            return self._closed(params["cond_jaxpr"], [*known, *state[0]])[0][0]

        last, count, kept = jax.lax.while_loop(test, body, (tuple(first), jnp.int32(0), kept))
        before = jnp.maximum(count - ROUNDS, 0)  # rounds that are left out
        kept = jax.tree.map(lambda all: jnp.roll(all, -before % ROUNDS, 0), kept)
        found = _carried(calls, kept, outer=True)
        for one in found:
            one.done = one.done.at[0].add(jnp.where(one.done[0] > 0, before, 0))
        return list(last), found

    def _shard_map(self, equation: Any, values: list[Any]) -> tuple[list[Any], list[_Carried]]:
        params = equation.params
        axes = tuple(axis for axis in params["mesh"].axis_names if axis in params["newly_manual_axes"])
        calls: list[DebugCall] = []

        def body(*given: Any) -> Any:
            made, found = self._closed(params["jaxpr"], given)
            return tuple(made), jax.tree.map(lambda array: array[None], _arrays(found, calls))

        made, arrays = jax.shard_map(
            body,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=(tuple(params["out_specs"]), PartitionSpec(axes)),
            axis_names=set(axes),
            check_vma=params["check_vma"],
        )(*values)
        whole = len(axes) == len(params["mesh"].axis_names)
        return list(made), [
            replace(one, call=replace(one.call, devices=0 if whole else -1))
            for one in _carried(calls, arrays, outer=True)
        ]


def _arrays(carried: Sequence[_Carried], calls: list[DebugCall]) -> Any:
    """The arrays of debug calls, as a body of JAX returns them; the rest goes into `calls`."""
    calls[:] = [one.call for one in carried]
    return [(one.values, one.done) for one in carried]


def _carried(calls: Sequence[DebugCall], arrays: Any, outer: bool = False) -> list[_Carried]:
    """The debug calls of a body with the arrays that came out of it; `outer`: with a leading axis more."""
    return [
        _Carried(replace(call, devices=call.devices + 1) if outer and call.devices >= 0 else call, list(values), done)
        for call, (values, done) in zip(calls, arrays, strict=True)
    ]


_INNER: Mapping[str, Callable[[_Rewriting, Any, list[Any]], tuple[list[Any], list[_Carried]]]] = {
    "cond": _Rewriting._cond,
    "scan": _Rewriting._scan,
    "shard_map": _Rewriting._shard_map,
    "while": _Rewriting._while,
}
