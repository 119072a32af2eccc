"""Functions with caches of their own, which are methods as plain ones are, and may be copied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any


class Method:
    """A function that binds as a method, like any other: the instance is argument 0, static or a pytree."""

    __slots__ = ()

    __call__: Callable[..., Any]

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)


def deep_copy(function: Any, memo: Any, **begun: Any) -> Any:
    """A deep copy of a function, with what it was made of. What it keeps of its calls belongs to sessions, and is not
    copied: `begun` is how that begins."""
    made = object.__new__(type(function))
    memo[id(function)] = made
    vars(made).update(begun)
    rest = [(name, value) for name, value in vars(function).items() if name not in begun]
    vars(made).update({name: copy.deepcopy(value, memo) for name, value in rest})
    return made
