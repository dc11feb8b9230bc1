"""Messages about requests, random and mutated; `tests/fuzz` runs the same for longer."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pdserve.errors import ProtocolError
from pdserve.ids import MAX_CHOICES
from pdserve.messages.worker_stream import OpenRequest
from pdserve.wire.codec import encode
from tests.fuzz import fuzz_messages
from tests.support.seeds import is_long


@pytest.mark.timeout(900 if is_long() else 60)
def test_mutated_messages_are_read_or_refused(seed, long) -> None:
    numbers, seeds = random.Random(seed), fuzz_messages.seeds()
    for seed_input in seeds:
        fuzz_messages.fuzz(seed_input)
    for _ in range(4000 * (100 if long else 1)):
        data = bytearray(numbers.choice(seeds))
        for _ in range(numbers.choice((1, 1, 2, 4))):
            at = numbers.randrange(len(data)) if data else 0
            match numbers.randrange(4):
                case 0:
                    data[at : at + 1] = numbers.randbytes(1)
                case 1:
                    data[at:at] = numbers.choice(
                        (b"\xc0", b"\x90", b"\xcf" + b"\xff" * 8, b"\xa1a")
                    )
                case 2:
                    del data[at : at + numbers.randint(1, 5)]
                case _:
                    data += data[at : at + 20]
        try:
            fuzz_messages.fuzz(bytes(data))
        except Exception as error:
            error.add_note(f"input: {data.hex()}")
            raise


@settings(max_examples=2000 if is_long() else 100)
@given(data=st.binary(max_size=200))
def test_whatever_comes_is_read_or_refused(data) -> None:
    fuzz_messages.fuzz(data)


def test_there_is_a_good_example_of_every_message_of_a_channel() -> None:
    good = [data for data in fuzz_messages.seeds() if len(data) > 2]
    assert len(good) == 8
    for data in good:
        fuzz_messages.DECODERS[data[0]](data[1:])


def test_nobody_has_to_count_to_what_a_peer_says() -> None:
    request = replace(fuzz_messages.request(), n=MAX_CHOICES + 1, ended=(1,))
    with pytest.raises(ProtocolError):
        fuzz_messages.DECODERS[0](encode(OpenRequest(1, 0, request)))
