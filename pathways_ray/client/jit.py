"""`pw.jit`: `jax.jit`, by its names and rules, on a slice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from pathways_ray.client.operation import PinnedName
from pathways_ray.client.placement import slice_of_sharding
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.errors import UsageError


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    slice: VirtualSlice | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
) -> Any:
    """Makes a function one that runs on a slice, as `jax.jit` makes it one that runs on devices of this process.

        step = pw.jit(step, in_shardings=NamedSharding(s.mesh, P("x")), donate_argnames="state")

    It is called alone, from a `pw.program`, where each call is a node, and under `jax.grad`, `jax.vmap` and the like.
    What `jax.jit` decides from its arguments is decided so here: arguments that lie on the slice are taken as they lie
    where no sharding is given for them, and results lie as JAX propagates shardings. It returns what `jax.jit` does,
    with `trace`, `lower` and `eval_shape`.

    Args:
        slice: where it runs. Left out, the slice of the shardings; without any, that of the first argument that lies on
            one, else the default slice.
        in_shardings: `NamedSharding(slice.mesh, spec)`, or with `slice=` a `PartitionSpec`; a pytree prefix of the
            arguments; None leaves it open.
        out_shardings: the same for the results.
        static_argnums: and the other three: as in `jax.jit`.

    Raises:
        UsageError: shardings on several slices, or on none.
        SpecError: when called: a sharding does not fit an array.
    """
    if fun is None:
        options = {k: v for k, v in locals().items() if k != "fun"}
        return lambda f: jit(f, **options)
    if not callable(fun):
        raise UsageError(f"pw.jit decorates a function, not {fun!r}")
    if slice is not None and not isinstance(slice, VirtualSlice):
        raise UsageError(f"slice= takes what pw.virtual_slice returns, not {slice!r}")
    inputs, outputs = (_shardings(one, slice) for one in (in_shardings, out_shardings))
    found = {slice_of_sharding(one) for one in jax.tree.leaves((inputs, outputs))} | ({slice} if slice else set())
    if len(found) > 1:
        named = " and ".join(map(str, sorted(found, key=lambda where: where.id)))
        raise UsageError(f"a function runs on one slice; its shardings are on {named}")
    run = _named(fun, next(iter(found), None))
    given = {"in_shardings": inputs, "out_shardings": outputs}
    return jax.jit(
        run,
        **{name: value for name, value in given.items() if value is not None},
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
    )


def _named(fun: Callable[..., Any], where: VirtualSlice | None) -> Callable[..., Any]:
    """The function under a name that knows its slice."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs)

    functools.update_wrapper(run, fun, updated=())  # JAX reads the names of the parameters
    run.__name__ = PinnedName(getattr(fun, "__name__", type(fun).__name__), where)
    run.slice = where  # type: ignore[attr-defined]  # the name has it weakly: JAX keeps names for longer
    return run


def _shardings(tree: Any, where: VirtualSlice | None) -> Any:
    """Shardings as JAX takes them, where specs may stand for those on the slice."""

    def leaf(one: Any) -> Any:
        if one is None or isinstance(one, NamedSharding):
            return one
        if not isinstance(one, PartitionSpec):
            raise UsageError(f"shardings of pw.jit are NamedSharding(slice.mesh, spec) or a PartitionSpec, not {one!r}")
        if where is None:
            raise UsageError(f"{one} says no slice; write NamedSharding(slice.mesh, spec), or slice= as well")
        return NamedSharding(where.mesh, one)

    return jax.tree.map(leaf, tree, is_leaf=lambda one: one is None or isinstance(one, PartitionSpec))
