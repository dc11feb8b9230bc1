"""The fuzz targets on random and on mutated recorded input; `tests/fuzz` runs them for longer."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.fuzz_codec import fuzz as fuzz_codec
from tests.fuzz.fuzz_frames import fuzz as fuzz_frames
from tests.fuzz.fuzz_handshake import fuzz as fuzz_handshake
from tests.wire.test_golden import golden

ROUNDS = 1500
HANDSHAKE_FRAMES = 4


def recorded(target: str) -> list[bytes]:
    """Frames that make good beginnings."""
    frames = [data for _, _, data in golden()]
    if target == "codec":
        return [frame[16:] for frame in frames]
    return frames[:HANDSHAKE_FRAMES] if target == "handshake" else frames[HANDSHAKE_FRAMES:]


def mutated(frames: list[bytes], numbers: random.Random) -> bytes:
    """A few frames in any order, with bits flipped, pieces cut, repeated or made up."""
    data = bytearray(numbers.choices(range(256))[0].to_bytes(1, "big"))
    for frame in numbers.choices(frames, k=numbers.randint(1, 6)):
        data += frame
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


@pytest.mark.parametrize(
    ("name", "target"),
    [("frames", fuzz_frames), ("handshake", fuzz_handshake), ("codec", fuzz_codec)],
)
def test_targets_survive_whatever_comes(name, target, seed, long) -> None:
    numbers = random.Random(seed)
    frames = recorded(name)
    for _ in range(ROUNDS * (100 if long else 1)):
        data = mutated(frames, numbers)
        try:
            target(data)
        except Exception as error:
            error.add_note(f"input: {data.hex()}")
            raise
    for size in (0, 1, 15, 16, 17, 5000):
        target(numbers.randbytes(size))


def test_recorded_input_reaches_beyond_the_first_check() -> None:
    """The mutations are no good if everything fails at once: most inputs pass some frames."""
    target = recorded("frames")
    assert len(target) > 15
    fuzz_frames(b"\xff" + b"".join(frame for frame in target if frame[4] in (16, 32, 33, 36)))
