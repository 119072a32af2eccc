"""One program that goes back and forth between two islands 100 times.

Each round trip is one step of the logistic map r x (1 - x), half of it on each island. With r = 3.9 the map is chaotic:
a step makes any difference about 1.6 times larger, so a wrong bit early on changes most digits of the result.

Run it with `python -m examples.ping_pong`.
"""

import time
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

START = np.linspace(0.1, 0.45, 8, dtype=np.float32)
ROUND_TRIPS = 100


def ping(x: jax.Array) -> jax.Array:
    """On island 0: (8,) in [0, 1] -> (8,) in [0, 1/4]."""
    return x * (1.0 - x)


def pong(x: jax.Array) -> jax.Array:
    """On island 1: (8,) in [0, 1/4] -> (8,) in [0, 1]."""
    return 3.9 * x


def plain_jax(v: np.ndarray) -> np.ndarray:
    """The same round trips in this process, without Pathways."""
    here, there = jax.jit(ping), jax.jit(pong)
    for _ in range(ROUND_TRIPS):
        v = there(here(v))
    return np.asarray(v)


def main(session: Any = None) -> np.ndarray:
    """Runs the program on two devices of each island of the running session; returns the (8,) float32 result."""
    del session  # the session pw.init or pw.connect made last is the one that is used
    with pw.virtual_slice((2,), ("x",), island=0) as here, pw.virtual_slice((2,), ("x",), island=1) as there:
        ping_there = pw.compiled(ping, slice=here, in_specs=P("x"), out_specs=P("x"))
        pong_back = pw.compiled(pong, slice=there, in_specs=P("x"), out_specs=P("x"))

        @pw.program
        def rally(v: Any) -> Any:
            for _ in range(ROUND_TRIPS):
                v = pong_back(ping_there(v))
            return v

        v = START
        np.asarray(rally(v))  # traces, compiles, connects
        start = time.perf_counter()
        result = np.asarray(rally(v))
        seconds = time.perf_counter() - start
    same = result.tobytes() == plain_jax(v).tobytes()
    print(f"{ROUND_TRIPS} round trips in {seconds * 1e3:.1f} ms, one launch; bit-equal to plain JAX: {same}")
    return result


if __name__ == "__main__":
    with pw.init(islands=2, hosts_per_island=1, devices_per_host=4) as session:
        main(session)
