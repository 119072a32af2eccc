"""The sum of gradients over replicas: once per step inside an island, and across islands in buckets.

Inside an island members of DATA sum with one all-reduce for each array, or a reduce-scatter where they share it
(ZeRO-1). Across islands:

1. A member makes one row of all its gradients. The members of DATA of an island sum theirs, and each gets its part of
   the row (reduce-scatter): so each sum leaves the island once.
2. The parts are cut into buckets. Bucket c is summed on island c % r, in the order of the islands, and the sum is sent
   back to all islands: so all continue with the same bits.
3. The members gather their parts (all-gather).

Arrays that are replicated over TENSOR cross t times; they are small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from megatron_ptdp.models.interface import DATA, TENSOR, Tree
from megatron_ptdp.parallel.shapes import StageShapes

BUCKET_SPEC = P(DATA, TENSOR, None)


def scattered(array: Any, dimension: int, direct: bool) -> Any:
    """The member's part of the sum over DATA, inside `jax.shard_map`.

    Args:
        direct: by a reduce-scatter. Else by an all-reduce of which each takes its part: gloo, between CPU hosts, gets
            sums of reduce-scatters wrong.
    """
    if direct:
        return jax.lax.psum_scatter(array, DATA, scatter_dimension=dimension, tiled=True)
    return part_of(jax.lax.psum(array, DATA), dimension)


def part_of(array: Any, dimension: int) -> Any:
    """The member's part of what all members of DATA have."""
    size = array.shape[dimension] // jax.lax.axis_size(DATA)
    return jax.lax.dynamic_slice_in_dim(array, jax.lax.axis_index(DATA) * size, size, dimension)


class Reduction:
    """The reduction of one stage's gradients.

    Args:
        shapes: of the stage
        mesh: of its slices
        islands: r
        buckets: number of buckets over all islands
        direct: see `scattered`
    """

    def __init__(
        self,
        shapes: StageShapes,
        mesh: AbstractMesh,
        islands: int,
        buckets: int,
        direct: bool,
    ) -> None:
        self.shapes, self.mesh, self.islands, self.buckets, self.direct = shapes, mesh, islands, buckets, direct

    def is_summed(self, dimension: int) -> bool:
        """Whether the members have summed this array with each microbatch."""
        return self.shapes.zero >= 2 and dimension >= 0

    def inside(self, sums: Tree) -> Tree:
        """Sums as `StageShapes.sum_specs` lays them, to gradients as `master_specs` does; of one island."""

        def one(total: Any, dimension: int) -> Any:
            if self.is_summed(dimension):
                return total
            if dimension < 0:
                return jax.lax.psum(total[0], DATA)
            return scattered(total[0], dimension, self.direct)

        return self._mapped(
            lambda tree: jax.tree.map(one, tree, self.shapes.shared), self.shapes.sum_specs, self.shapes.master_specs
        )(sums)

    def reduce_scatter(self, sums: Tree) -> list[Any]:
        """The buckets of an island, each [members of DATA, of TENSOR, n]."""

        def run(sums: Tree) -> list[Any]:
            own, summed = self._rows(sums)
            row = jnp.concatenate([scattered(own, 0, self.direct), summed])
            return [bucket[None, None] for bucket in jnp.split(row, self.buckets)]

        return self._mapped(run, self.shapes.sum_specs, [BUCKET_SPEC] * self.buckets)(sums)

    def cross_island_sum(self, buckets: Sequence[Any]) -> Any:
        """The sum of one bucket of all islands, in their order."""
        total = buckets[0]
        for bucket in buckets[1:]:
            total = total + bucket
        return total

    def all_gather(self, buckets: Sequence[Any]) -> Tree:
        """Gradients as `master_specs` lays them, from the summed buckets."""

        def run(buckets: Sequence[Any]) -> Tree:
            row = jnp.concatenate([bucket[0, 0] for bucket in buckets])
            sizes = self._sizes()
            own = jax.lax.all_gather(row[: sizes[0] // self.shapes.members], DATA, tiled=True)
            return self._unflattened(own, row[sizes[0] // self.shapes.members :])

        return self._mapped(run, [BUCKET_SPEC] * self.buckets, self.shapes.master_specs)(buckets)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _local_shapes(self) -> list[tuple[tuple[int, ...], int]]:
        """The shape of each member's gradient, and the dimension that members of DATA share, or -1."""
        tensor = dict(zip(self.mesh.axis_names, self.mesh.axis_sizes, strict=True))[TENSOR]
        found = []
        for parameter, dimension in zip(
            jax.tree.leaves(self.shapes.parameters), jax.tree.leaves(self.shapes.shared), strict=True
        ):
            entries = [*parameter.spec, *[None] * len(parameter.shape)]
            shape = [
                size // tensor if entry == TENSOR else size
                for size, entry in zip(parameter.shape, entries, strict=False)
            ]
            if self.is_summed(dimension):
                shape[dimension] //= self.shapes.members
            found.append((tuple(shape), dimension))
        return found

    def _sizes(self) -> tuple[int, int]:
        """Elements of the two rows, padded: of what is still to be summed over DATA, and of what is not."""
        each = self.shapes.members * self.buckets  # at least that, as XLA has no reduce-scatter of nothing
        own = sum(math.prod(shape) for shape, k in self._local_shapes() if not self.is_summed(k))
        summed = sum(math.prod(shape) for shape, k in self._local_shapes() if self.is_summed(k))
        return max(_up(own, each), each), _up(summed, self.buckets)

    def _rows(self, sums: Tree) -> tuple[Any, Any]:
        leaves = jax.tree.leaves(sums)
        dimensions = [dimension for _, dimension in self._local_shapes()]
        dtype = leaves[0].dtype
        rows = []
        for wanted, size in zip((False, True), self._sizes(), strict=True):
            mine = [leaf.reshape(-1) for leaf, k in zip(leaves, dimensions, strict=True) if self.is_summed(k) is wanted]
            row = jnp.concatenate([jnp.zeros(0, dtype), *mine])
            rows.append(jnp.pad(row, (0, size - row.size)))
        return rows[0], rows[1]

    def _unflattened(self, own: Any, summed: Any) -> Tree:
        leaves = []
        starts = [0, 0]
        for shape, dimension in self._local_shapes():
            which = int(self.is_summed(dimension))
            size = math.prod(shape)
            array = (own, summed)[which][starts[which] : starts[which] + size].reshape(shape)
            starts[which] += size
            leaves.append(part_of(array, dimension) if not which and dimension >= 0 else array)
        return jax.tree.unflatten(jax.tree.structure(self.shapes.shared), leaves)

    def _mapped(self, function: Any, inputs: Any, outputs: Any) -> Any:
        # Nothing is differentiated here, and what an all-gather brings is alike on all members, which is not tracked.
        return jax.shard_map(function, mesh=self.mesh, in_specs=(inputs,), out_specs=outputs, check_vma=False)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
