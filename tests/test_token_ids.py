"""Packed token ids: what they hold, how they travel, and what is refused."""

from __future__ import annotations

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve import accel
from pdserve.token_ids import (
    _largest_id_pure,
    listed_ids,
    packed_ids,
    token_ids,
    unpacked_ids,
)
from tests.support.seeds import is_long

EXAMPLES = 2000 if is_long() else 100
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
LARGEST = [
    pytest.param(_largest_id_pure, id="pure"),
    pytest.param(
        accel.native.largest_id if accel.NATIVE else None,
        id="native",
        marks=pytest.mark.skipif(not accel.NATIVE, reason=accel.REASON),
    ),
]


@settings(max_examples=EXAMPLES, deadline=None)
@given(IDS)
def test_ids_come_back_from_their_bytes_and_their_list(ids):
    packed = token_ids(ids)
    assert packed.tolist() == listed_ids(packed) == ids
    data = bytes(packed_ids(packed))
    assert data == b"".join(one.to_bytes(4, "little") for one in ids)
    assert unpacked_ids(data) == packed


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.binary(max_size=40))
def test_bytes_are_whole_ids_or_refused(data):
    if len(data) % 4 == 0:
        assert bytes(packed_ids(unpacked_ids(data))) == data
        return
    with pytest.raises(ValueError, match=f"4 bytes each, not {len(data)} together"):
        unpacked_ids(data)


@pytest.mark.parametrize("wrong", [-1, 2**32, 2**70])
def test_an_id_that_is_no_u32_is_refused(wrong):
    with pytest.raises(ValueError, match="must be in"):
        token_ids([1, wrong])


@pytest.mark.parametrize("wrong", ["1", 1.0, None])
def test_what_is_no_integer_is_refused(wrong):
    with pytest.raises(TypeError):
        token_ids([1, wrong])


@pytest.mark.parametrize("hook", [packed_ids, listed_ids])
def test_nothing_else_travels_as_ids(hook):
    for other in (object(), {1}, memoryview(b"1234").cast("I")):
        with pytest.raises(TypeError, match="do not travel"):
            hook(other)


@pytest.mark.parametrize("largest", LARGEST)
@settings(max_examples=EXAMPLES, deadline=None)
@given(ids=IDS)
def test_the_largest_id_is_found(largest, ids):
    assert largest(token_ids(ids)) == max(ids, default=0)


def test_an_encoder_writes_the_bytes_where_they_lie():
    ids = token_ids(range(1000))
    encoded = msgspec.msgpack.Encoder(enc_hook=packed_ids).encode(ids)
    assert msgpack.unpackb(encoded) == ids.tobytes()
