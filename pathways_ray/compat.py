"""What JAX has no public name for. Each entry says why it cannot be done without."""

from __future__ import annotations

import functools


def gloo_listens_at(address: str) -> None:
    """Has the collectives between CPU hosts listen at an address; call it before JAX makes its CPU client.

    JAX leaves that to gloo, which listens where the name of the machine resolves to. On many machines that is loopback,
    so that hosts on several of them never find each other; and where a machine has several addresses it may be one that
    the others do not reach. The function that makes the collectives takes the address, but JAX has no setting for it.
    """
    from jaxlib import _jax

    made_by_jax = _jax.make_gloo_tcp_collectives
    _jax.make_gloo_tcp_collectives = functools.partial(made_by_jax, hostname=address.strip("[]"))
