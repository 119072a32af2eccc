"""`pw.recording` without a cluster of one's own; tests/integration/test_training.py records a step of a real one."""

from __future__ import annotations

import pytest

import pathways_ray as pw
from pathways_ray.errors import UsageError


def test_only_the_process_that_started_the_hosts_can_record_them() -> None:
    with pytest.raises(UsageError, match=r"only by the process that started them: use pw\.init"), pw.recording():
        pass
