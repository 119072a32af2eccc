"""An island of several hosts, one of which takes calls for all before they are sent, on the real runtime."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_host_that_leads_takes_calls_for_all(python: Any) -> None:
    """
    1. A client waits for each value until both hosts begin its calls before they are sent. Values have the bits that
       they have in a stream, with collectives and without, of uploads and of what calls carry.
    2. Another client takes turns with it.
    3. Schedulers get SIGKILL meanwhile. A chain has its values, or is lost with a typed error; arrays stay, both hosts
       live on, and calls begin early again. Gangs keep one order.
    4. The host that leads gets SIGKILL, then the other one. The island restarts, and calls begin early again.
    """
    out = python.run("leading", timeout=280)
    print(out)
    assert out.rstrip().endswith("nothing was wrong")
