"""The operator's table of tenants: the users of the cluster, and how much of it each may use.

A tenant is known by its token; each connection with that token is a session of the tenant. What a session makes is its
own; weight, priority and quotas are the tenant's, over all its sessions together. The cluster's own token is the
operator's: a session opened with it is a tenant of its own, without quotas.

The table is a JSON file. A token stands there as it is, or, better, as its SHA-256, which cannot be reversed:

    {"tenants": [{"name": "alice", "token_sha256": "2bd8…", "weight": 2, "quota": {"devices": 8}}]}
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from pathways_ray.errors import AuthenticationError, UsageError
from pathways_ray.scheduler.policies import ANONYMOUS, OPERATOR, anonymous

MIN_TOKEN_CHARACTERS = 16
"""Characters of a token; a shorter one could be guessed."""

MAX_NAME_CHARACTERS = 64

UNKNOWN_TOKEN = "the token is missing or wrong; it is printed where the cluster was started, or comes from its operator"

GONE = "is not in the table of tenants any more, or has another token"


class Quota(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Limits of what a tenant may hold at once; None leaves the runtime's own.

    `devices` counts the devices of its virtual slices (a device in two slices counts twice), `device_bytes` the bytes
    its buffers take on devices (a replicated array counts on every device), `launches` those without an outcome,
    `message_bytes` one message to the controller, `nodes` the nodes of one program.
    """

    devices: int | None = None
    device_bytes: int | None = None
    launches: int | None = None
    message_bytes: int | None = None
    nodes: int | None = None


class Tenant(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """An entry of the table.

    `weight` is its part of the device time under the policy "share", `priority` its rank under "priority" (higher goes
    first). `launch_limit_s` are the seconds that one of its launches may keep its devices; None leaves the runtime's.
    Of what `trusted` tenants send only the form is checked: their code can reach the data of others.
    """

    name: str
    weight: float = 1.0
    priority: int = 0
    quota: Quota = Quota()
    launch_limit_s: float | None = None
    trusted: bool = False


class _Entry(Tenant, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A tenant as the file has it: with exactly one of `token` and `token_sha256` (64 hexadecimal digits)."""

    token: str = ""
    token_sha256: str = ""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenants: tuple[_Entry, ...]


_FILE = msgspec.json.Decoder(_File)


class TokenOwner(NamedTuple):
    """The tenant who has shown a token, and the digest of that token: the tenant may have other values later."""

    tenant: Tenant
    token: str


@dataclass(frozen=True)
class TenantBook:
    """The table: each tenant with the SHA-256 of its token, in the order of the file."""

    entries: tuple[tuple[Tenant, str], ...] = ()

    def owner(self, token: str) -> TokenOwner | None:
        """The tenant of a token, or None. Takes the same time wherever in the table the token stands, or nowhere."""
        digest = token_digest(token)
        found = None
        for tenant, known in self.entries:
            if hmac.compare_digest(digest, known):
                found = TokenOwner(tenant, known)
        return found

    def still(self, owner: TokenOwner) -> TokenOwner:
        """The owner of a token with the values that the table has now, which may be another one than when it was shown.

        Raises:
            AuthenticationError: the tenant has left the table, or has another token.
        """
        for tenant, token in self.entries:
            if token == owner.token and tenant.name == owner.tenant.name:
                return TokenOwner(tenant, token)
        raise AuthenticationError(f"tenant {owner.tenant.name!r} {GONE}")

    def named(self, name: str) -> Tenant | None:
        return next((tenant for tenant, _ in self.entries if tenant.name == name), None)


def difference(old: TenantBook, new: TenantBook) -> str:
    """The names that were added, removed or changed, for the log; never a token. A new token is a change."""
    before = {tenant.name: (tenant, digest) for tenant, digest in old.entries}
    after = {tenant.name: (tenant, digest) for tenant, digest in new.entries}
    said = [
        ("added", sorted(after.keys() - before.keys())),
        ("removed", sorted(before.keys() - after.keys())),
        ("changed", sorted(name for name in after.keys() & before.keys() if after[name] != before[name])),
    ]
    return "; ".join(f"{what} {', '.join(names)}" for what, names in said if names)


def operators(session: int) -> Tenant:
    """The tenant of a session that was opened with the cluster's own token. The operator is trusted."""
    return Tenant(anonymous(session), trusted=True)


def token_digest(token: str) -> str:
    """The digest of a token, as the table keeps it."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def decode(data: bytes) -> TenantBook:
    """The table that a file holds.

    Raises:
        UsageError: it is invalid; the message names the entry and never its token.
    """
    try:
        found = _FILE.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(f"the tenants file is not a table of tenants: {error}") from None
    table = _Table(())
    for number, entry in enumerate(found.tenants):
        what = f"entry {number} of the tenants file ({entry.name[:MAX_NAME_CHARACTERS]!r})"
        if bool(entry.token) == bool(entry.token_sha256):
            raise UsageError(f"{what} needs a token or a token_sha256, and not both")
        if entry.token and len(entry.token) < MIN_TOKEN_CHARACTERS:
            raise UsageError(
                f"{what} has a token of {len(entry.token)} characters; {MIN_TOKEN_CHARACTERS} are the least"
            )
        tenant = Tenant(*(getattr(entry, field) for field in Tenant.__struct_fields__))
        try:
            table.add(tenant, entry.token_sha256 or token_digest(entry.token))
        except UsageError as error:
            raise UsageError(f"{what}: {error}") from None
    return TenantBook(tuple(table.entries))


def encode(book: TenantBook) -> bytes:
    """The file of a table, with digests in place of tokens."""
    tenants = [_Entry(**msgspec.structs.asdict(tenant), token_sha256=digest) for tenant, digest in book.entries]
    return msgspec.json.format(msgspec.json.encode({"tenants": tenants}), indent=2) + b"\n"


def add(book: TenantBook, tenant: Tenant, token_sha256: str) -> TenantBook:
    """The table with one tenant more.

    Raises:
        UsageError: the name or the token is there already, or a value is invalid.
    """
    table = _Table(book.entries)
    table.add(tenant, token_sha256)
    return TenantBook(tuple(table.entries))


class _Table:
    """Entries of a table that grows, whose names and tokens are found at once: a file may have thousands."""

    def __init__(self, entries: Sequence[tuple[Tenant, str]]) -> None:
        self.entries = list(entries)
        self._names = {tenant.name for tenant, _ in entries}
        self._owners = {digest: tenant.name for tenant, digest in entries}

    def add(self, tenant: Tenant, token_sha256: str) -> None:
        """Adds a tenant. Raises `UsageError` as the function `add` does."""
        _check(tenant)
        digest = token_sha256.lower()
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise UsageError("a token_sha256 has 64 hexadecimal digits: the SHA-256 of the token")
        if tenant.name in self._names:
            raise UsageError(f"there is a tenant {tenant.name!r} already; names are used once")
        if (owner := self._owners.get(digest)) is not None:
            raise UsageError(f"tenants {owner!r} and {tenant.name!r} have the same token; give each its own")
        self.entries.append((tenant, digest))
        self._names.add(tenant.name)
        self._owners[digest] = tenant.name


def change(book: TenantBook, tenant: Tenant) -> TenantBook:
    """The table with other values for the tenant of this name, whose token stays.

    Raises:
        UsageError: there is no tenant of this name, or a value is invalid.
    """
    _check(tenant)
    remove(book, tenant.name)
    return TenantBook(tuple((tenant if one.name == tenant.name else one, digest) for one, digest in book.entries))


def remove(book: TenantBook, name: str) -> TenantBook:
    """The table without a tenant. Raises `UsageError` when it has none of this name."""
    if book.named(name) is None:
        known = ", ".join(tenant.name for tenant, _ in book.entries) or "nobody"
        raise UsageError(f"there is no tenant {name!r}; the table has {known}")
    return TenantBook(tuple(entry for entry in book.entries if entry[0].name != name))


def _check(tenant: Tenant) -> None:
    name = tenant.name
    if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable() or name != name.strip():
        raise UsageError(
            f"a tenant's name has 1 to {MAX_NAME_CHARACTERS} printable characters, not {name[:MAX_NAME_CHARACTERS]!r}"
        )
    if name.startswith(ANONYMOUS) or name == OPERATOR:
        raise UsageError(f"{name!r} is what sessions of the operator are called; choose another name")
    if not (math.isfinite(tenant.weight) and tenant.weight > 0):
        raise UsageError(f"tenant {name!r} has weight {tenant.weight}; a weight is above 0")
    if not -(1 << 31) <= tenant.priority < 1 << 31:
        raise UsageError(f"tenant {name!r} has priority {tenant.priority}, which does not fit into 32 bits")
    limit_s = tenant.launch_limit_s
    if limit_s is not None and not (math.isfinite(limit_s) and limit_s > 0):
        raise UsageError(f"tenant {name!r} has launch_limit_s {limit_s}; a limit is above 0 seconds, or null")
    for field in tenant.quota.__struct_fields__:
        value = getattr(tenant.quota, field)
        if value is not None and not 0 <= value < 1 << 62:
            raise UsageError(f"tenant {name!r} has quota {field} {value}; a quota is 0 or more, or null for no limit")
