"""Programs that end hosts: who is blamed, who is not, and who lifts a refusal."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from tests.integration.conftest import ROOT, Scripts

FLAWED = os.pathsep.join([str(ROOT / "tests" / "integration" / "flawed"), str(ROOT)])
"""A path from which the processes of a cluster import `sitecustomize`, which breaks their compilers."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["compiling", pytest.param("endless", marks=pytest.mark.long)])
def test_programs_that_end_hosts_are_refused_and_those_beside_them_are_not(
    python: Scripts, tmp_path: Path, how: str
) -> None:
    """A host dies in a thread that compiles, or does not come to the end of a compilation; nor of a launch."""
    entries = [{"name": n, "token_sha256": hashlib.sha256(f"{n}'s".encode()).hexdigest()} for n in ("alice", "bob")]
    tenants = tmp_path / "tenants.json"
    tenants.write_text(json.dumps({"tenants": entries}))
    assert "only bob's" in python.run("blame", str(tenants), how, timeout=280, PYTHONPATH=FLAWED)
