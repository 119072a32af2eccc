"""What training refuses, and what stops it, in one tree below `pathways_ray.errors.PathwaysError`.

PathwaysError
├── UsageError (also ValueError)      the question has to change: the message says what was seen and what would do
│   ├── BadSizes                      parallel sizes that do not divide, or need more devices than there are
│   ├── ConfigError                   a setting that there is not, or a value it cannot have
│   ├── BatchError                    a batch of other arrays or shapes than the step was built for
│   ├── TokenFileError                a token file, a text or a tokenizer that is missing, damaged or of another kind
│   └── CheckpointError               a checkpoint that is damaged, or of another model
└── TrainingStopped (also RuntimeError)
    ├── NotFinite                     a loss or a gradient is NaN or infinite
    └── TooManyRestarts               hosts were lost more often than --max-restarts
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from pathways_ray.errors import PathwaysError, UsageError


class ConfigError(UsageError, ValueError):
    """A configuration of a training that cannot be."""

    @classmethod
    def unknown(cls, kind: str, name: str, known: Iterable[str]) -> ConfigError:
        """The error for a name that nothing has, with the nearest of those there are."""
        names = sorted(known)
        near = get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return cls(f"there is no {kind} {name!r}; {hint}there are {', '.join(names)}")


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
    """Hosts were lost more often than was allowed."""
