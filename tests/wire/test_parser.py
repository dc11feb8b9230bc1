"""Frames are the same however their bytes are cut, and nothing is kept that a limit forbids."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ProtocolError
from pdserve.wire.header import HEADER, HEADER_BYTES, FrameFlag, FrameKind
from pdserve.wire.limits import IGNORED_BODY, LARGE, Limits
from pdserve.wire.parser import FrameParser
from tests.wire.support import splits

TABLE = Limits().table()


def frame(
    kind: int, body: bytes = b"", *, flags: int = 0, stream: int = 0, value: int = 0
) -> bytes:
    return HEADER.pack(len(body), kind, flags, 0, stream, value) + body


frames = st.one_of(
    st.builds(
        frame, st.just(FrameKind.REQUEST), st.binary(max_size=200), stream=st.integers(0, 99)
    ),
    st.builds(frame, st.just(FrameKind.END)),
    st.builds(
        lambda seed, size: frame(FrameKind.TELL, random.Random(seed).randbytes(size)),
        st.integers(0, 9),
        st.integers(LARGE - 2, 3 * LARGE),
    ),
)


def expected(data: list[bytes]) -> list[tuple[tuple[int, ...], bytes]]:
    return [(HEADER.unpack_from(one), one[HEADER_BYTES:]) for one in data]


@given(st.lists(frames, max_size=6), st.integers(0, 1 << 32))
def test_any_split_gives_the_same_frames(data, seed) -> None:
    parser = FrameParser(TABLE)
    found = []
    for piece in splits(b"".join(data), random.Random(seed)):
        found += parser.feed(piece)
    assert found == expected(data)
    assert parser.pending == 0


@given(st.lists(frames, min_size=1, max_size=4), st.data())
def test_a_truncated_stream_never_yields_the_frame_that_is_cut(data, draw) -> None:
    whole = b"".join(data)
    cut = draw.draw(st.integers(0, len(whole) - 1))
    found = FrameParser(TABLE).feed(whole[:cut])
    assert found == expected(data)[: len(found)]
    assert sum(HEADER_BYTES + len(body) for _, body in found) <= cut


def test_a_large_body_can_be_received_in_place() -> None:
    body = random.Random(1).randbytes(100_000)
    parser = FrameParser(TABLE)
    whole = frame(FrameKind.TELL, body)
    assert parser.feed(whole[:1000]) == []
    found = []
    position = 1000
    while (wanted := parser.wanted()) is not None:
        size = min(7000, len(wanted))
        wanted[:size] = whole[position : position + size]
        position += size
        found += parser.filled(size)
    assert position == len(whole)
    ((_, received),) = found
    assert received == body


@pytest.mark.parametrize(
    "header",
    [
        HEADER.pack(Limits().body + 1, FrameKind.TELL, 0, 0, 0, 0),
        HEADER.pack(0xFFFF_FFFF, FrameKind.RESPONSE, 0, 0, 0, 0),
        HEADER.pack(300, FrameKind.PING, 0, 0, 0, 0),
        HEADER.pack(5000, FrameKind.ERROR, 0, 0, 0, 0),
        HEADER.pack(0, FrameKind.HELLO, 0, 0, 0, 0),
        HEADER.pack(0, 200, 0, 0, 0, 0),
        HEADER.pack(IGNORED_BODY + 1, 200, FrameFlag.IGNORABLE, 0, 0, 0),
        b"GET / HTTP/1.1\r\n",
    ],
)
def test_a_bad_header_is_refused_before_anything_of_the_body(header) -> None:
    with pytest.raises(ProtocolError):
        FrameParser(TABLE).feed(header)


def test_an_unknown_frame_that_may_be_ignored_passes() -> None:
    found = FrameParser(TABLE).feed(
        frame(200, b"future", flags=FrameFlag.IGNORABLE) + frame(FrameKind.END)
    )
    assert [header[1] for header, _ in found] == [200, FrameKind.END]


def test_one_frame_at_a_time_leaves_the_rest_for_another_table() -> None:
    parser = FrameParser(TABLE, single=True)
    assert len(parser.feed(frame(FrameKind.END) + frame(FrameKind.HELLO))) == 1
    parser.table = dict.fromkeys(range(256), 9)  # type: ignore[assignment]
    ((header, _),) = parser.feed(b"")
    assert header[1] == FrameKind.HELLO
