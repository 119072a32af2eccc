"""Parts of JAX that have no public name. Each entry says why the project needs it."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
