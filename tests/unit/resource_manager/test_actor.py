"""The resource manager's calls, and which of them may keep others from being made."""

from __future__ import annotations

from pathways_ray import limits
from pathways_ray.resource_manager.actor import CLIENTS, GROUPS, WAITING, ResourceManager


def test_calls_that_wait_for_others_keep_none_of_these_out() -> None:
    """Each host of a cluster may wait for its island or its scheduler, and ask several times. What ends that are calls
    of the usual group, and of clients."""
    group = {name: getattr(method, "__ray_concurrency_group__", "") for name, method in vars(ResourceManager).items()}
    assert {name for name, found in group.items() if found == WAITING} == {"join", "lookup"}
    assert group["publish"] == group["describe"] == group["controller_serves"] == ""
    assert group["create_slice"] == CLIENTS
    assert GROUPS[WAITING] >= 4 * limits.MAX_HOSTS
