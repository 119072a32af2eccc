"""Parts of JAX and Ray that have no public name. Each entry says why the project needs it."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax
    from jax.sharding import NamedSharding


def gloo_listens_at(address: str) -> None:
    """Has the collectives between CPU hosts listen at an address; call it before JAX makes its CPU client.

    JAX leaves that to gloo, which listens where the name of the machine resolves to. On many machines that is loopback,
    so that hosts on several of them never find each other; and where a machine has several addresses it may be one that
    the others do not reach. The function that makes the collectives takes the address, but JAX has no setting for it.
    """
    from jaxlib import _jax

    made_by_jax = _jax.make_gloo_tcp_collectives
    _jax.make_gloo_tcp_collectives = functools.partial(made_by_jax, hostname=address.strip("[]"))


def copier(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Makes what copies an array to other devices of this process, as many as it is on, each shard to the one in its
    place.

    `jax.device_put` does the same at four times the cost (34 us for a scalar): it finds out what is known here.
    """
    from jaxlib import _jax

    devices, shardings, semantics = (
        [sharding._internal_device_list],
        [sharding],
        [_jax.ArrayCopySemantics.ALWAYS_COPY],
    )

    def copy(array: jax.Array) -> jax.Array:
        copied: jax.Array = _jax.batched_copy_array_to_devices_with_sharding([array], devices, shardings, semantics)[0]
        return copied

    return copy


@contextlib.contextmanager
def ray_on_loopback() -> Iterator[None]:
    """Has a Ray that starts meanwhile listen on 127.0.0.1 only, as it does on macOS.

    On Linux it listens everywhere, and turns `_node_ip_address="127.0.0.1"` into an address that others reach. The
    variable says the same to the processes that it starts; this one has read it already.
    """
    from ray._private import ray_constants

    variable = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    before, asked = ray_constants.ENABLE_RAY_CLUSTER, os.environ.get(variable)
    ray_constants.ENABLE_RAY_CLUSTER, os.environ[variable] = False, "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        os.environ.pop(variable)
        if asked is not None:
            os.environ[variable] = asked


def ray_has_token() -> bool:
    """Whether the user has a token for Ray: in the environment, or in a file where Ray looks for one."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    return bool(AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True))


def ray_forgets_token() -> None:
    """Has Ray read mode and token again when it needs them next: it keeps what it found in the environment."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    AuthenticationTokenLoader.instance().reset_cache()
    Config.initialize("")
