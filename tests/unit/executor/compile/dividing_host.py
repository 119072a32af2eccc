"""Compiles divisions by constants that are 0 as a host does, in a process of its own, which they have ended."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pathways_ray.client.jaxpr_formulas import formula_of
from pathways_ray.executor.compile.compiler import Compiler
from pathways_ray.formulas.formula import packed
from pathways_ray.ir.graph import Part, Recipe, Ref
from pathways_ray.ir.plan import Executable
from pathways_ray.ir.types import ArrayType, Layout
from tests.unit.executor.compile.exports import MESH, blob_of, exported
from tests.unit.helpers import placed, spec

jax.config.update("jax_num_cpu_devices", 8)

KIND = jax.ShapeDtypeStruct((8,), np.int32)
ONE = AbstractMesh((1,), ("x",))
SEVEN, ZERO = np.full(8, 7, np.int32), np.zeros(8, np.int32)
DIVISIONS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "remainder": (lambda v: v + lax.rem(jnp.asarray(SEVEN), jnp.asarray(ZERO)), 8),
    "quotient": (lambda v: v + lax.div(jnp.asarray(SEVEN), jnp.asarray(ZERO)), 0),
    "of what is 0": (lambda v: lax.rem(jnp.int32(7), v - v), 7),
    "unsigned": (lambda v: v + lax.div(jnp.full(8, 7, np.uint8), jnp.zeros(8, np.uint8)).astype(np.int32), 256),
    "in a branch": (lambda v: lax.cond(v[0] > 0, lambda u: u + lax.rem(SEVEN, ZERO), lambda u: u, v), 8),
    "in a loop": (lambda v: lax.fori_loop(0, 3, lambda i, u: u + lax.rem(i + SEVEN, ZERO), v), 1 + 7 + 8 + 9),
}


def main() -> None:
    devices = jax.local_devices()[:4]
    compiler = Compiler(0, devices, {0: devices})
    compiler.sandbox.check = lambda *_: None  # type: ignore[method-assign]
    value = np.ones(8, np.int32)

    def result(part: Part, blob: bytes, count: int) -> Any:
        names = [f"0.{k}" for k in range(count)]
        kind, layout = ArrayType((8,), "int32"), Layout(1, spec("x" if count > 1 else ""))
        executable = Executable(Recipe((part,), (Ref(0, 0),)), 1, (kind,), (layout,), (kind,), (layout,), ())
        run = compiler.executable(executable, placed(1, names), {part.digest: blob})
        lies = NamedSharding(Mesh(np.array(devices[:count]), ("x",)), P("x" if count > 1 else None))
        return np.asarray(run(jax.device_put(value, lies))[0])

    for name, (function, expected) in DIVISIONS.items():
        print(name, flush=True)
        formula = formula_of(jax.jit(lambda v, f=function: (f(v),)).trace(KIND).jaxpr, ONE)
        whole = exported(lambda v, f=function: (f(v),), KIND, mesh=ONE)
        sharded = exported(
            jax.shard_map(lambda v, f=function: (v + f(jnp.ones(8, np.int32))[:2] - 1,), mesh=MESH, in_specs=P("x"),
            out_specs=P("x"), check_vma=False), KIND,
        )  # fmt: skip
        for blob, number, as_is, count in (
            (packed([formula]) if formula is not None else b"", "#0", False, 1),
            (blob_of(whole), "", False, 1),
            (blob_of(sharded), "", False, 4),
            (blob_of(sharded), "", True, 4),
        ):
            if blob:
                digest = hashlib.sha256(blob).hexdigest()
                part = Part("f", digest + number, (Ref(-1, 0),), as_is=as_is)
                np.testing.assert_array_equal(result(part, blob, count), np.full(8, expected))
    print("all are there")


if __name__ == "__main__":
    main()
