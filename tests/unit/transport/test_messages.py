"""Messages: each survives the wire, and what is no message is a `WireError`, quickly."""

from __future__ import annotations

import random
import types
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_ray import limits
from pathways_ray.client.coalesce import LENGTHS
from pathways_ray.errors import Failure, WireError
from pathways_ray.ir.types import ArrayType, Spec
from pathways_ray.transport import messages
from pathways_ray.transport.messages import (
    TO_CONTROLLER,
    Codec,
    Completed,
    Drop,
    EarlyLaunch,
    Free,
    IslandLaunch,
    Launch,
    LaunchEarly,
    Message,
    Put,
    encode,
)
from tests.unit.strategies import repeatable

CODECS: dict[str, Codec[Any]] = {name: value for name, value in vars(messages).items() if isinstance(value, Codec)}
FAMILIES = {name: getattr(messages, camel) for name, camel in {
    "TO_CONTROLLER": "ToController",
    "TO_CLIENT": "ToClient",
    "TO_ISLAND": "ToIsland",
    "TO_HOST": "ToHost",
    "FROM_HOST": "FromHost",
    "FROM_ISLAND": "FromIsland",
    "FROM_LEADER": "FromLeader",
    "TO_HOST_DATA": "ToHostData",
    "FROM_HOST_DATA": "FromHostData",
    "REQUEST": "Request",
    "REPLY": "Reply",
}.items()}  # fmt: skip
KINDS = [(name, kind) for name, family in FAMILIES.items() for kind in typing.get_args(family)]
IDS = st.integers(0, 2**40)


def strategy(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type as messages use them."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and args[-1] is not Ellipsis:
        return st.tuples(*(strategy(arg) for arg in args))
    if origin is tuple:
        return st.lists(strategy(args[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(strategy(args[0]), strategy(args[1]), max_size=2)
    if origin in (types.UnionType, typing.Union):
        return st.one_of([strategy(arg) for arg in args])
    if origin is typing.Annotated:
        meta = args[1]
        least, most = getattr(meta, "ge", None), getattr(meta, "le", None)
        return strategy(args[0]) if least is None else st.integers(least, 2**40 if most is None else most)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        hints = typing.get_type_hints(hint, include_extras=True)
        return st.builds(hint, **{name: strategy(hints[name]) for name in hint.__struct_fields__})
    simple = {int: IDS, str: st.text(max_size=8), bytes: st.binary(max_size=8), bool: st.booleans()}
    simple |= {
        float: st.floats(0.0, allow_nan=False),
        memoryview: st.binary(max_size=8).map(lambda data: memoryview(data)),
    }
    return simple[hint] if hint in simple else st.none()


def some(kind: type[Message], seed: int) -> Message:
    """One message of a kind with something in every field, without Hypothesis."""
    hints = typing.get_type_hints(kind)
    return kind(*(_some(hints[field.name], seed) for field in msgspec.structs.fields(kind)))


def _some(hint: Any, seed: int) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and args[-1] is not Ellipsis:
        return tuple(_some(arg, seed + k) for k, arg in enumerate(args))
    if origin is tuple:
        return tuple(_some(args[0], seed + k) for k in range(2))
    if origin is dict:
        return {_some(args[0], seed): _some(args[1], seed)}
    if origin in (types.UnionType, typing.Union, typing.Annotated):
        return _some(args[0], seed)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return some(hint, seed)  # type: ignore[arg-type]
    return {int: seed + 3, str: f"s{seed}", bytes: b"abc", memoryview: memoryview(b"abc"), bool: True, float: 0.5}[hint]


def test_every_codec_has_its_family_here() -> None:
    assert set(CODECS) == set(FAMILIES)


@pytest.mark.parametrize(("codec", "kind"), KINDS, ids=[f"{codec}-{kind.__name__}" for codec, kind in KINDS])
@repeatable(8)
@given(data=st.data())
def test_every_message_survives_the_wire(codec: str, kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(strategy(kind))
    assert CODECS[codec].decode(encode(message)) == message
    assert CODECS[codec].decode_batch(encode([message, message])) == [message, message]


def test_tags_are_unique() -> None:
    kinds = {kind for _, kind in KINDS}
    assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds)


def test_a_reader_ignores_fields_it_does_not_know() -> None:
    tag = Free.__struct_config__.tag
    assert CODECS["TO_CONTROLLER"].decode(encode([tag, [1, 2], "new in version 2", {"a": [1]}])) == Free((1, 2))


def test_a_field_with_a_default_may_be_left_out() -> None:
    tag = IslandLaunch.__struct_config__.tag
    assert CODECS["TO_HOST"].decode(encode([tag, 1, 2, 3, [4], 5])) == IslandLaunch(1, 2, 3, (4,), 5)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        encode(None),
        encode({}),
        encode([]),
        encode([999, 1]),
        encode(["Free", [1]]),
        encode([4]),
        encode([4, [1.5]]),
        encode([4, ["1"]]),
        encode([4, 1]),
        encode(Completed((1,))),
        encode(Free((1,)))[:-1],
        encode(Free((1,))) + b"\x00",
        b"\x92\x04\xdd\xff\xff\xff\xff",
        b"\x94\x01\x01\xc6\xff\xff\xff\xff",
        b"\x94\x01\x01\xc4\x00\xdf\xff\xff\xff\xff",
        b"\x93\x04\x91\x01" + b"\x91" * 100_000 + b"\x01",
        b"\x91" * 100_000,
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    """Of another family, too short, too long, wrong types, lengths that lie, nesting without end."""
    with pytest.raises(WireError, match=f"message of {len(data)} bytes refused"):
        CODECS["TO_CONTROLLER"].decode(data)
    with pytest.raises(WireError):
        CODECS["TO_CONTROLLER"].decode_batch(b"\x91" + data)


def test_a_client_hands_over_no_call_under_numbers_of_the_controller() -> None:
    """A host takes calls under numbers below 0, which other hosts hand over, for no tenant in particular."""
    codec, call = CODECS["TO_HOST_DATA"], LaunchEarly(1, (), 0)
    assert codec.decode(encode(call)) == call
    for number in (-1, -(2**40)):
        with pytest.raises(WireError, match="refused"):
            codec.decode(encode(LaunchEarly(1, (), number)))
        with pytest.raises(WireError, match="refused"):
            codec.decode(encode(LaunchEarly(1, (number,), 0)))


@pytest.mark.parametrize("number", [0, 2**40, 2**62, 2**63, 2**64 - 2, 2**64 - 1])
def test_results_numbered_from_an_id_that_is_accepted_can_be_named(number: int) -> None:
    """A launch says where its results start; the controller counts on from there and must be able to send what it gets.

    A number at the end of what the wire can carry would break the stream of an island, and with it all tenants.
    """
    try:
        launch = CODECS["TO_CONTROLLER"].decode(encode([Launch.__struct_config__.tag, 1, 1, [], number]))
    except WireError:
        assert number >= 2**62, "no client gets there"
        return
    dropped = Drop(1, (launch.results, launch.results + limits.MAX_NODES))
    assert CODECS["TO_HOST"].decode(encode(dropped)) == dropped


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The bytes with a few bits turned, cut off, replaced, repeated or wrapped up deeply."""
    kind = rng.randrange(6)
    if kind == 0:
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if kind == 1:
        return data[: rng.randrange(len(data))]
    if kind == 2:
        return rng.randbytes(rng.randint(0, 40))
    at = rng.randrange(len(data) + 1)
    if kind == 3:
        return data[:at] + rng.randbytes(rng.randint(1, 6)) + data[at + 1 :]
    if kind == 4:
        return data[:at] + data
    return data[:at] + rng.choice((b"\x91", b"\x81\x01", b"\xdd\xff\xff\xff\xff")) * rng.randint(1, 3000) + data[at:]


def test_whatever_arrives_is_a_message_or_an_error() -> None:
    """20,000 broken messages of all kinds; nothing but `WireError` comes out, and nothing that is no message."""
    rng = random.Random(7)
    valid = [(CODECS[codec], kind, encode(some(kind, 40))) for codec, kind in KINDS]
    accepted = 0
    for number in range(20_000):
        codec, _, data = valid[number % len(valid)]
        broken = mutated(data, rng)
        try:
            found = codec.decode(broken)
        except WireError:
            continue
        assert isinstance(found, Message)
        assert codec.decode(encode(found)) == found
        accepted += 1
    assert 0 < accepted < 20_000, "the mutations are neither all harmless nor all fatal"


def test_broken_batches_too() -> None:
    rng = random.Random(8)
    valid = [(CODECS[codec], encode([some(kind, 40), some(kind, 5)])) for codec, kind in KINDS]
    for number in range(5_000):
        codec, data = valid[number % len(valid)]
        try:
            found = codec.decode_batch(mutated(data, rng))
        except WireError:
            continue
        assert all(isinstance(message, Message) for message in found)


def test_messages_cannot_be_changed() -> None:
    message = Free((1,))
    with pytest.raises(AttributeError):
        message.buffers = ()
    assert hash(Failure("a", "b")) == hash(Failure("a", "b"))


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_steady_launch_is_under_a_hundred_bytes(size: str) -> None:
    """Three arguments, and ids as large as ten thousand launches a second for a year make them."""
    big = 2**39 if size == "large" else 1
    launch = Launch(big, 2**16, (big, big + 1, big + 2), big + 3)
    run = IslandLaunch(big, 2**20, 2**20, (big, big + 1, big + 2), big + 3)
    assert len(encode(launch)) <= 100
    assert len(encode(run)) <= 100
    assert len(encode(IslandLaunch(1, 1, 1, (1,), 2))) <= 16


@pytest.mark.parametrize("number", [-1, 1 << 62, (1 << 64) - 1])
@pytest.mark.parametrize("kind", [2, 6, 7, 8])
def test_the_number_of_a_launch_fits_into_a_record_of_it(kind: int, number: int) -> None:
    assert CODECS["TO_CONTROLLER"].decode(encode([kind, 5, 1, [], 7]))
    with pytest.raises(WireError):
        CODECS["TO_CONTROLLER"].decode(encode([kind, number, 1, [], 7]))
    with pytest.raises(WireError):
        CODECS["TO_CONTROLLER"].decode(encode([91, number]))


@pytest.mark.parametrize("spec", [((),) * 65, (("x",) * 65,)])
def test_a_spec_of_more_entries_than_an_array_has_dimensions_is_no_message(spec: Spec) -> None:
    """A text of a million of them takes a second to write."""
    with pytest.raises(WireError, match="length <= 64"):
        CODECS["TO_CONTROLLER"].decode(encode(Put(1, 1, ArrayType((8,), "int8"), spec)))


def test_no_more_launches_leave_as_one_than_a_client_may_have_begun() -> None:
    """A longer list is refused before anything of it is looked at."""
    most = EarlyLaunch(1, 1, (), 1, covers=tuple(range(limits.MAX_COVERED)))
    assert TO_CONTROLLER.decode(encode(most)) == most
    with pytest.raises(WireError):
        TO_CONTROLLER.decode(encode(EarlyLaunch(1, 1, (), 1, covers=tuple(range(limits.MAX_COVERED + 1)))))
    assert max(LENGTHS) <= limits.MAX_COVERED
