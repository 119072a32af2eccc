"""Changes of islands that tests of several files make."""

from __future__ import annotations

import time

from pathways_ray import limits
from pathways_ray.client.api import ClusterSession
from pathways_ray.errors import UsageError


def remove(session: ClusterSession, number: int) -> None:
    """Removes an island, once no session can come back to it: a test before may have killed the controller."""
    deadline = time.monotonic() + limits.RESUME_LIMIT_S + 10.0
    while True:
        try:
            return session.remove_island(number)
        except UsageError as error:
            if "try again" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.2)
