"""One call to a controller, without a session: for commands and the page, which load neither JAX nor Ray."""

from __future__ import annotations

import json
from typing import Any

from pathways_ray.errors import AuthenticationError, UsageError, from_failure
from pathways_ray.transport import messages

ANSWER_WITHIN_S = 5.0

SCHEME = "grpc://"
ENCRYPTED = "grpcs://"


class NoAnswer(UsageError):
    """Nothing answers at the address of a cluster: it may be away for now."""


def hint(url: str, details: str | None) -> str:
    """More about a cluster that hangs up on who does not encrypt, or that does not know what encryption is."""
    if url.startswith(SCHEME) and "Socket closed" in (details or ""):
        return f". If it has TLS, its address begins with {ENCRYPTED}, and --ca or ca= is its certificate"
    if url.startswith(ENCRYPTED) and "WRONG_VERSION_NUMBER" in (details or ""):
        return f". If it has no TLS, its address begins with {SCHEME}"
    return ""


def check_port(url: str) -> None:
    """Raises `UsageError` for a port that there cannot be: the C library takes its last 16 bits, which are another
    one's."""
    port = url.rpartition(":")[2]
    if port.isdecimal() and int(port) >= 1 << 16:
        raise UsageError(f"a port is below {1 << 16}, and that of {url} is not")


def look(url: str, token: str, ca: str = "") -> dict[str, Any]:
    """Everything that the token may see, as the controller at `url` knows it.

    Raises:
        UsageError: no cluster answers there.
        AuthenticationError: the token is wrong.
    """
    found: dict[str, Any] = json.loads(text_in(call(url, token, messages.Look(0, "all"), ca=ca), url))
    return found


def text_in(reply: messages.Reply, url: str) -> str:
    """The text of a reply that is to have one. Raises `UsageError` where it has none."""
    if isinstance(reply, messages.StatusReply):
        return reply.text
    raise UsageError(f"what answers at {url} is no cluster of this version")


def call(
    url: str, token: str, request: messages.Request, timeout: float = ANSWER_WITHIN_S, ca: str = "", late: str = ""
) -> messages.Reply:
    """The reply of the cluster at `url` to a request of its operator.

    Args:
        late: what to do where no answer comes in time, for the message of the error.
        ca: file with the certificates to trust where the cluster has TLS; "" is what the system trusts.

    Raises:
        NoAnswer: no cluster answers there within `timeout` seconds.
        UsageError: `url` is no address, or `ca` no file with certificates.
        AuthenticationError: the token is wrong.
        PathwaysError: it refuses the request.
    """
    import grpc

    from pathways_ray.transport import grpc_streams, streams, tls

    scheme = next((s for s in (SCHEME, ENCRYPTED) if url.startswith(s)), None)
    if scheme is None:
        raise UsageError(f"a cluster's address looks like {SCHEME}host:port, not {url!r}")
    check_port(url)
    if not (token.isascii() and token.isprintable()):
        raise AuthenticationError("the token is wrong: it has characters that no token has")
    trust = tls.Trust(tls.client_roots(ca or None) or b"") if scheme == ENCRYPTED else None
    with grpc_streams.channel(url.removeprefix(scheme), trust) as channel:
        try:
            data = channel.unary_unary(streams.CALL)(
                messages.encode(request), timeout=timeout, metadata=(("authorization", token),)
            )
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise NoAnswer(f"no cluster answers at {url} within {timeout:g} s{late}") from error
            raise NoAnswer(f"no cluster answers at {url}: {error.details()}{hint(url, error.details())}") from error
    reply = messages.REPLY.decode(data)
    if isinstance(reply, messages.Refused):
        if reply.failure.kind == "SessionClosed":
            raise AuthenticationError(f"the token is not that of the cluster at {url}")
        raise from_failure(reply.failure)
    return reply
