"""Uploads that have come to a host of one device, in parts or in a file in memory."""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakSet

import jax
import numpy as np

from pathways_ray.executor.compile.compiler import Compiler
from pathways_ray.executor.data.upload import SharedUpload, Upload
from pathways_ray.executor.data.upload_plan import UploadPlan
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.types import ArrayType, SliceType
from pathways_ray.transport.messages import PutOpen, PutPart
from pathways_ray.transport.shared_memory import Mapping, SharedFile

PLACED = PlacedSlice.on(SliceType(1, (1,), ("x",)), 0, (Device(0, 0),))
MAPPED: WeakSet[Mapping] = WeakSet()


@functools.cache
def compiler() -> Compiler:
    """A host of one device; made when it is first used, since importing this file starts no backend."""
    devices = jax.local_devices()[:1]
    return Compiler(0, devices, {0: devices})


def uploaded(value: np.ndarray[Any, Any], shared: bool) -> tuple[Upload, jax.Array]:
    kind = ArrayType(value.shape, value.dtype.name)
    message = PutOpen(1, 1, kind, (("x",),), PLACED, "")
    plan = UploadPlan(kind, (("x",),), PLACED, 0)
    if shared:
        file = SharedFile.create(-(-value.nbytes // 64) * 64)
        file.write(value, 0)
        upload: Upload = SharedUpload(message, plan, file, MAPPED)
    else:
        upload = Upload(message, plan)
        upload.add(PutPart(1, 0, 0, value.tobytes()))
    return upload, upload.array(compiler())
