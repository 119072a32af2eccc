"""The backend `proxy` of JAX: the client of the IFRT proxy that jaxlib has, which JAX does not register by itself.

JAX finds it by the package `jax_plugins.pathways_proxy`, so programs need no line for it. It is registered only where
`JAX_PLATFORMS` names it: JAX tries every backend that it knows of where nothing was chosen.
"""

from __future__ import annotations

import os
from typing import Any

PLATFORM = "proxy"

TARGET_VARIABLE = "JAX_BACKEND_TARGET"

TOKEN_VARIABLE = "PATHWAYS_PROXY_TOKEN"
"""What a client shows on a port; a socket in its owner's folder asks for nothing."""

CREDENTIALS_VARIABLE = "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"
"""jaxlib's client has no credentials of its own outside of Google, and connects only if told that it needs none."""

CONNECT_LIMIT_S = 60

SHARED_VARIABLE = "IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY"
THRESHOLD_VARIABLE = "IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_THRESHOLD_BYTES"

SHARED_FROM_BYTES = 1 << 20
"""Arrays from this size on are put by a file in a folder that client and proxy share; for others gRPC is as fast."""


def initialize() -> None:
    """Registers the backend, if it was chosen. JAX calls this when it looks for backends."""
    import jax

    config: Any = jax.config
    if PLATFORM in (config.jax_platforms or "").split(","):
        from jax.extend import backend

        # Behind all others: it is used because it was asked for, not because it is there.
        backend.register_backend_factory(PLATFORM, connect, priority=-1)


def connect() -> Any:
    """A client of the proxy at `JAX_BACKEND_TARGET`."""
    import jax
    from jax.extend.backend import ifrt_proxy

    config: Any = jax.config
    target = config.read("jax_backend_target") or os.environ.get(TARGET_VARIABLE, "")
    os.environ.setdefault(CREDENTIALS_VARIABLE, "true")
    options: Any = ifrt_proxy.ClientConnectionOptions()
    options.connection_timeout_in_seconds = CONNECT_LIMIT_S
    if token := os.environ.get(TOKEN_VARIABLE, ""):
        options.initialization_data = {"token": token.encode()}
    return ifrt_proxy.get_client(target, options)


def environment(target: str, token: str = "", shared: str = "") -> dict[str, str]:
    """The variables with which a program uses a proxy. Programs that register the backend themselves need the first
    three, others, with this package installed, two.

    Args:
        shared: a folder in which it leaves big arrays for the proxy.
    """
    found = {"JAX_PLATFORMS": PLATFORM, TARGET_VARIABLE: target, CREDENTIALS_VARIABLE: "true"}
    if shared:
        found |= {SHARED_VARIABLE: shared, THRESHOLD_VARIABLE: str(SHARED_FROM_BYTES)}
    return found | ({TOKEN_VARIABLE: token} if token else {})
