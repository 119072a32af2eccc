"""`pw.compiled`: a JAX function pinned to a slice, with shardings known before it runs.

For each combination of argument types a function is traced and exported once (StableHLO, named by its content). Inside
a program a call becomes one node; outside it is a program of one node.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pathways_ray.client import source_info
from pathways_ray.client.codes import jax_settings
from pathways_ray.client.context import current_session, tracing
from pathways_ray.client.export import Exported, export_function, type_of
from pathways_ray.client.methods import Method, deep_copy
from pathways_ray.client.program import Program
from pathways_ray.client.retraces import Traces
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.client.specs import broadcast_specs, check_specs, ranks_of
from pathways_ray.client.tracer import CallSite, call_p, is_outside, operand
from pathways_ray.errors import UsageError
from pathways_ray.ir.types import ArrayType, Spec


class CompiledFunction(Method):
    """The result of `pw.compiled`. Call it with arrays (a program of one node) or inside a `pw.program`."""

    _program_kind = Program

    def __init__(
        self,
        fun: Callable[..., Any],
        slice: VirtualSlice | None,
        in_specs: Any,
        out_specs: Any,
        donate_argnums: tuple[int, ...],
        static_argnums: tuple[int, ...],
        on_retrace: str | None = None,
    ) -> None:
        if not callable(fun):
            raise UsageError(f"pw.compiled decorates a function, not {fun!r}")
        if slice is not None and not isinstance(slice, VirtualSlice):
            raise UsageError(f"slice= takes what pw.virtual_slice returns, not {slice!r}")
        self.fun = fun
        self.slice = slice
        self.in_specs = in_specs
        self.out_specs = out_specs
        self.donate_argnums = donate_argnums
        self.static_argnums = static_argnums
        self.on_retrace = on_retrace
        self._parameters = _positional(fun) if static_argnums else ()
        Traces("", on_retrace)  # checks it now
        self._exported: dict[Any, Exported] = {}
        self._alone: dict[Any, Any] = {}
        if slice is not None:
            self._check_specs(slice)
        functools.update_wrapper(self, fun, updated=())
        self.__name__ = getattr(fun, "__name__", type(fun).__name__)

    def _check_specs(self, where: VirtualSlice) -> None:
        check_specs(self.in_specs, where.axes, f"in_specs of {self.fun}")
        check_specs(self.out_specs, where.axes, f"out_specs of {self.fun}")

    def where(self) -> VirtualSlice:
        """The slice it runs on; the session's default slice when none was given."""
        if self.slice is not None:
            return self.slice
        found = current_session().default_slice()
        self._check_specs(found)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if tracing.session is not None or not is_outside():
            return self._bind(args, kwargs)
        if self.static_argnums:
            args, kwargs = self._at_positions(args, kwargs)
            return self._program(args)._outside(self._dynamic(args), kwargs)
        return (self._alone.get(()) or self._program(args))._outside(args, kwargs)

    def ask(self, *args: Any) -> Any:
        """Calls it for its values alone, as `Program.ask` does."""
        if tracing.session is not None or not is_outside():
            return self._bind(args, {})
        return self._program(args).ask(*(self._dynamic(args) if self.static_argnums else args))

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Adds a call to the program that is being traced on this thread."""
        where = self.where()
        args, kwargs = self._at_positions(args, kwargs)
        static = self.static_values(args)
        leaves, tree = jax.tree.flatten((self._dynamic(args), kwargs))
        values = [operand(leaf, self.__name__, k) for k, leaf in enumerate(leaves)]
        exported = self.specialize(where, static, tree, tuple(type_of(value) for value in values))
        outputs = call_p.bind(*values, site=CallSite(exported, where, source_info.here()))
        return jax.tree.unflatten(exported.output_tree, outputs)

    def __deepcopy__(self, memo: Any) -> Any:
        return deep_copy(self, memo, _exported={}, _alone={})

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the program of one node, as `Program.lower` does."""
        args, kwargs = self._at_positions(args, kwargs)
        return self._program(args).lower(*self._dynamic(args), **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """The `jax.stages.Traced` of a program that calls it."""
        args, kwargs = self._at_positions(args, kwargs)
        return self._program(args).trace(*self._dynamic(args), **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The types of the results, in their tree, with their shardings."""
        args, kwargs = self._at_positions(args, kwargs)
        return self._program(args).eval_shape(*self._dynamic(args), **kwargs)

    def alone(self, args: tuple[Any, ...]) -> tuple[Program, tuple[Any, ...]]:
        """The program that a call outside of programs launches, and the arguments that it takes."""
        return self._program(args), self._dynamic(args)

    def _at_positions(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with static ones at their positions that are given by their names, as `jax.jit` takes them, and
        the defaults of static ones before these."""
        if not kwargs or not self.static_argnums:
            return args, kwargs
        named = [k for k in self.static_argnums if len(args) <= k < len(self._parameters)]
        named = [k for k in named if self._parameters[k].name in kwargs]
        found, rest = [*args], {**kwargs}
        for k in range(len(args), max(named, default=-1) + 1):
            one = self._parameters[k]
            if k not in self.static_argnums or (one.name not in rest and one.default is one.empty):
                names = [self._parameters[k].name for k in named]
                raise UsageError(
                    f"{self.__name__} is given static arguments {names} by name, but {one.name!r}, which comes before, "
                    "is not given by its position"
                )
            found.append(rest.pop(one.name, one.default))
        return tuple(found), rest

    def _has_default(self, k: int) -> bool:
        return 0 <= k < len(self._parameters) and self._parameters[k].default is not inspect.Parameter.empty

    def _dynamic(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self.static_argnums:
            return args
        return tuple(value for k, value in enumerate(args) if k not in self._static_positions(len(args)))

    def _static_positions(self, count: int) -> tuple[int, ...]:
        return _counted_from_start(self.static_argnums, count)

    def _program(self, args: tuple[Any, ...]) -> Any:
        """The program of one node, one for each number of arguments and combination of static ones."""
        static = self.static_values(args) if self.static_argnums else ()
        key = (len(args), *_distinct(static)) if static else ()
        found = self._alone.get(key)
        if found is None:
            positions = [k for k, _ in static]
            values = dict(static)
            count = len(args)

            def alone(*dynamic: Any, **kwargs: Any) -> Any:
                rest = iter(dynamic)
                return self(*[values[k] if k in positions else next(rest) for k in range(count)], **kwargs)

            direct = (lambda *a, **k: self(*a, **k)) if not static else alone
            direct.__name__ = self.__name__
            direct.__wrapped__ = self.fun  # type: ignore[attr-defined]  # for the names of parameters
            found = self._alone[key] = self._program_kind(
                direct, self.__name__, check=False, slice=self.slice, on_retrace=self.on_retrace
            )
        return found

    def static_values(self, args: tuple[Any, ...]) -> tuple[tuple[int, Any], ...]:
        """(position, value) of the static arguments.

        Raises:
            UsageError: one is not hashable, or missing.
        """
        if not self.static_argnums:
            return ()
        found = []
        for k in self._static_positions(len(args)):
            if not 0 <= k < len(args):
                if self._has_default(k):
                    continue
                raise UsageError(f"{self.__name__} has static argument {k}, but was called with {len(args)} arguments")
            try:
                hash(args[k])
            except TypeError:
                raise UsageError(f"static argument {k} of {self.__name__} is not hashable: {args[k]!r}") from None
            found.append((k, args[k]))
        return tuple(found)

    def specialize(
        self, where: VirtualSlice, static: tuple[tuple[int, Any], ...], tree: Any, avals: tuple[Any, ...]
    ) -> Exported:
        """The function exported for flat arguments of the given types; traced once for each combination.

        Args:
            tree: of (dynamic positional arguments, keyword arguments).
            avals: a `jax.ShapeDtypeStruct` for each leaf.
        """
        platforms = where.session.platforms
        # An export depends on the mesh, not on which slice has it.
        types = tuple((a.shape, a.dtype, a.weak_type) for a in avals)
        key = (
            where.shape,
            where.axes,
            _distinct(static),
            tree,
            types,
            platforms,
            where.session.trusted,
            *jax_settings(),
        )
        found = self._exported.get(key)
        if found is None:
            found = self._exported[key] = self._export(where, dict(static), tree, avals, platforms)
        return found

    def _export(
        self, where: VirtualSlice, static: dict[int, Any], tree: Any, avals: tuple[Any, ...], platforms: tuple[str, ...]
    ) -> Exported:
        args, kwargs = jax.tree.unflatten(tree, avals)
        trees: list[Any] = []

        def flat(*leaves: Any) -> list[Any]:
            dynamic, keywords = jax.tree.unflatten(tree, leaves)
            rest = iter(dynamic)
            merged = [static[k] if k in static else next(rest) for k in range(len(dynamic) + len(static))]
            out, out_tree = jax.tree.flatten(self.fun(*merged, **keywords))
            trees.append(out_tree)
            return out

        def output_specs(types: list[ArrayType]) -> list[Spec]:
            like = jax.tree.unflatten(trees[-1], list(range(len(types))))
            ranks = [len(kind.shape) for kind in types]
            return broadcast_specs(self.out_specs, like, where.axes, f"out_specs of {self.__name__}", ranks)

        return export_function(
            self.__name__,
            flat,
            avals,
            self._input_specs(where, args, kwargs, static),
            output_specs,
            where,
            platforms,
            self._donated_leaves(args, static),
            lambda: trees[-1],
        )

    def _input_specs(
        self, where: VirtualSlice, args: tuple[Any, ...], kwargs: dict[str, Any], static: dict[int, Any]
    ) -> list[Spec]:
        """One spec for each leaf. A tuple has an entry for each positional argument; keywords are then replicated."""
        what = f"in_specs of {self.__name__}"
        if isinstance(self.in_specs, tuple | list):
            specs = tuple(self.in_specs)
            if len(specs) == len(args) + len(static):
                specs = tuple(spec for k, spec in enumerate(specs) if k not in static)
            if len(specs) != len(args):
                raise UsageError(f"{what} has {len(self.in_specs)} entries; it was called with {len(args)} arguments")
            rest: Any = None
        else:
            specs, rest = (self.in_specs,) * len(args), self.in_specs
        found: list[Spec] = []
        for spec, value in [*zip(specs, args, strict=True), (rest, kwargs)]:
            found += broadcast_specs(spec, value, where.axes, what, ranks_of(jax.tree.leaves(value)))
        return found

    def _donated_leaves(self, args: tuple[Any, ...], static: dict[int, Any]) -> tuple[int, ...]:
        """Donated positions as leaf numbers; positions count all arguments, static ones included, as in `jax.jit`."""
        count = len(args) + len(static)
        donated = _counted_from_start(self.donate_argnums, count)
        leaves: list[int] = []
        start = 0
        positions = [k for k in range(count) if k not in static]
        for position, value in zip(positions, args, strict=True):
            size = len(jax.tree.leaves(value))
            if position in donated:
                leaves += range(start, start + size)
            start += size
        return tuple(leaves)

    def __repr__(self) -> str:
        return f"pw.compiled({self.__name__}, slice={self.slice})"


def _positional(fun: Any) -> tuple[inspect.Parameter, ...]:
    """The parameters of a function that may be given by position and by name; none where Python does not know them."""
    try:
        found = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(itertools.takewhile(lambda one: one.kind is one.POSITIONAL_OR_KEYWORD, found))


def _positions(value: int | Sequence[int] | None, what: str) -> tuple[int, ...]:
    if value is None:
        return ()
    try:
        found = (value,) if isinstance(value, int) else tuple(value)
    except TypeError:
        found = ("",)  # type: ignore[assignment]
    if not all(isinstance(k, int) for k in found):
        raise UsageError(f"{what} takes argument positions, not {value!r}")
    return found


def _distinct(static: tuple[tuple[int, Any], ...]) -> tuple[Any, ...]:
    """Static arguments as a key that tells 1, 1.0 and True apart."""
    return tuple((position, type(value), value) for position, value in static)


def _counted_from_start(positions: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Negative positions of `count` arguments, as positions from the start."""
    return tuple(k + count if k < 0 else k for k in positions)


def compiled(
    fun: Callable[..., Any] | None = None,
    *,
    slice: VirtualSlice | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    on_retrace: str | None = None,
) -> Any:
    """Makes a JAX function a compiled function: one node of a program, however many devices it runs on.

    Equals `jax.jit(fun, in_shardings=..., out_shardings=...)` over the devices of `slice`: arrays are seen whole.
    Works bare, as a decorator with arguments, and as a call.

        @pw.compiled(slice=s, in_specs=(P(), P("x")), out_specs=P("x"))
        def layer(w, x):
            return jnp.tanh(x @ w)

    Args:
        fun: any traceable function, `jax.jit`-ed or not, with `jax.shard_map` inside or not.
        slice: from `pw.virtual_slice`; left out, all devices of one island on one axis `x`.
        in_specs: `PartitionSpec`s, a pytree prefix of the arguments; one spec stands for all; None is replicated.
        out_specs: the same for the results.
        donate_argnums: arguments whose memory may be reused; their arrays are deleted by the call. What a program
            returns of its arguments and captured arrays is no copy: it is deleted with them.
        static_argnums: arguments that are part of the trace; hashable. They may be given by name where all between are
            static, too, and left to their defaults.
        on_retrace: as in `pw.program`, for calls outside of programs.

    Raises:
        SpecError: a spec names an axis that the slice does not have.
        UsageError: an option of the wrong kind.
    """
    options = {
        "slice": slice,
        "in_specs": in_specs,
        "out_specs": out_specs,
        "donate_argnums": _positions(donate_argnums, "donate_argnums"),
        "static_argnums": _positions(static_argnums, "static_argnums"),
        "on_retrace": on_retrace,
    }
    if fun is None:
        return lambda f: CompiledFunction(f, **options)
    if isinstance(fun, CompiledFunction | Program):
        raise UsageError(
            f"{fun!r} is one node, or several, already; pw.compiled decorates a plain function, which its attribute "
            "'fun' is"
        )
    if inspect.isclass(fun) or not callable(fun):
        raise UsageError(f"pw.compiled decorates a function, not {fun!r}")
    return CompiledFunction(fun, **options)
