"""Finds by name what an operator may bring along: a policy of his own."""

from __future__ import annotations

import importlib

from pathways_ray.errors import UsageError
from pathways_ray.scheduler.policies import POLICIES, Policy, check_policy


def policy_named(name: str) -> Policy:
    """A policy of ours, or `package.module:function`, which must be importable where controller and schedulers run.

    Raises:
        UsageError: there is no such policy.
    """
    check_policy(name)
    if name in POLICIES:
        return POLICIES[name]
    module, _, function = name.partition(":")
    try:
        found: Policy = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"the policy {name!r} cannot be found: {error}") from error
    return found
