"""Mutable arrays of JAX (`jax.new_ref`), as far as they have no public name. Only the client loads this."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import jax

_without_own: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""For each traced function the one without mutable arrays: by the identity of its operations those that were exported
are known (`Operation.exported`), so that it is made once."""


def uses_outer(effects: Iterable[Any]) -> bool:
    """Whether a function with such effects reads or writes a mutable array that it has not made."""
    from jax._src.state.types import RefEffect

    return any(isinstance(effect, RefEffect) for effect in effects)


def without_own(closed: Any) -> Any:
    """A traced function in which the mutable arrays that it makes for itself are values like others; its constants come
    as before. JAX does this when it compiles: here, operations are looked at before that."""
    from jax._src import core
    from jax._src.interpreters import partial_eval
    from jax._src.state.discharge import discharge_state

    if core.internal_mutable_array_effect not in closed.effects or uses_outer(closed.effects):
        return closed
    if (made := _without_own.get(closed)) is not None:
        return made
    found = discharge_state(core.ClosedJaxpr(partial_eval.convert_constvars_jaxpr(closed.jaxpr), ()))
    count = len(closed.consts)
    jaxpr = found.jaxpr.replace(
        constvars=[*found.jaxpr.invars[:count], *found.jaxpr.constvars],
        invars=found.jaxpr.invars[count:],
        debug_info=closed.jaxpr.debug_info,
    )
    return _without_own.setdefault(closed, core.ClosedJaxpr(jaxpr, [*closed.consts, *found.consts]))


def leave(kind: type[jax.Array], refuse: Callable[[Any], NoReturn]) -> None:
    """Leaves to `refuse` mutable arrays that would be made of arrays of a class, outside of traces."""
    from jax._src import core

    by_jax = core.ref_p.impl

    def made(value: Any, **params: Any) -> Any:
        return refuse(value) if type(value) is kind else by_jax(value, **params)

    core.ref_p.def_impl(made)
