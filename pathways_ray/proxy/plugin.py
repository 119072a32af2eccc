"""The backend `proxy` of JAX: the client of the IFRT proxy that jaxlib has, which JAX does not register by itself.

JAX finds it by the package `jax_plugins.pathways_proxy`, so programs need no line for it. It is registered only where
`JAX_PLATFORMS` names it: JAX tries every backend that it knows of where nothing was chosen. A program that registers it
by itself has its big arrays go by gRPC.
"""

from __future__ import annotations

import os
from typing import Any

PLATFORM = "proxy"

BESIDE = "cpu"
"""The backend of the program's own process, which JAX has beside every other one: `jax.devices("cpu")`."""

TARGET_VARIABLE = "JAX_BACKEND_TARGET"

TOKEN_VARIABLE = "PATHWAYS_PROXY_TOKEN"
"""What a client shows on a port; a socket in its owner's folder asks for nothing."""

CREDENTIALS_VARIABLE = "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"
"""jaxlib's client has no credentials of its own outside of Google, and connects only if told that it needs none."""

CONNECT_LIMIT_S = 60

LOCAL_TARGET = "grpc://unix:"
"""Where a target begins so, proxy and client are on one machine."""

SHARED_VARIABLE = "IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY"
THRESHOLD_VARIABLE = "IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_THRESHOLD_BYTES"

SHARED_FROM_BYTES = 1 << 20
"""Arrays from this size on are put by a file in a folder that client and proxy share (`folders`); for others gRPC is as
fast."""


def initialize() -> None:
    """Registers the backend, if it was chosen, with local CPU devices behind it. JAX calls this when it looks for
    backends."""
    import jax

    config: Any = jax.config
    chosen = (config.jax_platforms or "").split(",")
    if PLATFORM in chosen:
        from jax.extend import backend

        if BESIDE not in chosen:
            config.update("jax_platforms", ",".join((*chosen, BESIDE)))

        # Behind all others: it is used because it was asked for, not because it is there.
        backend.register_backend_factory(PLATFORM, connect, priority=-1)


def connect() -> Any:
    """A client of the proxy at `JAX_BACKEND_TARGET`."""
    import jax
    from jax.extend.backend import ifrt_proxy

    from pathways_ray.proxy import reading  # here: JAX loads this file in programs that use no proxy too
    from pathways_ray.proxy.folders import own_folder
    from pathways_ray.proxy.forks import keep_in_forks

    config: Any = jax.config
    target = config.read("jax_backend_target") or os.environ.get(TARGET_VARIABLE, "")
    os.environ.setdefault(CREDENTIALS_VARIABLE, "true")
    options: Any = ifrt_proxy.ClientConnectionOptions()
    options.connection_timeout_in_seconds = CONNECT_LIMIT_S
    data = {}
    if token := os.environ.get(TOKEN_VARIABLE, ""):
        data["token"] = token.encode()
    if target.startswith(LOCAL_TARGET):
        folder = own_folder()
        os.environ |= {SHARED_VARIABLE: folder, THRESHOLD_VARIABLE: str(SHARED_FROM_BYTES)}
        data["folder"] = folder.encode()
    if data:
        options.initialization_data = data
    reading.install()
    client = ifrt_proxy.get_client(target, options)
    keep_in_forks(client)
    return client


def environment(target: str, token: str = "") -> dict[str, str]:
    """The variables with which a program uses a proxy. Programs that register the backend themselves need the first
    three, others, with this package installed, two."""
    found = {"JAX_PLATFORMS": PLATFORM, TARGET_VARIABLE: target, CREDENTIALS_VARIABLE: "true"}
    return found | ({TOKEN_VARIABLE: token} if token else {})
