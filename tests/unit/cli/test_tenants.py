"""`pathways tenants`: a table in a file that never holds a token, and is whole at every moment."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pathways_ray.cli import commands
from pathways_ray.controller.tenants import Quota, Tenant, decode, token_digest


def tenants(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(commands, ["tenants", *arguments], prog_name="pathways", **options)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tenants.json"


def test_a_tenant_is_added_with_a_token_that_only_it_has(file: Path) -> None:
    options = (
        "--weight",
        "2.5",
        "--priority",
        "3",
        "--max-devices",
        "8",
        "--max-bytes",
        "1000000",
        "--max-nodes",
        "64",
        "--launch-limit-s",
        "600",
    )
    first = tenants("add", "alice", "--file", str(file), *options)
    assert first.exit_code == 0
    second = tenants("add", "bob", "--file", str(file), "--json")
    assert json.loads(second.stdout)["name"] == "bob"
    token = first.stdout.strip()
    assert len(token) == 32
    assert token not in file.read_text()
    book = decode(file.read_bytes())
    assert book.owner(token) == (
        Tenant("alice", 2.5, 3, Quota(8, 1_000_000, None, None, 64), 600.0),
        token_digest(token),
    )
    other = json.loads(second.stdout)["token"]
    assert book.owner(other) == (Tenant("bob"), token_digest(other))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [entry.name for entry in file.parent.iterdir()] == ["tenants.json"]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_one_and_its_file_changes(file: Path, there: bool) -> None:
    """The controller may read the file by its own name, as where it is mounted."""
    (file.parent / "mounted").mkdir()
    real = file.parent / "mounted" / "book.json"
    file.symlink_to(Path("mounted", "book.json"))
    if there:
        tenants("add", "alice", "--file", str(real))
    assert tenants("add", "bob", "--file", str(file)).exit_code == 0
    assert file.is_symlink()
    assert [tenant.name for tenant, _ in decode(real.read_bytes()).entries] == ["alice", "bob"][not there :]
    assert [entry.name for entry in real.parent.iterdir()] == ["book.json"]


def test_a_link_in_a_circle_is_refused_and_stays(file: Path) -> None:
    file.symlink_to(file)
    done = tenants("add", "alice", "--file", str(file))
    assert (done.exit_code, file.is_symlink()) == (2, True)
    assert "Too many levels of symbolic links" in done.output


def test_list_shows_everything_but_tokens(file: Path) -> None:
    token = tenants("add", "alice", "--file", str(file), "--max-bytes", "1500000").stdout.strip()
    shown = tenants("list", "--file", str(file), env={"COLUMNS": "200"}).stdout
    assert "alice" in shown
    assert "1.5 MB" in shown
    plain = json.loads(tenants("list", "--json", env={"PATHWAYS_TENANTS": str(file)}).stdout)
    assert plain[0]["name"] == "alice"
    assert plain[0]["quota"]["device_bytes"] == 1_500_000
    digest = json.loads(file.read_text())["tenants"][0]["token_sha256"]
    assert token not in shown + json.dumps(plain)
    assert digest not in shown + json.dumps(plain)


def test_a_tenant_is_removed_and_others_stay(file: Path) -> None:
    for name in ("alice", "bob"):
        tenants("add", name, "--file", str(file))
    file.chmod(0o640)
    assert tenants("remove", "alice", "--file", str(file)).exit_code == 0
    assert [tenant.name for tenant, _ in decode(file.read_bytes()).entries] == ["bob"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("add", "alice"), "there is a tenant 'alice' already"),
        (("add", "session 1"), "choose another name"),
        (("add", "bob", "--weight", "0"), "a weight is above 0"),
        (("add", "bob", "--launch-limit-s", "0"), "a limit is above 0 seconds"),
        (("remove", "bob"), "there is no tenant 'bob'; the table has alice"),
    ],
)
def test_what_is_refused_changes_nothing(file: Path, arguments: tuple[str, ...], says: str) -> None:
    tenants("add", "alice", "--file", str(file))
    before = file.read_bytes()
    result = tenants(*arguments, "--file", str(file))
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stdout == ""
    assert file.read_bytes() == before
    assert [entry.name for entry in file.parent.iterdir()] == ["tenants.json"]


def test_a_file_that_is_no_table_is_left_alone(file: Path) -> None:
    file.write_text("{")
    for arguments in (("add", "alice"), ("remove", "alice"), ("list",)):
        result = tenants(*arguments, "--file", str(file))
        assert result.exit_code == 2
        assert "not a table of tenants" in result.stderr
    assert file.read_text() == "{"


def test_no_file_and_no_folder(file: Path) -> None:
    assert "there is no file" in tenants("list", "--file", str(file)).stderr
    assert "cannot be opened" in tenants("add", "alice", "--file", str(file.parent / "none" / "t.json")).stderr


def test_tenants_added_at_the_same_time_are_all_there(file: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        arguments = [("add", f"tenant {number}", "--file", str(file)) for number in range(16)]
        list(pool.map(lambda words: commands(["tenants", *words], standalone_mode=False), arguments))
    assert len(decode(file.read_bytes()).entries) == 16


def test_a_trusted_tenant_is_listed_as_one(file: Path) -> None:
    tenants("add", "tom", "--file", str(file), "--trusted")
    tenants("add", "alice", "--file", str(file))
    assert [tenant.trusted for tenant, _ in decode(file.read_bytes()).entries] == [True, False]
    assert [t["trusted"] for t in json.loads(tenants("list", "--file", str(file), "--json").stdout)] == [True, False]
    lines = tenants("list", "--file", str(file)).stdout.splitlines()
    assert "yes" in next(line for line in lines if "tom" in line)
    assert "yes" not in next(line for line in lines if "alice" in line)


def test_values_are_changed_and_the_token_stays(file: Path) -> None:
    token = tenants("add", "alice", "--file", str(file), "--max-devices", "8", "--launch-limit-s", "60").stdout.strip()
    tenants("add", "bob", "--file", str(file))
    found = tenants(
        "set", "alice", "--file", str(file), "max-devices=4", "max-bytes=100", "weight=2", "launch-limit-s=none"
    )
    assert found.exit_code == 0
    book = decode(file.read_bytes())
    assert book.owner(token) == (Tenant("alice", 2.0, 0, Quota(4, 100), None), token_digest(token))
    assert book.named("bob") == Tenant("bob")
    tenants("set", "alice", "--file", str(file), "max-devices=none", "trusted=yes")
    assert decode(file.read_bytes()).owner(token) == (
        Tenant("alice", 2.0, 0, Quota(None, 100), None, True),
        token_digest(token),
    )


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (("alice", "max-devices=many"), "'many' is no value of max-devices"),
        (("alice", "colour=red"), "give NAME=VALUE with one of weight, priority, launch-limit-s, trusted, max-devices"),
        (("alice", "weight"), "'' is no value of weight"),
        (("alice", "weight=none"), "'none' is no value of weight"),
        (("alice", "weight=-1"), "a weight is above 0"),
        (("alice", "weight=2", "max-bytes=-1"), "a quota is 0 or more"),
        (("carol", "weight=2"), "there is no tenant 'carol'; the table has alice"),
    ],
)
def test_a_change_that_is_none_changes_nothing(file: Path, values: tuple[str, ...], says: str) -> None:
    tenants("add", "alice", "--file", str(file))
    before = file.read_bytes()
    found = tenants("set", values[0], "--file", str(file), *values[1:])
    assert found.exit_code == 2
    assert says in " ".join(found.output.split())
    assert file.read_bytes() == before
