"""What the planner refuses, in one tree below `pathways_ray.errors.PathwaysError`.

UsageError
└── PlanningError     the question cannot be asked: the message says what was seen and what would do
    ├── UnknownName   no such model, cluster, software, schedule or setting; the nearest name is given
    ├── BadFigure     a number that is negative, zero, missing or of the wrong kind
    └── Illegal       a plan that does not divide: layers by stages, batch by replicas, …
ResourceError
└── NothingFits       every legal plan needs more memory than there is; by how much, and what would fit
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from pathways_ray.errors import ResourceError, UsageError


class PlanningError(UsageError):
    """The question to the planner cannot be asked as it stands."""


class UnknownName(PlanningError):
    """A name that nothing has."""

    @classmethod
    def of(cls, kind: str, name: str, known: Iterable[str]) -> UnknownName:
        """The error for `name`, with the nearest of the `known` names and all of them."""
        names = sorted(known)
        longer = [known for known in names if name and known.startswith(name.lower())]
        near = longer[:1] or get_close_matches(name.lower(), names, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return cls(f"there is no {kind} {name!r}; {hint}known: {', '.join(names)}")


class BadFigure(PlanningError):
    """A number that cannot be meant."""


class Illegal(PlanningError):
    """A plan whose parts do not divide."""


class NothingFits(ResourceError):
    """No legal plan fits in the memory of the devices."""
