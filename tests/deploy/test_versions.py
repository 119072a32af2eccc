"""Versions that several files name: those of `deploy/` are those that tests have and pages ask for."""

from __future__ import annotations

import re
import tomllib
from itertools import chain
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKED = [Requirement(line) for line in (ROOT / "requirements.lock").read_text().splitlines() if re.match(r"\w", line)]
"""What `make` and the image install; of some a version for each Python."""


def test_what_kuberay_is_told_of_ray_is_what_the_image_has() -> None:
    """By its version KubeRay knows what Ray can do."""
    (cluster,) = yaml.safe_load_all((DEPLOY / "kuberay" / "raycluster.yaml").read_text())
    assert [str(one.specifier) for one in LOCKED if one.name == "ray"] == [f"=={cluster['spec']['rayVersion']}"]


def test_the_lock_has_all_that_is_required_and_above_its_floor() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    required = [Requirement(one) for one in chain(PROJECT["project"]["dependencies"], *extras.values())]
    for one in required:
        if one.name == PROJECT["project"]["name"]:
            assert one.extras <= extras.keys()
            continue
        found = [each for each in LOCKED if canonicalize_name(each.name) == canonicalize_name(one.name)]
        assert found, f"{one} is not in requirements.lock: make lock"
        for each in found:
            (version,) = [pin.version for pin in each.specifier if pin.operator == "=="]
            assert version in one.specifier, f"{one} is not met by {each}: make lock"


def test_one_cuda_is_meant_everywhere() -> None:
    """That of which `docs/gpu.md` says that it was run."""
    files = [*DEPLOY.rglob("*"), *(ROOT / "docs").rglob("*.md"), ROOT / "Makefile", ROOT / "CONTRIBUTING.md"]
    said = {(path.name, word) for path in files if path.is_file() for word in re.findall(r"cuda\d+", path.read_text())}
    assert {"Dockerfile", "gpu.yaml", "gpu.md", "Makefile"} <= {name for name, _ in said}
    assert len({word for _, word in said}) == 1, said
