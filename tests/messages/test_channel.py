from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import PayloadTooLarge, ProtocolError
from pdserve.messages import channel
from pdserve.messages.channel import PIECE_BYTES, Abort, Assembler, Open, Piece, split
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.wire.codec import decoder, encode

_decode: Any = decoder(Open | Abort | Piece)  # type: ignore[arg-type]


def put_together(frames: list[bytes]) -> bytes | None:
    assembler = Assembler()
    whole = None
    for frame in frames:
        assert whole is None, "more came after the last"
        whole = assembler.take(_decode(frame))
    return whole


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES])
def test_what_fits_a_frame_travels_as_it_is(size: int) -> None:
    body = b"x" * size
    assert split(body) == [body]


@pytest.mark.parametrize("size", [PIECE_BYTES + 1, 2 * PIECE_BYTES, 2 * PIECE_BYTES + 1])
def test_what_does_not_travels_in_pieces(size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    frames = split(body)
    assert max(map(len, frames)) < PIECE_BYTES + 64
    assert put_together(frames) == body


@given(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=9), st.integers(1, 3))
def test_an_assembler_is_used_again_and_again(parts: list[bytes], times: int) -> None:
    assembler = Assembler()
    for _ in range(times):
        last = len(parts) - 1
        taken = [assembler.take(Piece(part, at == last)) for at, part in enumerate(parts)]
        assert taken == [*[None] * last, b"".join(parts)]


def test_a_message_has_a_bound_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "LARGEST", 2 * PIECE_BYTES)
    with pytest.raises(PayloadTooLarge):
        split(b"x" * (2 * PIECE_BYTES + 1))
    assembler = Assembler()
    assembler.take(Piece(b"x" * 2 * PIECE_BYTES, last=False))
    with pytest.raises(ProtocolError):
        assembler.take(Piece(b"x", last=True))


def test_pieces_without_end_and_content_are_refused() -> None:
    assembler = Assembler()
    with pytest.raises(ProtocolError):
        assembler.take(Piece(b"", last=False))


@pytest.mark.parametrize("number", [-1, 1 << 63])
def test_numbers_are_those_that_every_language_has(number: int) -> None:
    with pytest.raises(ProtocolError):
        _decode(encode(Abort(number)))


def test_a_request_comes_back_as_it_was_sent() -> None:
    request = GenerateRequest(
        request_id="r", model="m", prompt=[1, 2], sampling=SamplingParams(max_tokens=3), n=2
    )
    assert _decode(encode(Open(5, 6, request))) == Open(5, 6, request)
