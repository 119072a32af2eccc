"""The names of leaves in trees of arguments, for errors about one of them: `state['params']['w']`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from pathways_ray.errors import PathwaysError


def path(tree: Any, number: int) -> str:
    """The place of leaf `number` in a tree, as one writes it: `['params'].w[0]`; "" if the tree is the leaf."""
    return keystr(tree_flatten_with_path(tree)[0][number][0])


def argument(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> str:
    """Leaf `number` of the arguments of a call, by the name of its parameter: `argument batch['x'] of step`."""
    place = tree_flatten_with_path((args, kwargs))[0][number][0]
    which = place[1]
    if isinstance(which, jax.tree_util.SequenceKey):
        name = _parameter(fun, which.idx)
    else:
        name = str(getattr(which, "key", which))
    return f"argument {name}{keystr(place[2:])}"


def _parameter(fun: Callable[..., Any], position: int) -> str:
    """The name of a positional parameter; its number, where functions do not say or take any."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return str(position)
    if position < len(parameters) and parameters[position].kind not in (
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.KEYWORD_ONLY,
    ):
        return parameters[position].name
    return str(position)


def named(error: PathwaysError, what: str) -> PathwaysError:
    """The same error with the name of the leaf that it is about in front."""
    found = type(error)(f"{what}: {error}")
    found.failure = error.failure
    for note in getattr(error, "__notes__", ()):
        found.add_note(note)
    return found
