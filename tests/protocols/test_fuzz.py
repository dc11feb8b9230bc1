"""Requests, models' markup, templates and grammars, mutated; `tests/fuzz` runs the same for longer.

Each target says itself what must hold. A mutation takes a good example and damages it in a few
places with pieces of others, as that is what reaches into parsers.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.fuzz import fuzz_markup, fuzz_requests, fuzz_structures, fuzz_templates
from tests.support.seeds import is_long

if TYPE_CHECKING:
    from collections.abc import Iterator

TARGETS: dict[str, tuple[Any, int]] = {
    "requests": (fuzz_requests, 3000),
    "markup": (fuzz_markup, 1500),
    "templates": (fuzz_templates, 300),
    "structures": (fuzz_structures, 20),
}
"""By name, with the inputs of a short run."""


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    yield
    fuzz_structures.close()


def damaged(seeds: list[bytes], numbers: random.Random) -> bytes:
    data = bytearray(numbers.choice(seeds))
    for _ in range(numbers.choice((1, 1, 2, 4))):
        at, other = numbers.randrange(len(data) + 1), numbers.choice(seeds)
        begin = numbers.randrange(len(other) + 1)
        match numbers.randrange(5):
            case 0:
                data[at : at + 1] = numbers.randbytes(1)
            case 1:
                del data[at : at + numbers.randint(1, 8)]
            case 2:
                data[at:at] = other[begin : begin + numbers.randint(1, 40)]
            case 3:
                data[at:at] = bytes(data[at : at + 12]) * numbers.randint(1, 6)
            case _:
                data[at : at + 1] = numbers.choice(
                    (b"{", b"[", b'"', b"\\", b"<", b"\xc3", b"\0", b"9" * 30, b"\xf0\x9f\x98\x80")
                )
    return bytes(data)


@pytest.mark.timeout(1800 if is_long() else 90)
@pytest.mark.parametrize("name", TARGETS)
def test_whatever_comes_is_taken_or_refused(name: str, seed: int, long: bool) -> None:
    target, count = TARGETS[name]
    numbers, seeds = random.Random(seed), target.seeds()
    inputs = [*seeds, *(damaged(seeds, numbers) for _ in range(count * (30 if long else 1)))]
    for data in inputs:
        try:
            target.fuzz(data)
        except Exception as error:
            error.add_note(f"input: {data!r}")
            raise
