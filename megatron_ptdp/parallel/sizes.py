"""Sizes of a training run: pipeline, tensor and data parallel sizes, chunks and microbatches."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from megatron_ptdp.config.parallel import ParallelConfig, batch_fault
from megatron_ptdp.errors import BadSizes


@dataclass(frozen=True)
class Sizes(ParallelConfig):
    """Sizes of one training run; all are whole numbers of at least 1.

    Attributes:
        microbatches: m, of each step
        examples: b, of one microbatch on one replica; a step takes m·b·d examples
        islands: r, over how many islands the replicas lie; d/r of them are members of the axis DATA of each slice

    Raises:
        BadSizes: one is below 1, or the replicas cannot be spread evenly.
    """

    microbatches: int = 1
    examples: int = 1
    islands: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadSizes(f"{name} must be a whole number of at least 1, not {value!r}; the sizes are {self}")
        if self.data % self.islands:
            raise BadSizes(
                f"{self.data} data-parallel replicas cannot lie evenly on {self.islands} islands; choose data as a "
                f"multiple of islands; the sizes are {self}"
            )

    @property
    def members(self) -> int:
        """Members of the axis DATA of one slice."""
        return self.data // self.islands

    @property
    def batch(self) -> int:
        """Examples of one step, B = m·b·d."""
        return self.microbatches * self.examples * self.data

    def require_devices(self, there: int) -> None:
        """Makes sure that p·t·d are no more devices than there are.

        Raises:
            BadSizes: they are.
        """
        if self.devices > there:
            if not there:
                raise BadSizes("no device is up: wait until hosts are, and see 'pathways status --diagnose'")
            raise BadSizes(
                f"pipeline {self.pipeline} × tensor {self.tensor} × data {self.data} are {self.devices} devices, but "
                f"there are {there}; choose sizes whose product is at most {there}"
            )

    @classmethod
    def for_batch(
        cls, batch: int, pipeline: int, tensor: int, data: int, examples: int, chunks: int = 1, islands: int = 1
    ) -> Sizes:
        """The sizes with m = B/(d·b).

        Raises:
            BadSizes: the batch is not a multiple of d·b.
        """
        sizes = cls(pipeline, tensor, data, chunks, 1, examples, islands)
        if fault := batch_fault(batch, data, examples):
            raise BadSizes(fault)
        return replace(sizes, microbatches=batch // (data * examples))
