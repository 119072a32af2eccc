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
        expert_slices: slices of their own that the experts lie on; 0: they lie with their layers
        expert_members: of each of these slices
        token_slices: n, the slices into which a microbatch is cut along its tokens

    Raises:
        BadSizes: one is below 1, or the replicas cannot be spread evenly.
    """

    microbatches: int = 1
    examples: int = 1
    islands: int = 1
    expert_slices: int = 0
    expert_members: int = 1
    token_slices: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name == "expert_slices" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise BadSizes(
                    f"{name} must be a whole number of at least {least}, not {value!r}; the sizes are {self}"
                )
        if self.data % self.islands:
            raise BadSizes(
                f"{self.data} data-parallel replicas cannot lie evenly on {self.islands} islands; choose data as a "
                f"multiple of islands; the sizes are {self}"
            )

    @property
    def devices(self) -> int:
        """p·t·d, and those of the experts' own slices."""
        return self.pipeline * self.tensor * self.data + self.expert_slices * self.expert_members

    @property
    def units(self) -> int:
        """Microbatches, or slices of these, that go through the pipeline in a step, m·n."""
        return self.microbatches * self.token_slices

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
            experts = ""
            if self.expert_slices:
                experts = f", with expert_slices {self.expert_slices} × expert_members {self.expert_members},"
            raise BadSizes(
                f"pipeline {self.pipeline} × tensor {self.tensor} × data {self.data}{experts} are {self.devices} "
                f"devices, but there are {there}; choose sizes whose product is at most {there}"
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
