"""The order of computations over several CPU hosts.

Hosts enqueue these in one order, and gloo pairs what one sends with what another expects by the order in which they
run: where two on the same devices run in another order on one host, sums are of the wrong arrays, or gloo ends the
process. XLA's CPU client keeps the order of computations of one device of this process that *one thread* enqueues, and
of those of several devices; of no others. So all threads of a host enqueue what is over hosts as if they were one
thread, and where a computation of one device of this host follows one of several, or the other way round, it waits
until that is over.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pathways_ray.compat import enqueuing_as_one_thread


class OrderOverHosts:
    """The computations over hosts that this host has enqueued and that may not be over. For one caller at a time, in
    whatever thread."""

    def __init__(self) -> None:
        self._ends: deque[Any] = deque()
        self._several = False
        self._enqueues_as_one_thread = enqueuing_as_one_thread()

    def in_order(self, compiled: Callable[..., Sequence[Any]], devices: int) -> Callable[..., Sequence[Any]]:
        """A computation over hosts, on `devices` of this one, as it is to be called. Its last output is its end."""
        several = devices > 1

        def call(*arrays: Any) -> Sequence[Any]:
            self._come(several)
            outputs = compiled(*arrays)
            self._ends.append(outputs[-1])
            return outputs

        return call

    def _come(self, several: bool) -> None:
        ends = self._ends
        while ends and ends[0].is_ready():
            ends.popleft()
        if several != self._several:
            while ends:
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # it is over, and its launch says that it failed
                    ends.popleft().block_until_ready()
        self._several = several
        self._enqueues_as_one_thread()
