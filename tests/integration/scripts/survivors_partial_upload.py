"""A client uploads an array to one host of two, and one that differs between them, and launches with each of them.

Another client uses the island too.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client.array_pieces import Copies
from pathways_ray.client.buffer import Upload
from pathways_ray.client.data_link import Sent
from pathways_ray.ir.regions import shard_boxes
from pathways_ray.transport.messages import PutOpen

with pw.init(1, 2, 1) as victim, pw.connect(victim.url, victim.token, name="attacker") as attacker:
    mine, theirs = victim.virtual_slice((1,), ("x",)), attacker.virtual_slice((2,), ("x",))
    body = jax.shard_map(
        lambda v: jax.lax.psum(v, "x"), mesh=theirs.mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False
    )
    gang = pw.compiled(body, slice=theirs, in_specs=P("x"), out_specs=P("x"))
    # Whether the devices meet in the sum depends on an array that all of them are said to have alike.
    branch = jax.shard_map(
        lambda v, w: jax.lax.cond(v[0] > 0, lambda w: jax.lax.psum(w, "x"), lambda w: w * 2, w).sum(keepdims=True),
        mesh=theirs.mesh, in_specs=(P(), P("x")), out_specs=P("x"), check_vma=False,
    )  # fmt: skip
    branching = pw.compiled(branch, slice=theirs, in_specs=(P(), P("x")), out_specs=P("x"))
    x = np.ones((2, 4), np.float32)
    assert np.asarray(gang(x)).tolist() == [[2.0] * 4] * 2
    kept = pw.put(np.ones(8, np.float32), mine).block_until_ready(timeout=60)
    links: Any = attacker._data

    def to(host: int, upload: Upload, array: Any, what: tuple[int, Any, Any, Any, str], acknowledge: Any) -> None:
        """Uploads the part of an array that one host holds."""
        buffer, kind, spec, placed, tag = what
        request = next(links._requests)
        boxes = shard_boxes(kind, spec, placed.mesh)
        here = [box for box, device in zip(boxes, placed.devices, strict=True) if device.host == host]
        opening = PutOpen(request, buffer, kind, spec, placed, tag)
        link = links.link_to(host)
        link.uploads[request] = Sent(upload, acknowledge)
        link.outbox.send_all(Copies(array).messages(opening, tuple(dict.fromkeys(here))))

    def half(
        buffer: int, array: Any, kind: Any, spec: Any, placed: Any, tag: str, acknowledge: Any, begun: Any
    ) -> Upload:
        upload = Upload({placed.hosts[0]})  # the other one gets nothing
        begun(upload)
        to(placed.hosts[0], upload, array, (buffer, kind, spec, placed, tag), acknowledge)
        return upload

    def two_faced(
        buffer: int, array: Any, kind: Any, spec: Any, placed: Any, tag: str, acknowledge: Any, begun: Any
    ) -> Upload:
        upload = Upload(set(placed.hosts))
        begun(upload)
        for k, host in enumerate(placed.hosts):
            to(host, upload, array + k, (buffer, kind, spec, placed, tag), acknowledge)
        return upload

    zero = np.zeros(1, np.float32)
    assert np.asarray(branching(zero, x)).tolist() == [[8.0], [8.0]]
    whole = links.upload
    begun = time.monotonic()
    links.upload = two_faced
    differing = pw.put(zero, theirs, P())
    links.upload = whole
    result = branching(differing, pw.put(x, theirs, P("x")))
    try:
        result.block_until_ready(timeout=60)
    except pw.errors.WireError as error:
        print(f"the attacker's launch ended after {time.monotonic() - begun:.1f} s: WireError: {error}")
    assert np.asarray(branching(zero, x)).tolist() == [[8.0], [8.0]]

    links.upload = half
    begun = time.monotonic()
    result = gang(pw.put(x, theirs, P("x")))
    links.upload = whole
    try:
        result.block_until_ready(timeout=60)
    except pw.errors.BufferLost as error:
        print(f"the attacker's launch ended after {time.monotonic() - begun:.1f} s: BufferLost: {error}")
    assert np.asarray(kept).tolist() == [1.0] * 8
    print("the victim's array is there")
    assert np.asarray(gang(x)).tolist() == [[2.0] * 4] * 2
