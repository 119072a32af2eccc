"""Policies by name: those of this project, and those that an operator brings along."""

from __future__ import annotations

import importlib

from pathways_ray.errors import UsageError
from pathways_ray.scheduler.policies import POLICIES, Candidate, Policy, Usage, check_policy


def policy_named(name: str) -> Policy:
    """A policy of `POLICIES`, or `package.module:function`, importable where controller and schedulers run.

    Raises:
        UsageError: there is no such policy, or it does not rank candidates.
    """
    check_policy(name)
    if name in POLICIES:
        return POLICIES[name]
    module, _, function = name.partition(":")
    try:
        found: Policy = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"the policy {name!r} cannot be found: {error}") from error
    try:
        rank = found(Candidate(Usage("nobody"), arrival=1, since=0.0), 1.0)
    except Exception as error:
        raise UsageError(f"the policy {name!r} does not rank a candidate: {type(error).__name__}: {error}") from error
    if not isinstance(rank, tuple) or not all(isinstance(part, int | float) for part in rank):
        raise UsageError(f"the policy {name!r} gives {rank!r} for a rank, which is a tuple of numbers")
    return found
