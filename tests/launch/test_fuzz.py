"""Files that people hand over, random and mutated; `tests/fuzz` runs the same for longer."""

from __future__ import annotations

import random

import pytest

from pdserve.errors import ConfigError
from tests.fuzz import fuzz_files
from tests.support.seeds import is_long

ROUNDS = 800
WORDS = (
    *(b"0", b"-1", b"9" * 30, b"9" * 5000, b"1e400", b"nan", b"inf", b"true", b"''", b'""'),
    *(b"[]", b"{}", b"[[key]]", b"[a.b]", b"\n", b"=", b"#", b'"', b"\\", b"\0", b"\xff", b","),
    *(b"2023-11-16", b"99999-01-01 00:00:00.0", b"\xef\xbb\xbf", b"\r", b"[" * 2000, b"{" * 2000),
    *(b'"4G"', b'"none"', b"1_000", b"0x7f", b"null", b'"\\ud800"', "\u2028".encode(), b"\x1b[2J"),
)


def mutated(seeds: list[bytes], numbers: random.Random) -> bytes:
    """A good file with values exchanged, lines repeated or lost, bytes changed."""
    data = bytearray(numbers.choice(seeds))
    for _ in range(numbers.choice((1, 1, 2, 5))):
        at = numbers.randrange(1, len(data)) if len(data) > 1 else 1
        match numbers.randrange(6):
            case 0:
                data[at:at] = numbers.choice(WORDS)
            case 1:
                end = data.find(b"\n", at) % (len(data) + 1)
                data[at:end] = numbers.choice(WORDS)
            case 2:
                begin = data.find(b"=", at) % (len(data) + 1) + 1
                end = data.find(b"\n", begin) % (len(data) + 1)
                data[begin:end] = numbers.choice(WORDS)
            case 3:
                del data[at : at + numbers.randint(1, 30)]
            case 4:
                data += data[at : at + numbers.randint(1, 200)]
            case _:
                data[at : at + 1] = numbers.randbytes(1)
    return bytes(data)


@pytest.mark.timeout(1800 if is_long() else 60)
def test_a_file_is_read_or_refused_in_words(seed, long) -> None:
    numbers, seeds = random.Random(seed), fuzz_files.seeds()
    inputs = [*seeds, *(bytes([kind]) for kind in range(len(fuzz_files.KINDS)))]
    inputs += [bytes([kind]) + numbers.randbytes(60) for kind in range(5) for _ in range(20)]
    rounds = ROUNDS * (100 if long else 1)
    for data in inputs + [mutated(seeds, numbers) for _ in range(rounds)]:
        try:
            fuzz_files.fuzz(data)
        except Exception as error:
            error.add_note(f"input: {data!r}")
            raise


@pytest.mark.parametrize("read", fuzz_files.KINDS)
def test_a_file_that_is_none_is_named(read, tmp_path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError) as caught:
            read(path)
        assert str(path) in caught.value.message
