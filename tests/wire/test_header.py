"""The header is sixteen fixed bytes, and its numbers are fixed too."""

from __future__ import annotations

from pdserve.wire.header import HEADER, HEADER_BYTES, FrameFlag, FrameKind


def test_a_header_is_sixteen_big_endian_bytes() -> None:
    assert HEADER_BYTES == 16
    packed = HEADER.pack(0x01020304, 0x05, 0x06, 0x0708, 0x090A0B0C, 0x0D0E0F10)
    assert packed == bytes(range(1, 17))


def test_numbers_on_the_wire_never_change() -> None:
    numbers = {
        1: "HELLO CHALLENGE AUTH READY REFUSE",
        16: "PING PONG GOAWAY BULK",
        32: "TELL REQUEST RESPONSE ERROR CANCEL",
        48: "OPEN DATA END RESET CREDIT",
    }
    assert {int(kind): kind.name for kind in FrameKind} == {
        first + i: name for first, names in numbers.items() for i, name in enumerate(names.split())
    }
    assert {flag.name: int(flag) for flag in FrameFlag} == {"RAW": 1, "LAST": 2, "IGNORABLE": 128}
