"""The fuzz targets on random and on mutated recorded input; `tests/fuzz` runs them for longer."""

from __future__ import annotations

import gc
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.wire.protocol import Connection
from tests.fuzz import fuzz_codec, fuzz_frames, fuzz_handshake
from tests.support.seeds import is_long

ROUNDS = 1500
TARGETS = [fuzz_frames, fuzz_handshake, fuzz_codec]


def mutated(seeds: list[bytes], numbers: random.Random) -> bytes:
    """A few recorded inputs, one behind the other, with bits flipped, pieces cut or repeated."""
    data = bytearray(numbers.randbytes(1))
    for seed in numbers.choices(seeds, k=numbers.randint(1, 6)):
        data += seed[1:]
    for _ in range(numbers.choice((0, 1, 1, 3, 10))):
        position = numbers.randrange(len(data))
        match numbers.randrange(5):
            case 0:
                data[position] ^= 1 << numbers.randrange(8)
            case 1:
                data[position] = numbers.choice((0, 1, 127, 128, 255, 0xDD, 0x91, 0xC1))
            case 2:
                del data[position : position + numbers.randint(1, 20)]
            case 3:
                data[position:position] = numbers.randbytes(numbers.randint(1, 20))
            case _:
                data += data[position : position + numbers.randint(1, 5000)]
        if not data:
            return b"\0"
    return bytes(data)


@pytest.mark.timeout(900)  # in long mode
@pytest.mark.parametrize("target", TARGETS)
def test_targets_survive_mutated_sessions(target, seed, long) -> None:
    numbers, seeds = random.Random(seed), target.seeds()
    for _ in range(ROUNDS * (100 if long else 1)):
        data = mutated(seeds, numbers)
        try:
            target.fuzz(data)
        except Exception as error:
            error.add_note(f"input: {data.hex()}")
            raise
    for size in (0, 1, 15, 16, 17, 5000):
        target.fuzz(numbers.randbytes(size))


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=2000 if is_long() else 150)
@given(data=st.binary(max_size=300))
def test_targets_survive_whatever_comes(target, data) -> None:
    target.fuzz(data)


@pytest.mark.parametrize("target", [fuzz_frames, fuzz_handshake])
def test_nothing_is_left_of_a_connection_whatever_ended_it(target, seed) -> None:
    numbers, seeds = random.Random(seed), target.seeds()
    before = connections()
    for _ in range(100):
        target.fuzz(mutated(seeds, numbers))
    target.fuzz(b"\0nonsense, which is a violation in any state")
    assert len(connections() - before) == 0


def connections() -> set[Connection]:
    """Those that something still holds."""
    gc.collect()
    return {each for each in gc.get_objects() if type(each) is Connection}


@pytest.mark.parametrize("target", TARGETS)
def test_recorded_input_is_there_to_begin_with(target) -> None:
    seeds = target.seeds()
    assert len(seeds) == len(set(seeds)) > 10
    for seed in seeds:
        target.fuzz(seed)
