"""The messages of the IFRT proxy protocol, as the installed jaxlib has them.

jaxlib ships no `.proto` files, but each generated message carries its description, so the library has the serialised
`FileDescriptorProto`s in it. They are read from there when a proxy starts: the messages are then those of exactly this
jaxlib, and nothing of them is kept here. They live in a pool of their own, apart from what other packages register.
"""

from __future__ import annotations

import functools
import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jaxlib
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from pathways_ray.errors import UsageError

LIBRARY = "libjax_common.so"

SERVICE = "xla/python/ifrt_proxy/common/grpc_ifrt_service.proto"

ROOTS = (
    SERVICE,
    "xla/python/ifrt/array_spec.proto",
    "xla/python/ifrt/custom_call_program.proto",
    "xla/python/ifrt/layout_serdes.proto",
    "xla/python/ifrt/sharding_serdes.proto",
    "xla/python/pjrt_ifrt/pjrt_layout_serdes.proto",
    "xla/python/pjrt_ifrt/xla_compiler.proto",
    "xla/python/pjrt_ifrt/xla_sharding.proto",
)
"""Files with messages that the proxy reads or writes; the files that they import come with them."""

_NAME = re.compile(rb"\x0a([\x05-\x7f])((?:xla|google)/[!-~]+?\.proto)")
"""Field 1 of a `FileDescriptorProto`: its name, behind its length."""

_LAST_FIELD = 14
"""The highest field of `descriptor.proto`'s `FileDescriptorProto`; a greater one is what follows it in the library."""

_VARINT, _LENGTH = 0, 2


def _end_of(data: Any, start: int) -> int:
    """The end of a serialised `FileDescriptorProto`: its fields have numbers up to 14, its name comes once."""
    at, named = start, False
    while at < len(data):
        tag, after = _varint(data, at)
        field, kind = tag >> 3, tag & 7
        if not 1 <= field <= _LAST_FIELD or (field == 1 and named) or kind not in (_VARINT, _LENGTH):
            return at
        named = named or field == 1
        value, after = _varint(data, after)
        if kind == _LENGTH:
            after += value
        if after > len(data):
            return at
        at = after
    return at


def _varint(data: Any, at: int) -> tuple[int, int]:
    """A number of the wire format, and where it ends."""
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80 or shift > 63:
            break
    return value, at


def recovered(library: Path) -> Mapping[str, descriptor_pb2.FileDescriptorProto]:
    """The descriptions of XLA's message files in a shared library, by name."""
    found: dict[str, descriptor_pb2.FileDescriptorProto] = {}
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for match in _NAME.finditer(data):
            if len(match[2]) != match[1][0]:
                continue
            described = descriptor_pb2.FileDescriptorProto()
            try:
                described.ParseFromString(data[match.start() : _end_of(data, match.start())])
            except DecodeError:
                continue  # bytes that look alike
            found[described.name] = described
    return found


class Messages:
    """The classes of the protocol's messages: attributes by their short names, such as `IfrtRequest`.

    Raises:
        UsageError: the installed jaxlib does not have the protocol.
    """

    def __init__(self, library: Path) -> None:
        files = dict(recovered(library))
        pool = descriptor_pool.DescriptorPool()
        added: set[str] = set()

        def add(name: str) -> None:
            if name in added:
                return
            added.add(name)
            if name not in files:
                raise UsageError(f"{library} does not describe {name}; the proxy needs jaxlib 0.10")
            for dependency in files[name].dependency:
                add(dependency)
            pool.AddSerializedFile(files[name].SerializeToString())

        for root in ROOTS:
            add(root)
        self._classes: dict[str, Any] = {}
        for name in added:
            for full_name in pool.FindFileByName(name).message_types_by_name.values():
                # Two packages have messages of one short name; those of IFRT are meant.
                if full_name.name not in self._classes or full_name.full_name.startswith("xla.ifrt."):
                    self._classes[full_name.name] = message_factory.GetMessageClass(full_name)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_classes"][name]
        except KeyError:
            raise AttributeError(f"the protocol has no message {name}") from None


@functools.cache
def messages() -> Messages:
    """The messages of the installed jaxlib."""
    return Messages(Path(jaxlib.__file__).parent / LIBRARY)
