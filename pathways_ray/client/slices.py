"""`pw.virtual_slice`: a mesh of virtual devices to pin functions and arrays to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax.sharding import AbstractMesh

from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.types import SliceType

if TYPE_CHECKING:
    from pathways_ray.client.session import Session


class VirtualSlice:
    """A virtual slice held by a session. Release it with `release()`, or use it as a context manager.

    Several slices may share physical devices; which devices a slice has is the resource manager's decision.
    """

    def __init__(self, session: Session, placed: PlacedSlice, name: str, proof: str = "") -> None:
        self.session = session
        self.placed = placed
        self.proof = proof
        self.name = name
        self.type: SliceType = placed.mesh
        self.released = False
        self.mesh = AbstractMesh(placed.mesh.shape, placed.mesh.axes)

    @property
    def id(self) -> int:
        return self.type.id

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def axes(self) -> tuple[str, ...]:
        return self.type.axes

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.type.size

    @property
    def island(self) -> int:
        """The island whose devices the slice has now."""
        return self.placed.island

    @property
    def devices(self) -> tuple[str, ...]:
        """The physical devices the slice has now, as `host.index`, in row-major order of the mesh."""
        return tuple(map(str, self.placed.devices))

    def release(self) -> None:
        """Gives the slice back. Arrays on it stay until their handles are dropped; new programs cannot use it."""
        if not self.released:
            self.released = True
            self.session.release_slice(self)

    def __enter__(self) -> VirtualSlice:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        mesh = ", ".join(f"{axis}={size}" for axis, size in zip(self.axes, self.shape, strict=True))
        return f"slice {self.name or self.id} ({mesh})"
