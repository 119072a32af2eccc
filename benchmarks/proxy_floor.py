"""A proxy with nothing behind it, which answers at once: what JAX's client and the proxy's own work cost alone.

    python -m benchmarks.proxy_floor SOCKET

serves a client of one device until its input ends, and prints its variables. No program is computed: results are zeros.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class NoSession:
    """Stands in for a session: everything is there at once."""

    platforms = ("cpu",)
    trusted = False
    closed_because = ""

    def __init__(self) -> None:
        from pathways_ray.ir.plan import Device, PlacedSlice

        self._numbers = itertools.count(1)
        self._placed = lambda mesh: PlacedSlice.on(mesh, 0, [Device(0, 0)])
        self._answers = os.eventfd(0)

    @property
    def answers(self) -> int:
        """A file in which nothing ever comes."""
        return self._answers

    def read_answers(self) -> None:
        """Nothing ever comes."""

    def watch(self, changed: Callable[[], None]) -> None:
        """Nothing changes later."""

    def whole(self) -> Any:
        return self.part_of(None, (0,), (1,), ("x",))

    def part_of(self, whole: Any, places: Sequence[int], shape: Sequence[int], axes: Sequence[str]) -> Any:
        from pathways_ray.client.slices import VirtualSlice
        from pathways_ray.ir.types import SliceType

        mesh = SliceType(next(self._numbers), tuple(shape), tuple(axes))
        return VirtualSlice(self, self._placed(mesh), "")  # type: ignore[arg-type]

    def _array(self, kind: Any) -> Any:
        from pathways_ray.client.array import Array
        from pathways_ray.client.buffer import READY, Buffer, BufferRecord

        return Array(Buffer(self, BufferRecord(next(self._numbers), READY)), kind)  # type: ignore[arg-type]

    def upload(self, array: Any, kind: Any) -> Any:
        return self._array(kind)

    def register(self, graph: Any, encoded: bytes, functions: Any) -> int:
        return next(self._numbers)

    def unregister(self, program: int) -> None:
        """Nothing is kept."""

    def takes_pipes(self, result: Any) -> bool:
        return False

    def explain(self, program: int, graph: bytes) -> Any:
        from pathways_ray.transport.messages import Explained

        return Explained("", "", {})

    def launch(self, program: int, arguments: Any, results: Any, donated: Any = (), why: str = "") -> list[Any]:
        return [self._array(kind) for kind in results]

    def free(self, record: Any) -> None:
        """Nothing is kept."""

    def fetch_shard(self, array: Any, place: int, into: Any = None) -> Any:
        value = np.zeros(array._type.array.shape, np.dtype(array._type.array.dtype))
        if into is not None:
            into.write(value, 0)
        return value

    def ask_for_shard(self, array: Any, place: int, done: Callable[[Any], None]) -> Any:
        if array._type.array.nbytes >= 1 << 18:
            return None
        done(self.fetch_shard(array, place))
        return self

    def hasten(self, array: Any) -> Any:
        """Nothing is waited for."""

    def take_back(self, question: Any) -> bool:
        return False

    def close(self) -> None:
        self.closed_because = "it was closed"


def main(path: str) -> None:
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "JAX_ENABLE_X64": "1"}
    from pathways_ray.proxy.plugin import environment
    from pathways_ray.proxy.server import ProxyServer

    def opened() -> Any:
        session = NoSession()
        return session, [session.whole()]

    server = ProxyServer(opened, f"unix:{path}")
    server.start()
    print(json.dumps(environment(f"grpc://unix:{path}")), flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main(sys.argv[1])
