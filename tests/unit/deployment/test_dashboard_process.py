"""The page's process: it is no part of what a terminal interrupts."""

from __future__ import annotations

import os

from pathways_ray.deployment.dashboard_process import DashboardProcess


def test_an_interrupt_from_the_terminal_is_not_for_the_page() -> None:
    page = DashboardProcess("grpc://127.0.0.1:1", "t", "")
    try:
        assert os.getpgid(page.process.pid) == page.process.pid
    finally:
        page.stop()
