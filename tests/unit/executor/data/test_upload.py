"""Uploads on a host: what they say of the parts that other hosts hold as well."""

from __future__ import annotations

from pathways_ray.executor.data.upload import Upload
from pathways_ray.ir.regions import shard_boxes
from pathways_ray.ir.types import ArrayType, Spec
from pathways_ray.transport.messages import PutOpen, PutPart
from tests.unit.helpers import placed

WHERE = placed(1, ["0.0", "0.1", "1.0", "1.1"], (2, 2))
"""The first axis goes over hosts 0 and 1, the second over the devices of each."""

KIND = ArrayType((4,), "uint8")


def digests(host: int, spec: Spec, *parts: bytes, secret: str = "the data secret") -> dict[int, bytes]:
    message = PutOpen(1, 2, KIND, spec, WHERE, "")
    upload = Upload(message, shard_boxes(KIND, spec, WHERE.mesh), host)
    for box, data in enumerate(parts):
        upload.add(PutPart(1, box, 0, data))
    assert not upload.missing
    return upload.digests(secret)


def test_hosts_that_hold_a_whole_array_agree_exactly_when_its_bytes_do() -> None:
    assert digests(0, (), b"abcd") == digests(1, (), b"abcd")
    assert digests(0, (), b"abcd").keys() == digests(1, (), b"abce").keys() == {0}
    assert digests(0, (), b"abcd") != digests(1, (), b"abce")


def test_parts_that_several_hosts_hold_are_named_by_where_they_come_first() -> None:
    cut_on_each = (("y",),)
    assert digests(0, cut_on_each, b"ab", b"cd") == digests(1, cut_on_each, b"ab", b"cd")
    first, second = digests(0, cut_on_each, b"ab", b"cd"), digests(1, cut_on_each, b"ab", b"ce")
    assert first.keys() == second.keys() == {0, 1}
    assert (first[0] == second[0], first[1] == second[1]) == (True, False)


def test_a_part_of_one_host_alone_has_no_digest() -> None:
    assert digests(0, (("x",),), b"ab") == {}
    assert digests(1, (("x", "y"),), b"a", b"b") == {}


def test_who_does_not_know_the_secret_cannot_make_a_digest() -> None:
    assert digests(0, (), b"abcd") != digests(0, (), b"abcd", secret="another")
