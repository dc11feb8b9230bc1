"""A version and the next work together: what a later version adds, this one steps over.

The later version is played by this code, told to offer more, and by bytes that only it would send.
"""

from __future__ import annotations

import msgpack
import pytest

from pdserve.wire import events as ev
from pdserve.wire.codec import PACKED_IDS, encode
from pdserve.wire.error_codec import Failure
from pdserve.wire.handshake import PROTOCOL, DialerHandshake, Versions
from pdserve.wire.header import HEADER, HEADER_BYTES, FrameFlag, FrameKind
from pdserve.wire.protocol import ConnectionState
from tests.wire.support import acceptor, asked, dialler, move, only, pair, shake, taken

NOW = Versions()
NEXT = Versions(PROTOCOL, PROTOCOL + 1, features=0b11)
AFTER_NEXT = Versions(PROTOCOL + 1, PROTOCOL + 2)


def longer(data: bytes, *added: object) -> bytes:
    """Frames whose msgpack bodies have more fields at the end, as a later version's would."""
    out = b""
    while data:
        length, *rest = HEADER.unpack_from(data)
        body = data[HEADER_BYTES : HEADER_BYTES + length]
        data = data[HEADER_BYTES + length :]
        if body:
            body = msgpack.packb([*msgpack.unpackb(body), *added])
        out += HEADER.pack(len(body), *rest) + body
    return out


@pytest.mark.parametrize(("ours", "theirs"), [(NOW, NEXT), (NEXT, NOW), (NOW, NOW)])
def test_two_versions_speak_the_older_one(ours, theirs) -> None:
    d, a = dialler(versions=ours), acceptor(versions=theirs)
    at_d, _ = shake(d, a)
    assert d.state is a.state is ConnectionState.OPEN
    assert at_d[0].spoken.version == PROTOCOL
    assert at_d[0].spoken.features == NOW.features == PACKED_IDS
    call = d.send_request(7, b"q", 100, "c")
    a.respond(asked(only(move(d, a), ev.RequestsReceived))[0], b"a")
    assert only(move(a, d), ev.AnswersReceived).answers == [("c", b"a")]
    assert call


def test_versions_two_apart_do_not() -> None:
    d, a = dialler(versions=NOW), acceptor(versions=AFTER_NEXT)
    shake(d, a)
    assert d.state is a.state is ConnectionState.ENDED


def test_a_later_handshake_may_say_more() -> None:
    """The proof covers the bytes as they travelled, known fields or not."""
    d, a = dialler(), acceptor()
    extra = ("new", [1, {"deep": [2]}], None)
    hello = taken(d)
    # A dialler of the next version made its proof over what it sent: let it have sent this.
    assert isinstance(d._handshake, DialerHandshake)
    d._handshake.hello = longer(hello, *extra)[HEADER_BYTES:]
    a.receive_data(longer(hello, *extra))
    d.receive_data(taken(a))
    a.receive_data(longer(taken(d), *extra))
    assert a.state is ConnectionState.JUDGING
    a.accept(b"")
    only(d.receive_data(longer(taken(a), *extra)), ev.ConnectionReady)


def test_later_bodies_may_have_more_fields() -> None:
    d, a = pair()
    call = d.send_request(7, encode(["q"]), 100, "c")
    move(d, a)
    failure = [*msgpack.unpackb(encode(Failure("Overloaded", "busy"))), "added", {"later": 1}]
    body = encode(failure)
    error = HEADER.pack(len(body), FrameKind.ERROR, 0, 0, call, 0) + body
    assert only(d.receive_data(error), ev.RequestFailed).error.message == "busy"
    a.send_goaway(0, "bye")
    assert only(d.receive_data(longer(taken(a), 1, 2)), ev.GoingAway).message == "bye"


def test_an_error_of_a_later_version_is_still_an_error() -> None:
    d, a = pair()
    call = d.send_request(7, encode(["q"]), 100, "c")
    move(d, a)
    body = encode(["InventedLater", "reason"])
    error = HEADER.pack(len(body), FrameKind.ERROR, 0, 0, call, 0) + body
    assert only(d.receive_data(error), ev.RequestFailed).error.message == "InventedLater: reason"


def test_later_kinds_are_skipped_if_they_say_so() -> None:
    _, a = pair()
    for kind in (0, 6, 20, 60, 255):
        later = HEADER.pack(9, kind, FrameFlag.IGNORABLE, 3, 4, 5) + b"\xc1" * 9
        assert a.receive_data(later) == []
    assert a.state is ConnectionState.OPEN


def test_later_goodbyes_and_spare_bytes_are_understood_as_far_as_they_go() -> None:
    _, a = pair()
    ping = HEADER.pack(20, FrameKind.PING, 0, 0, 0, 7) + bytes(20)
    assert a.receive_data(ping) == []
    assert taken(a)[12:16] == (7).to_bytes(4, "big")
    body = encode([15, "a reason of the future", "more"])
    going = only(
        a.receive_data(HEADER.pack(len(body), FrameKind.GOAWAY, 0, 0, 0, 0) + body), ev.GoingAway
    )
    assert going.code == 15
