"""Tables that hold what others have, and that several threads use."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

T = TypeVar("T")


def living(table: weakref.WeakValueDictionary[Any, T]) -> list[T]:
    """Those that are left of a table, to which other threads may add meanwhile: no `WeakSet` can be looked through
    then."""
    return [one for found in table.valuerefs() if (one := found()) is not None]
