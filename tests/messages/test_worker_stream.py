from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import PayloadTooLarge, ProtocolError
from pdserve.messages import worker_stream
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.messages.worker_stream import (
    FRAGMENT_BYTES,
    AbortRequest,
    Fragment,
    FragmentAssembler,
    OpenRequest,
    split_message,
)
from pdserve.token_ids import token_ids
from pdserve.wire.codec import PACKED_IDS, decoder, encode, encoder_for

if TYPE_CHECKING:
    from collections.abc import Iterable

_decode: Any = decoder(OpenRequest | AbortRequest | Fragment)  # type: ignore[arg-type]


def put_together(frames: list[bytes]) -> bytes | None:
    assembler = FragmentAssembler()
    whole = None
    for frame in frames:
        assert whole is None, "more came after the last"
        whole = assembler.take(_decode(frame))
    return whole


@pytest.mark.parametrize("size", [0, 1, FRAGMENT_BYTES - 1, FRAGMENT_BYTES])
def test_what_fits_a_frame_travels_as_it_is(size: int) -> None:
    body = b"x" * size
    assert split_message(body) == [body]


@pytest.mark.parametrize("size", [FRAGMENT_BYTES + 1, 2 * FRAGMENT_BYTES, 2 * FRAGMENT_BYTES + 1])
def test_what_does_not_travels_in_pieces(size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    frames = split_message(body)
    assert max(map(len, frames)) < FRAGMENT_BYTES + 64
    assert put_together(frames) == body


@given(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=9), st.integers(1, 3))
def test_an_assembler_is_used_again_and_again(parts: list[bytes], times: int) -> None:
    assembler = FragmentAssembler()
    for _ in range(times):
        last = len(parts) - 1
        taken = [assembler.take(Fragment(part, at == last)) for at, part in enumerate(parts)]
        assert taken == [*[None] * last, b"".join(parts)]


def test_a_message_has_a_bound_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_stream, "MAX_MESSAGE_BYTES", 2 * FRAGMENT_BYTES)
    with pytest.raises(PayloadTooLarge):
        split_message(b"x" * (2 * FRAGMENT_BYTES + 1))
    assembler = FragmentAssembler()
    assembler.take(Fragment(b"x" * 2 * FRAGMENT_BYTES, last=False))
    with pytest.raises(ProtocolError):
        assembler.take(Fragment(b"x", last=True))


def test_pieces_without_end_and_content_are_refused() -> None:
    assembler = FragmentAssembler()
    with pytest.raises(ProtocolError):
        assembler.take(Fragment(b"", last=False))


@pytest.mark.parametrize("number", [-1, 1 << 63])
def test_numbers_are_those_that_every_language_has(number: int) -> None:
    with pytest.raises(ProtocolError):
        _decode(encode(AbortRequest(number)))


def test_a_request_comes_back_as_it_was_sent() -> None:
    request = GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids([1, 2]),
        sampling=SamplingParams(max_tokens=3),
        n=2,
    )
    assert _decode(encode(OpenRequest(5, 6, request))) == OpenRequest(5, 6, request)


# ---------------------------------------------------------------- token ids


IDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)
opened = decoder(OpenRequest)


def asked(ids: Iterable[int]) -> OpenRequest:
    request = GenerateRequest(
        request_id="r", model="m", prompt=token_ids(ids), sampling=SamplingParams(max_tokens=1)
    )
    return OpenRequest(1, 0, request)


@given(IDS, st.sampled_from([0, PACKED_IDS, PACKED_IDS | 4]))
def test_a_prompt_arrives_packed_whatever_its_sender_writes(ids, features):
    encoded = encoder_for(features)(asked(ids))
    on_wire = msgpack.unpackb(encoded)[3][2]
    assert on_wire == (token_ids(ids).tobytes() if features & PACKED_IDS else ids)
    assert opened(encoded) == asked(ids)


def test_an_older_peer_is_sent_the_list_of_its_release():
    _, number, booking, fields = msgpack.unpackb(encoder_for(0)(asked([5, 70_000])))
    assert (number, booking, fields[:3]) == (1, 0, ["r", "m", [5, 70_000]])


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        (b"12345", "4 bytes each, not 5 together"),
        (b"1", "4 bytes each, not 1 together"),
        ([1, -1], "must be in"),
        ([1, 2**32], "must be in"),
        ([1, 0.5], r"\[2\]\[2\]\[1\]|int"),
        ("text", r"str"),
        (7, r"int"),
    ],
)
def test_a_hostile_prompt_is_refused_with_its_reason(prompt, why):
    plain = msgpack.unpackb(encode(asked([1])))
    plain[3][2] = prompt
    with pytest.raises(ProtocolError, match=why):
        opened(msgpack.packb(plain))
