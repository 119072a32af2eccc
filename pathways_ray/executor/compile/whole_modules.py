"""Modules that were made for several devices elsewhere: XLA gets them as they came.

Such a module has shardings of its own, by Shardy, for as many devices as its slice has. It is not called from another
function, whose mesh would have other axes. The host says which devices those are, and looks whether what comes out is
laid out as the program says, since other computations and transfers rely on that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pathways_ray.compat import compiled_module, is_laid_out_as
from pathways_ray.errors import ProgramRefused
from pathways_ray.jax_arrays import results_made

Typed = tuple[jax.ShapeDtypeStruct, NamedSharding]


class WholeModule:
    """A compiled module, to be called with arrays over its devices.

    Args:
        module: serialised StableHLO, with Shardy's attributes.
        devices: of all hosts, in the order in which the module counts them.
        donated: the arguments whose memory it may take, of those that the module donates. The others live on: callers
            may have them elsewhere.
        inputs, outputs: the type and the sharding of each argument and result. A scalar comes behind the results, which
            stands for the computation's end, as behind those of any other.

    Raises:
        ProgramRefused: one of them is laid out otherwise.
    """

    def __init__(
        self,
        module: bytes,
        devices: Sequence[jax.Device],
        donated: Sequence[int],
        inputs: Sequence[Typed],
        outputs: Sequence[Typed],
    ) -> None:
        self._compiled = compiled_module(module, devices, with_end=True, donated=donated)
        self._check("argument", self._compiled.get_parameter_shardings(), inputs)
        self._check("result", (self._compiled.get_output_shardings() or [])[:-1], outputs)
        end = jax.ShapeDtypeStruct((), np.float32), NamedSharding(outputs[0][1].mesh, PartitionSpec())
        self._results = results_made([*outputs, end])

    def _check(self, what: str, found: Sequence[Any] | None, said: Sequence[Typed]) -> None:
        if found is None or len(found) != len(said):
            raise ProgramRefused(f"XLA does not say how each {what} of a module for several devices is laid out")
        for k, (made, (kind, sharding)) in enumerate(zip(found, said, strict=True)):
            if not is_laid_out_as(made, sharding, len(kind.shape)):
                raise ProgramRefused(f"{what} {k} is laid out as {made}; the program says {sharding}")

    def __call__(self, *arrays: jax.Array) -> Sequence[jax.Array]:
        return self._results(self._compiled.execute_sharded(list(arrays)))

    def as_text(self) -> str:
        return str(self._compiled.get_hlo_text())

    def memory_analysis(self) -> Any:
        return self._compiled.get_compiled_memory_stats()
