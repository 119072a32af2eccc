"""The first program of the Pathways paper (its Figure 2): three functions on three slices, one of them used twice.

Run it with `python -m examples.figure2`.
"""

from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw


def main(session: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Runs f([1, 2]) on the running session, six devices of it, and returns ([3, 5], [2, 4])."""
    del session  # the session pw.init or pw.connect made last is the one that is used
    with (
        pw.virtual_slice((2,), ("x",)) as slice_a,
        pw.virtual_slice((2,), ("x",)) as slice_b,
        pw.virtual_slice((2,), ("x",)) as slice_c,
    ):
        # Two numbers, one on each device of a slice.
        a = pw.compiled(lambda x: x * 2.0, slice=slice_a, in_specs=P("x"), out_specs=P("x"))
        b = pw.compiled(lambda x: x + 1.0, slice=slice_b, in_specs=P("x"), out_specs=P("x"))
        c = pw.compiled(lambda x: x / 2.0, slice=slice_c, in_specs=P("x"), out_specs=P("x"))

        @pw.program
        def f(v: Any) -> tuple[Any, Any]:
            x = a(v)
            y = b(x)
            z = a(c(x))
            return y, z

        v = np.array([1.0, 2.0], np.float32)
        print(f.lower(v).as_text())
        y, z = (np.asarray(future) for future in f(v))
    print(f"f({v}) = {y}, {z}")
    return y, z


if __name__ == "__main__":
    with pw.init(islands=2, hosts_per_island=1, devices_per_host=4) as session:
        main(session)
