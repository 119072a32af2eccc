"""The table of tenants: what a file may say, who a token belongs to, and refusals with their numbers."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_ray import limits
from pathways_ray.controller import quotas, tenants
from pathways_ray.controller.state import Session
from pathways_ray.controller.tenants import Quota, Tenant, TenantBook, token_digest
from pathways_ray.controller.tenants_file import MAX_FILE_BYTES, TenantsFile
from pathways_ray.errors import QuotaExceeded, UsageError, from_failure
from pathways_ray.scheduler.policies import Usage
from tests.unit.helpers import placed
from tests.unit.strategies import repeatable

TOKEN = "alice-0123456789abcdef"
DIGEST = hashlib.sha256(TOKEN.encode()).hexdigest()


def file(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"tenants": entries}).encode()


def test_a_table() -> None:
    book = tenants.decode(
        file(
            {
                "name": "alice",
                "token": TOKEN,
                "weight": 2,
                "priority": -1,
                "quota": {"devices": 8, "nodes": None},
                "launch_limit_s": 5,
            },
            {"name": "bob", "token_sha256": "AB" * 32},
        )
    )
    alice = Tenant("alice", 2.0, -1, Quota(devices=8), 5.0)
    assert book == TenantBook(((alice, DIGEST), (Tenant("bob"), "ab" * 32)))
    assert book.owner(TOKEN) == (alice, token_digest(TOKEN))
    assert book.named("bob") == Tenant("bob")
    for token in ("", TOKEN[:-1], TOKEN + "x", DIGEST, "\udcff", "ü" * 20):
        assert book.owner(token) is None


ONE = {"name": "a", "token": TOKEN}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a table of tenants"),
        (b"[]", "not a table of tenants: Expected `object`"),
        (b"{}", "missing required field `tenants`"),
        (b'{"tenants": []}garbage', "not a table of tenants"),
        (b"[" * 100_000, "not a table of tenants"),
        (file({"token": TOKEN}), "missing required field `name`"),
        (file({**ONE, "wieght": 2}), "unknown field `wieght`"),
        (file({**ONE, "quota": {"device": 2}}), "unknown field `device`"),
        (file({**ONE, "weight": "2"}), r"Expected `float`, got `str` - at `\$.tenants\[0\].weight`"),
        (file({"name": "a"}), r"entry 0 of the tenants file \('a'\) needs a token or a token_sha256, and not both"),
        (file({**ONE, "token_sha256": DIGEST}), "needs a token or a token_sha256, and not both"),
        (file({"name": "a", "token": "short"}), "a token of 5 characters; 16 are the least"),
        (file({"name": "a", "token_sha256": "12"}), "has 64 hexadecimal digits"),
        (file(ONE, {"name": "a", "token": TOKEN + "2"}), r"entry 1 .*there is a tenant 'a' already"),
        (file(ONE, {"name": "b", "token": TOKEN}), r"entry 1 .*tenants 'a' and 'b' have the same token"),
        (file(ONE, {"name": "b", "token_sha256": DIGEST}), "tenants 'a' and 'b' have the same token"),
        (file({**ONE, "weight": 0}), "tenant 'a' has weight 0.0; a weight is above 0"),
        (file({**ONE, "weight": -1.5}), "a weight is above 0"),
        (file({**ONE, "launch_limit_s": 0}), "tenant 'a' has launch_limit_s 0.0; a limit is above 0 seconds"),
        (file({**ONE, "launch_limit_s": -1}), "a limit is above 0 seconds"),
        (file({**ONE, "priority": 1 << 40}), "does not fit into 32 bits"),
        (file({**ONE, "quota": {"devices": -1}}), "tenant 'a' has quota devices -1; a quota is 0 or more"),
        (file({**ONE, "quota": {"launches": 1 << 63}}), "quota launches 9223372036854775808"),
        (file({**ONE, "name": ""}), "has 1 to 64 printable characters"),
        (file({**ONE, "name": "x" * 65}), "has 1 to 64 printable characters"),
        (file({**ONE, "name": "a\n"}), "has 1 to 64 printable characters"),
        (file({**ONE, "name": " a"}), "has 1 to 64 printable characters"),
        (file({**ONE, "name": "session 3"}), "'session 3' is what sessions of the operator are called"),
        (file({**ONE, "name": "the operator"}), "'the operator' is what sessions of the operator are called"),
    ],
)
def test_a_table_that_is_none(data: bytes, message: str) -> None:
    """The message names the entry, and no token."""
    with pytest.raises(UsageError, match=message) as error:
        tenants.decode(data)
    assert TOKEN not in str(error.value)


NAMES = st.text(
    st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_categories=("C", "Z")), min_size=1, max_size=9
)
QUOTAS = st.builds(Quota, *[st.none() | st.integers(0, 2**62 - 1)] * 5)
TENANTS = st.builds(Tenant, NAMES, st.floats(0.001, 1000), st.integers(-5, 5), QUOTAS)


@repeatable(100)
@given(st.lists(TENANTS, max_size=5, unique_by=lambda t: t.name))
def test_what_is_written_is_read(listed: list[Tenant]) -> None:
    book = TenantBook()
    for number, tenant in enumerate(listed):
        book = tenants.add(book, tenant, tenants.token_digest(f"token {number} of the test"))
    written = tenants.encode(book)
    assert tenants.decode(written) == book
    assert b"of the test" not in written
    for number, tenant in enumerate(listed):
        assert book.owner(f"token {number} of the test") == (tenant, token_digest(f"token {number} of the test"))
        book = tenants.remove(book, tenant.name)
        assert book.owner(f"token {number} of the test") is None
    assert book == TenantBook()


def test_who_is_not_there_cannot_be_removed() -> None:
    with pytest.raises(UsageError, match="there is no tenant 'bob'; the table has a"):
        tenants.remove(tenants.decode(file(ONE)), "bob")


def session_of(tenant: Tenant, *slices: int) -> Session:
    """A session of a tenant that holds slices with these numbers of devices."""
    session = Session(1, tenant, Usage(tenant.name))
    for number, size in enumerate(slices):
        session.slices[number] = placed(number, [f"0.{k}" for k in range(size)])
    return session


def test_quotas_refuse_with_what_was_asked_allowed_and_held() -> None:
    alice = Tenant("alice", quota=Quota(devices=8, message_bytes=100, nodes=10))
    holding = [session_of(alice, 2, 2), session_of(Tenant("bob"), 4)]
    assert quotas.devices(alice, 4, holding) is None
    assert quotas.message_bytes(alice, 100, "a program") is None
    assert quotas.nodes(alice, 10, "f") is None
    for failure, message in (
        (quotas.devices(alice, 5, holding), "asks for a slice of 5 devices and holds 4 in .* 8 are allowed"),
        (
            quotas.message_bytes(alice, 101, "a program"),
            "a program of 101 bytes from tenant 'alice' .* 100 are",
        ),
        (quotas.nodes(alice, 11, "f"), "program 'f' of tenant 'alice' has 11 nodes; 10 are allowed"),
        (quotas.sessions(alice, limits.MAX_SESSIONS), "has 1024; 1024 are allowed"),
    ):
        assert failure is not None
        with pytest.raises(QuotaExceeded, match=message):
            raise from_failure(failure)


def test_no_quota_is_no_limit_and_zero_is_one() -> None:
    free, none = tenants.operators(3), Tenant("b", quota=Quota(devices=0))
    assert free.name == "session 3"
    assert quotas.devices(free, 10**9, [session_of(free, 4)]) is None
    assert quotas.message_bytes(free, 10**12, "a program") is None
    assert quotas.nodes(free, 10**9, "f") is None
    assert quotas.devices(none, 1, []) is not None


def test_a_file_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tenants.json")
    with pytest.raises(UsageError, match=r"tenants\.json: it is read again and again, and a pipe or a device has"):
        TenantsFile(str(tmp_path / "tenants.json"), strict=True)


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    file.write_bytes(b'{"tenants": []}')
    assert TenantsFile(str(file), strict=True).problem == ""
    file.write_bytes(b'{"tenants": []}'.ljust(MAX_FILE_BYTES + 1))
    with pytest.raises(UsageError, match=f"more than {MAX_FILE_BYTES} bytes"):
        TenantsFile(str(file), strict=True)


def test_tenants_of_a_long_table_are_not_compared_with_each_other() -> None:
    """The controller serves nobody while it reads one. With 50,000 of them that would take minutes."""
    entries = [{"name": f"tenant {k}", "token": f"the token of tenant {k}"} for k in range(50_000)]
    assert len(tenants.decode(file(*entries)).entries) == 50_000
    entries.append({"name": "again", "token": "the token of tenant 7"})
    with pytest.raises(UsageError, match="tenants 'tenant 7' and 'again' have the same token"):
        tenants.decode(file(*entries))
