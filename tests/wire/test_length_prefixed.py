"""Frames: whatever way the bytes are split, the bodies come out whole and in order."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ProtocolError
from pdserve.wire.length_prefixed import FrameDecoder, encode_frame, encode_frames


@given(bodies=st.lists(st.binary(max_size=40), max_size=8), data=st.data())
def test_any_split_gives_the_same_bodies(bodies: list[bytes], data: st.DataObject):
    stream = encode_frames(bodies)
    decoder, seen = FrameDecoder(), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        seen += decoder.feed(stream[:cut])
        stream = stream[cut:]
    assert seen == bodies
    assert decoder.pending == 0


def test_an_incomplete_frame_is_kept_and_counted():
    decoder = FrameDecoder()
    assert decoder.feed(encode_frame(b"whole") + encode_frame(b"rest")[:6]) == [b"whole"]
    assert decoder.pending == 6
    assert decoder.feed(b"st") == [b"rest"]


def test_an_empty_body_is_a_body():
    assert FrameDecoder().feed(encode_frame(b"")) == [b""]


def test_the_limit_is_checked_at_the_header():
    decoder = FrameDecoder(limit=8)
    assert decoder.feed(encode_frame(b"12345678")) == [b"12345678"]
    with pytest.raises(ProtocolError, match="9 bytes"):
        decoder.feed(struct.pack(">I", 9))
    with pytest.raises(ProtocolError, match="limit of 8"):
        encode_frame(b"123456789", limit=8)


def test_a_long_frame_in_small_pieces_costs_one_copy():
    body = bytes(1 << 20)
    stream = encode_frame(body)
    decoder = FrameDecoder()
    seen = [b for i in range(0, len(stream), 1000) for b in decoder.feed(stream[i : i + 1000])]
    assert seen == [body]
