"""The current session of this process, and whether a program is being traced on this thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pathways_ray.errors import NotInitialized

if TYPE_CHECKING:
    from pathways_ray.client.array import Array
    from pathways_ray.client.session import Session


class _Tracing(threading.local):
    """`session` is that of the program being traced on this thread, or None; `captured` are the arrays it uses.

    `programs` counts those whose functions a trace of JAX's runs on this thread: of `jax.vmap`, `jax.jit`, `jax.grad`.
    """

    session: Session | None = None
    programs = 0

    def __init__(self) -> None:
        self.captured: list[Array] = []

    @property
    def is_inside(self) -> bool:
        """Whether the function of a program runs."""
        return self.session is not None or self.programs > 0


tracing = _Tracing()
sessions: list[Session] = []
starting_or_stopping = threading.RLock()
"""Held by the thread that starts the cluster of this process, or stops it."""


def enter(session: Session) -> None:
    """A session was opened, and is the current one. Those that were closed leave the list: who uses sessions by their
    slices alone never asks for the current one."""
    sessions[:] = [one for one in sessions if not one.closed]
    sessions.append(session)


def current_session() -> Session:
    """The session made last and not closed.

    Raises:
        NotInitialized: no session is open.
    """
    if tracing.session is not None:
        return tracing.session
    while sessions and sessions[-1].closed:
        sessions.pop()
    if not sessions:
        raise NotInitialized(
            "no cluster is in use: call pw.init() to start one here, or pw.connect(url, token=...); slices and arrays "
            "of a session that was closed went with it"
        )
    return sessions[-1]
