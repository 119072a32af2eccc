"""An operation: what JAX does to arrays in one step, as a node that is not a compiled function of the user's.

It comes from an equation of a traced program, or from what JAX is asked for outside of one (`x + 1`, `jax.jit(f)(x)`).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.sharding import NamedSharding, PartitionSpec

from pathways_ray.client import prng, propagation, puts, source_info
from pathways_ray.client.argument_types import keeping_width
from pathways_ray.client.array import Array
from pathways_ray.client.export import Exported
from pathways_ray.client.jaxprs import equations_of, inner_equations, used_equations
from pathways_ray.client.slices import VirtualSlice, slice_of
from pathways_ray.client.specs import spec_from_user, warn_of_memory
from pathways_ray.errors import SpecError, UsageError
from pathways_ray.ir.regions import shard_shape
from pathways_ray.ir.types import Spec
from pathways_ray.jax_types import array_type

_SMALL_BYTES = 1 << 10
"""Bytes of constants that are computed here: as many as a message has room for anyhow."""


class PinnedName(str):
    """The name of a function that runs on a slice. JAX hands it on, as the object that it is, to all that it makes of a
    call: so the parts of a derivative know where they run."""

    __slots__ = ("_slice",)

    def __new__(cls, name: str, where: VirtualSlice | None) -> PinnedName:
        made = super().__new__(cls, name)
        made._slice = weakref.ref(where) if where is not None else None
        return made

    _slice: weakref.ref[VirtualSlice] | None

    @property
    def slice(self) -> VirtualSlice | None:
        """The slice; None where the arguments decide."""
        return self._slice() if self._slice is not None else None


@dataclass(frozen=True, eq=False)
class Operation:
    """A jaxpr with a name.

    `slice` is the one that it is pinned to, or None. `inputs` and `outputs` have a spec where one was asked for, else
    None. `donated` are the arguments that may be taken. `captured` are arrays of slices that the function used without
    taking them: the first arguments of the jaxpr. `equation` is what it comes from in a traced program.
    """

    name: str
    closed: jex_core.ClosedJaxpr
    where: str = ""
    slice: VirtualSlice | None = None
    inputs: tuple[Spec | None, ...] = ()
    outputs: tuple[Spec | None, ...] = ()
    donated: tuple[int, ...] = ()
    captured: tuple[Array, ...] = ()
    equation: Any = None

    @classmethod
    def of_equation(cls, equation: Any, atoms: Sequence[Any], debug_info: Any) -> Operation:
        """The operation of an equation of a program; `atoms` are its arguments, each once."""
        where = source_info.of_equation(equation)
        jaxpr = jex_core.Jaxpr([], list(atoms), equation.outvars, [equation], equation.effects, debug_info)
        name = str(equation.params.get("name", equation.primitive.name))
        pinned = _one_slice(name, map(puts.mapped_over, (equation, *inner_equations(equation))))
        return cls(name, jex_core.ClosedJaxpr(jaxpr, []), where, pinned, equation=equation)

    @classmethod
    def of_jit(cls, closed: Any, params: Any, where: str, equation: Any = None) -> Operation:
        """The operation of a call of a function that is `jax.jit`-ed, by the parameters of that call."""
        name, given, made = params["name"], params["in_shardings"], params["out_shardings"]
        pinned = _one_slice(name, (*slices_of(params), *map(puts.mapped_over, equations_of(closed.jaxpr))))
        captured = tuple(constant for constant in closed.consts if type(constant) is Array)
        first = len(captured)
        return cls(
            name=str(name),
            closed=_hoisted(closed, captured),
            where=where,
            slice=pinned,
            inputs=(*(None for _ in captured), *_specs(name, "in_shardings", given, closed.in_avals, pinned)),
            outputs=tuple(_specs(name, "out_shardings", made, closed.out_avals, pinned)),
            donated=tuple(first + k for k, is_given in enumerate(params["donated_invars"]) if is_given),
            captured=captured,
            equation=equation,
        )

    @property
    def own_slice(self) -> VirtualSlice | None:
        """The slice where it runs if none of its arguments lies on one: that which it is pinned to, else the only one
        on which it puts values. None leaves it to the program."""
        named = {where for one in equations_of(self.closed.jaxpr) for where in puts.named(one)}
        return self.slice if self.slice is not None or len(named) != 1 else named.pop()

    @property
    def is_small(self) -> bool:
        """Whether an operation without arguments makes so little that its value may be uploaded with the program:
        where it lies is then what its consumer says."""
        data = [prng.data_type(aval) for aval in self.closed.out_avals if not prng.is_zeros(aval)]
        return not self.closed.effects and sum(one.size * one.dtype.itemsize for one in data) <= _SMALL_BYTES

    def value(self) -> list[Any]:
        """The results of an operation without arguments, computed in this process."""
        made = (variable.aval for equation in equations_of(self.closed.jaxpr) for variable in equation.outvars)
        with keeping_width(made):
            return list(jex_core.jaxpr_as_fun(self.closed)())

    def exported(
        self,
        before: dict[Any, Exported],
        export: Callable[..., Exported],
        where: VirtualSlice,
        inputs: Sequence[Spec],
        platforms: tuple[str, ...],
    ) -> Exported:
        """The operation as a function, exported once in a trace for each layout of its arguments, wherever they lie.

        Args:
            before: what was exported of the trace, which holds its equations: so their identity stands for them.
        """
        key = (id(self.equation), tuple(inputs), where.shape, where.axes)
        found = before.get(key)
        if found is not None:
            puts.check_stays(self.name, self.closed.jaxpr, where)  # it was exported for another slice perhaps
        else:
            found = before[key] = self.export(export, where, inputs, platforms).without_function()
        return found

    def export(
        self, export: Callable[..., Exported], where: VirtualSlice, inputs: Sequence[Spec], platforms: tuple[str, ...]
    ) -> Exported:
        """The operation as a function of arrays that lie as `inputs` say. Its results lie as asked for, else as JAX has
        them lie for such arguments.

        Args:
            export: `export_function`, or what stands for it.
        """
        avals = [prng.logical(aval) for aval in self.closed.in_avals]
        found = propagation.output_specs(self.closed, inputs, where.type)
        asked = self.outputs or (None,) * len(found)
        outputs = [spec if spec is not None else other for spec, other in zip(asked, found, strict=True)]
        run, taken = jex_core.jaxpr_as_fun(self.closed), self._taken(inputs, outputs, where)
        with keeping_width(self.closed.in_avals):
            return export(self.name, run, avals, inputs, lambda _: outputs, where, platforms, taken, known=self.closed)

    def _taken(self, inputs: Sequence[Spec], outputs: Sequence[Spec], where: VirtualSlice) -> tuple[int, ...]:
        """The donated arguments whose memory a call takes. As in JAX, each is used, and there is a result of its type
        and layout, which is for one of them only."""
        if not self.donated:
            return ()
        jaxpr = self.closed.jaxpr
        _, used = used_equations(jaxpr)

        def kind(aval: Any, spec: Spec) -> Any:
            array = array_type(prng.data_type(aval))
            return array, shard_shape(array, spec, where.type)

        room = Counter(map(kind, self.closed.out_avals, outputs))
        taken: list[int] = []
        for k in self.donated:
            one = kind(self.closed.in_avals[k], inputs[k])
            if jaxpr.invars[k] in used and room[one] > 0:
                room[one] -= 1
                taken.append(k)
        return tuple(taken)


def is_pinned(params: Any) -> bool:
    """Whether a call of a `jax.jit`-ed function is to run on a slice, by its name or its shardings."""
    return isinstance(params["name"], PinnedName) or any(
        isinstance(sharding, NamedSharding) and slice_of(sharding.mesh) is not None
        for sharding in (*params["in_shardings"], *params["out_shardings"])
    )


def slices_of(params: Any) -> list[VirtualSlice]:
    """The slices that the name and the shardings of a call of a jitted function say."""
    shardings = (*params["in_shardings"], *params["out_shardings"])
    found = [params["name"].slice if isinstance(params["name"], PinnedName) else None]
    found += [slice_of(sharding.mesh) for sharding in shardings if isinstance(sharding, NamedSharding)]
    return [where for where in found if where is not None]


def _one_slice(name: str, slices: Iterable[VirtualSlice | None]) -> VirtualSlice | None:
    """The slice that a function says it runs on, however often. Raises `UsageError` where it says several."""
    found = list(dict.fromkeys(where for where in slices if where is not None))
    if len(found) > 1:
        raise UsageError(f"{name} has shardings on {found[0]} and on {found[1]}; a function runs on one slice")
    return found[0] if found else None


def _specs(
    name: str, what: str, shardings: Sequence[Any], avals: Sequence[Any], where: VirtualSlice | None
) -> list[Spec | None]:
    found: list[Spec | None] = []
    for number, (sharding, aval) in enumerate(zip(shardings, avals, strict=True)):
        if not isinstance(sharding, jax.sharding.Sharding):
            found.append(None)
            continue
        mesh: Any = getattr(sharding, "mesh", None)
        if where is None or not isinstance(sharding, NamedSharding) or tuple(mesh.axis_names) != where.axes:
            raise UsageError(
                f"{what} of {name} are over devices of this process, and it runs on a slice; write "
                "NamedSharding(slice.mesh, spec), and in place of jax.pmap jax.shard_map(f, mesh=slice.mesh, ...)"
            )
        warn_of_memory(sharding)
        try:
            # JAX leaves open how a dimension lies that it added for jax.vmap.
            spec = PartitionSpec(*(None if one is PartitionSpec.UNCONSTRAINED else one for one in sharding.spec))
            found.append(spec_from_user(spec, where.axes, len(aval.shape)))
        except SpecError as error:
            raise SpecError(f"{what} of {name}, leaf {number}: {error}") from None
    return found


def _hoisted(closed: Any, captured: Sequence[Array]) -> Any:
    """A jaxpr whose constants that are arrays of slices are its first arguments."""
    if not captured:
        return closed

    def fun(*leaves: Any) -> Any:
        first = iter(leaves[: len(captured)])
        consts = [next(first) if type(constant) is Array else constant for constant in closed.consts]
        return jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(closed.jaxpr, consts))(*leaves[len(captured) :])

    avals = [*(array.aval for array in captured), *closed.in_avals]
    return jax.make_jaxpr(fun)(*map(prng.logical, avals))
