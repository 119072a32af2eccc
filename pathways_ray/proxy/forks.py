"""The end of a fork of a program that has a proxy's client.

A fork has none of the client's threads, and the client's locks as they were at that moment. What JAX lets go of at the
end of a process asks that client to tell the proxy, and would wait for such a lock for ever. So a fork lets go of
nothing: its arrays and programs are the program's that it was forked from.
"""

from __future__ import annotations

import ctypes
import gc
import os
import weakref
from typing import Any


def keep_in_forks(client: Any) -> None:
    """Has forks of this process keep what belongs to a client until their end."""
    import jax

    known = weakref.ref(client)

    def in_child() -> None:
        client = known()
        if client is not None:
            objects = gc.get_objects()  # the client's own list of arrays asks the proxy
            arrays = {kind for kind in set(map(type, objects)) if issubclass(kind, jax.Array)}
            for one in (client, *client.live_executables(), *(one for one in objects if type(one) in arrays)):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
            gc.freeze()  # else Python goes through what is left at its end, when types are gone

    os.register_at_fork(after_in_child=in_child)
