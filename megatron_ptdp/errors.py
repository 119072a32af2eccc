"""Errors of planning and of training, in one tree below `pathways_ray.errors.PathwaysError`.

PathwaysError
├── UsageError                        the question has to change: the message says what was seen and what would do
│   ├── PlanningError                 a question that the planner cannot be asked as it stands
│   │   ├── UnknownName               no such model, cluster, software, schedule or setting; the nearest name is given
│   │   ├── BadFigure                 a number that is negative, zero, missing or of the wrong kind
│   │   └── Illegal                   a plan that does not divide: layers by stages, batch by replicas, …
│   ├── BadSizes (also ValueError)    parallel sizes that do not divide, or need more devices than there are
│   ├── ConfigError (also ValueError) an unknown setting, or a value that it cannot have
│   ├── BatchError (also ValueError)  a batch of other arrays or shapes than the step was built for
│   ├── TokenFileError (also ValueError) a token file, a text or a tokenizer that is missing, damaged or of another kind
│   └── CheckpointError (also ValueError) a checkpoint that is damaged, or of another model
├── ResourceError
│   └── NothingFits                   every legal plan needs more memory than there is; by how much, and what would fit
└── TrainingStopped (also RuntimeError)
    ├── NotFinite                     a loss or a gradient is NaN or infinite
    └── TooManyRestarts               hosts were lost more often than --max-restarts, or again and again at one step
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from pathways_ray.errors import PathwaysError, ResourceError, UsageError

MIN_LIKENESS = 0.4
"""Of two names, as `difflib` has it, for one to be suggested in place of the other."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The suggestion of the nearest of the `known` names, "" where no name is near: the first that begins so, else the
    most alike."""
    names = sorted(known)
    longer = [known for known in names if name and known.startswith(name.lower())]
    near = longer[:1] or get_close_matches(name.lower(), names, n=1, cutoff=MIN_LIKENESS)
    return f"did you mean {near[0]!r}? " if near else ""


class PlanningError(UsageError):
    """The question to the planner cannot be asked as it stands."""


class UnknownName(PlanningError):
    """A name of no model, cluster, software, schedule or setting."""

    @classmethod
    def of(cls, kind: str, name: str, known: Iterable[str]) -> UnknownName:
        """The error for `name`, with the nearest of the `known` names and all of them."""
        names = sorted(known)
        return cls(f"there is no {kind} {name!r}; {did_you_mean(name, names)}known: {', '.join(names)}")


class BadFigure(PlanningError):
    """A number that cannot be meant."""


class Illegal(PlanningError):
    """A plan whose parts do not divide."""


class NothingFits(ResourceError):
    """Every legal plan needs more memory than the devices have."""


class ConfigError(UsageError, ValueError):
    """A configuration of a training with an unknown setting or an invalid value."""

    @classmethod
    def unknown(cls, kind: str, name: str, known: Iterable[str]) -> ConfigError:
        """The error for an unknown name, with the nearest of the known ones and all of them."""
        names = sorted(known)
        return cls(f"there is no {kind} {name!r}; {did_you_mean(name, names)}there are {', '.join(names)}")


class BadSizes(UsageError, ValueError):
    """Parallel sizes that do not fit each other, the model, the schedule or the devices."""


class BatchError(UsageError, ValueError):
    """A batch of other arrays or shapes than the step was built for."""


class TokenFileError(UsageError, ValueError):
    """Tokens, or the text and tokenizer they are made of, that cannot be used."""


class CheckpointError(UsageError, ValueError):
    """A checkpoint that cannot be loaded into this model."""


class TrainingStopped(PathwaysError, RuntimeError):
    """Training cannot go on; checkpoints written before are kept."""


class NotFinite(TrainingStopped):
    """A loss or a gradient is NaN or infinite."""


class TooManyRestarts(TrainingStopped):
    """Hosts were lost more often than was allowed, or again and again at one step."""
