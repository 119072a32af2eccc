"""Credentials of clients at hosts: tokens that the controller signs and every host can check by itself.

Hosts never ask the controller who a client is. They share the *data secret* with it, so a client that carries an
HMAC-SHA256 made with it was sent by the controller, and cannot have changed a bit of what is signed:

- a *data token* binds a session, its tenant, and how many bytes the tenant may have uploaded on one host;
- a *tag* binds a session and one of its slices, with its devices.

The successor of a controller has the same secret, and knows by a tag made with it whose session is whose.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from dataclasses import dataclass

from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.transport.messages import encode

UNLIMITED = -1


@dataclass(frozen=True)
class Grant:
    """The content of a data token: its session, the bytes of uploads a host may hold for its tenant (None: no limit),
    and what stands for the tenant."""

    session: int
    allowance: int | None
    tenant: str = ""


def _sign(secret: str, *parts: object) -> str:
    return hmac.new(secret.encode(), encode(parts), hashlib.sha256).hexdigest()


def data_token(secret: str, session: int, allowance: int | None, tenant: str = "") -> str:
    """The token of a session's data streams."""
    number = UNLIMITED if allowance is None else allowance
    owner = tenant_mark(tenant)
    return f"{number}.{owner}.{_sign(secret, 'data', session, number, owner)}"


@functools.lru_cache(1 << 10)
def tenant_mark(tenant: str) -> str:
    """The mark that stands for a tenant at hosts: a digest of the name, which may have any characters."""
    return hashlib.sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def is_unlimited(token: str) -> bool:
    """Whether a data token, which nobody has to check for this, has no limit of bytes."""
    return token.partition(".")[0] == str(UNLIMITED)


def grant_of(secret: str, session: int, token: str) -> Grant | None:
    """The grant of a session's data token; None unless the controller made it, for this session."""
    text, _, rest = token.partition(".")
    owner, _, signature = rest.partition(".")
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(text) <= 20):
        return None
    number = int(text)
    if not hmac.compare_digest(signature.encode(), _sign(secret, "data", session, number, owner).encode()):
        return None
    return Grant(session, None if number == UNLIMITED else number, owner)


def slice_tag(secret: str, session: int, placed: PlacedSlice) -> str:
    """The tag by which a session shows that it holds a slice on these devices."""
    return _sign(secret, "slice", session, placed)


def is_slice_tag(secret: str, session: int, placed: PlacedSlice, tag: str) -> bool:
    """Whether the controller gave this slice to this session; compared in constant time."""
    return hmac.compare_digest(tag.encode(), slice_tag(secret, session, placed).encode())


def resume_tag(secret: str, session: int, tenant: str) -> str:
    """The tag by which a client shows the successor of its controller that a session is its own."""
    return _sign(secret, "resume", session, tenant)


def is_resume_tag(secret: str, session: int, tenant: str, tag: str) -> bool:
    """Whether a controller gave this tag to a session of this tenant; compared in constant time."""
    return hmac.compare_digest(tag.encode(), resume_tag(secret, session, tenant).encode())


def link_tags(secret: str, session: int) -> tuple[str, str]:
    """The tags on a direct link: the client's, and the one that the controller answers. Both know the session's secret
    and do not send it, since on the client's side another process may have taken the port of the link."""
    return _sign(secret, "lane", session), _sign(secret, "welcome", session)


def authorised(metadata: dict[str, str], secret: str) -> bool:
    """Whether the metadata carry the secret; compared in constant time."""
    return hmac.compare_digest(metadata.get("authorization", "").encode(), secret.encode())


def session_of(metadata: dict[str, str]) -> int:
    """The session that the metadata name; 0, which no session has, when they name none."""
    text = metadata.get("session", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else 0
