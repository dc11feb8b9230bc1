"""Bodies are typed, and whatever is not of the type is one error, quickly."""

from __future__ import annotations

import tracemalloc

import msgpack
import msgspec
import pytest

from pdserve.errors import ProtocolError
from pdserve.messages import kv_events, request
from pdserve.token_ids import token_ids
from pdserve.wire import error_codec, handshake, protocol
from pdserve.wire.codec import (
    UNDECODABLE,
    Method,
    decoder,
    encode,
)


class Inner(msgspec.Struct, array_like=True, frozen=True):
    name: str
    numbers: tuple[int, ...] = ()


class Outer(msgspec.Struct, array_like=True, frozen=True):
    inner: Inner
    children: list["Outer"] = []
    payload: bytes = b""
    table: dict[str, Inner] = {}


decode = decoder(Outer)

BOMBS = {
    "empty": b"",
    "truncated": encode(Outer(Inner("x")))[:-1],
    "trailing bytes": encode(Outer(Inner("x"))) + b"\xc0",
    "another type": encode(["x", 1, 2]),
    "an array of four thousand million": b"\xdd\xff\xff\xff\xff",
    "nested arrays of that size": b"\xdd\xff\xff\xff\xff" * 200,
    "a map of that size": b"\x91\xdf\xff\xff\xff\xff",
    "a string of that size": b"\x92\x91\xdb\xff\xff\xff\xff",
    "a blob of that size": b"\x93\x91\xa1x\x90\xc6\xff\xff\xff\xff",
    "nesting in a field that is known": (b"\x92\x91\xa1x\x91" * 50_000),
    "nesting in a field that is not": b"\x95\x91\xa1x\x90\xc4\x00\x80" + b"\x91" * 100_000,
    "no UTF-8": b"\x91\x91\xa2\xff\xff",
    "an extension": b"\xc7\x08\x05" + bytes(8),
    "a reserved byte": b"\xc1",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_what_cannot_be_decoded_is_one_error_and_takes_no_room(bomb) -> None:
    with pytest.raises(ProtocolError, match="not a Outer"):
        decode(bomb)  # once before: the first error of its kind fills caches
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(bomb)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (64 << 10) + len(bomb), "whatever size the bytes claim"


def test_a_method_has_a_number_of_sixteen_bits() -> None:
    with pytest.raises(ValueError, match="16 bits"):
        Method(1 << 16, "large", Outer, Outer)
    method = Method(7, "some", Inner, Outer)
    assert repr(method) == "Method(7, 'some')"
    assert method.decode_request(encode(Inner("x"))) == Inner("x")
    with pytest.raises(UNDECODABLE) as caught:
        method.unpack_reply(b"\xc0")
    assert "the answer to some is no Outer" in str(method.bad_reply(caught.value))


def test_later_fields_are_skipped_and_missing_ones_filled() -> None:
    longer = [["x", [1, 2], "added later"], [], b"p", {}, {"also": ["added", [1, 2]]}]
    assert decode(encode(longer)) == Outer(Inner("x", (1, 2)), payload=b"p")
    assert decode(encode([["x"]])) == Outer(Inner("x"))


def bodies() -> list[msgspec.Struct]:
    """One of every record of the wire, and a sample of those that travel in its bodies."""
    return [
        handshake.Hello("pdserve", 1, 2, 3, b"n" * 32),
        handshake.Challenge(1, 0, b"n" * 32),
        handshake.Auth(b"p" * 32, encode(handshake.IdentityClaim("c", "n", 5))),
        handshake.IdentityClaim("cluster", "node", 12345, "host:7000", 1, b"s" * 16),
        handshake.Refuse(3, "text"),
        protocol.GoAway(0, "bye"),
        error_codec.Failure("Overloaded", "busy", 1.5, "n"),
        request.GenerateRequest(
            request_id="r",
            model="m",
            prompt=token_ids([1, 2]),
            sampling=request.SamplingParams(max_tokens=1),
        ),
        kv_events.BlockStored([b"h" * 16], b"p" * 16),
    ]


@pytest.mark.parametrize("body", bodies(), ids=lambda body: type(body).__name__)
def test_every_body_decodes_with_the_plain_package(body) -> None:
    plain = msgpack.unpackb(encode(body), strict_map_key=True)
    assert isinstance(plain, list)
    assert decoder(type(body))(msgpack.packb(plain)) == body
