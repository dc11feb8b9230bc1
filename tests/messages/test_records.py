"""Records on the wire: readable without this code, and by older and newer versions of it."""

from __future__ import annotations

import inspect
import typing
from typing import Any

import msgpack
import msgspec
import pytest

from pdserve.messages import (
    card,
    engine,
    handoff,
    kv_events,
    node,
    request,
    routing,
    status,
    trace,
    transfer,
    worker_stream,
)
from pdserve.wire.codec import encode

if typing.TYPE_CHECKING:
    from types import ModuleType

MODULES: list[ModuleType] = [
    card,
    worker_stream,
    engine,
    handoff,
    kv_events,
    node,
    request,
    routing,
    status,
    trace,
    transfer,
]
RECORDS: list[type[msgspec.Struct]] = sorted(
    {
        found
        for module in MODULES
        for _, found in inspect.getmembers(module, inspect.isclass)
        if issubclass(found, msgspec.Struct) and found.__module__ == module.__name__
    },
    key=lambda record: record.__name__,
)
UNIONS = {
    "Command": engine.Command,
    "Control": transfer.TransferControl,
    "Event": engine.Event,
    "KvEvent": kv_events.KvEvent,
    "NamesChange": kv_events.HashesChange,
}


def example(kind: Any) -> Any:
    """A value of a type, with something in every field."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind, include_extras=True)
        return kind(**{name: example(hints[name]) for name in kind.__struct_fields__})
    if isinstance(kind, typing.NewType):
        return example(kind.__supertype__)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return within(example(arguments[0]), arguments[1:])
    if origin is list:
        return [example(arguments[0])]
    if origin is tuple:
        return tuple(example(a) for a in arguments if a is not Ellipsis)
    if origin is dict:
        return {example(arguments[0]): example(arguments[1])}
    if origin is typing.Literal:
        return arguments[0]
    if arguments:  # a union: its first member that is not None
        return example(next(a for a in arguments if a is not type(None)))
    return {int: 300, float: 0.5, str: "é", bool: True, bytes: b"\x00\xff" * 8}[kind]


def within(value: Any, bounds: tuple[msgspec.Meta, ...]) -> Any:
    """The value, if it keeps to the bounds, else one that does."""
    for bound in bounds:
        if bound.le is not None:
            value = min(value, bound.le)
        if bound.max_length is not None and len(value) > bound.max_length:
            value = value[: bound.max_length]
    return value


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_survives_the_trip(record: type[msgspec.Struct]):
    value = example(record)
    assert msgspec.msgpack.decode(encode(value), type=record) == value


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_is_an_array_that_plain_msgpack_reads(record: type[msgspec.Struct]):
    plain = msgpack.unpackb(encode(example(record)), strict_map_key=False)
    assert isinstance(plain, list)
    tagged = record.__struct_config__.tag is not None
    assert len(plain) == len(record.__struct_fields__) + tagged


@pytest.mark.parametrize("record", RECORDS)
def test_fields_of_a_newer_version_are_skipped(record: type[msgspec.Struct]):
    value = example(record)
    newer = [*msgpack.unpackb(encode(value), strict_map_key=False), "new", 1]
    assert msgspec.msgpack.decode(msgpack.packb(newer), type=record) == value


@pytest.mark.parametrize("record", RECORDS)
def test_records_cannot_be_changed(record: type[msgspec.Struct]):
    assert record.__struct_config__.frozen
    assert record.__struct_config__.array_like


@pytest.mark.parametrize("name", UNIONS)
def test_tags_of_a_union_are_small_integers_and_unique(name: str):
    tags = [member.__struct_config__.tag for member in typing.get_args(UNIONS[name])]
    assert len(tags) == len(set(tags))
    assert all(isinstance(tag, int) and 0 < tag < 128 for tag in tags)


@pytest.mark.parametrize("name", UNIONS)
def test_members_of_a_union_are_told_apart(name: str):
    for member in typing.get_args(UNIONS[name]):
        value = example(member)
        decoded = msgspec.msgpack.decode(encode(value), type=UNIONS[name])
        assert type(decoded) is member
        assert decoded == value


def test_a_delta_of_one_token_is_a_few_bytes():
    delta = request.TokenDelta(1000, 0, [70000])
    assert len(encode(delta)) <= 15


@pytest.mark.parametrize("count", [-1, "1", 1.5])
def test_a_charge_cannot_be_negative_or_no_number(count: object):
    body = encode([7, "w1", 7, count, 10])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(body, type=routing.BookingRecord)


def test_a_booking_of_any_63_bits_travels():
    for booking in (0, (1 << 63) - 1):
        released = routing.ReleaseBooking(booking, "finished")
        encoded = encode(released)
        assert msgspec.msgpack.decode(encoded, type=routing.ReleaseBooking) == released
        assert msgpack.unpackb(encoded) == [booking, "finished", None]
