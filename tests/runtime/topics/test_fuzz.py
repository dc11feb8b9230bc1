"""A log's messages, harmed in every way; `tests/fuzz` runs the same for longer."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz import fuzz_topics
from tests.support.seeds import is_long


@pytest.mark.timeout(1800 if is_long() else 60)
def test_a_reader_has_the_publishers_state_whatever_it_heard(seed, long) -> None:
    numbers, seeds = random.Random(seed), fuzz_topics.seeds()
    scripts = seeds + [
        b"".join(numbers.choices(seeds, k=2)) + numbers.randbytes(numbers.randint(0, 300))
        for _ in range(60 * (100 if long else 1))
    ]
    for data in scripts:
        try:
            fuzz_topics.fuzz(data)
        except Exception as error:
            error.add_note(f"input: {data.hex()}")
            raise


@settings(max_examples=2000 if is_long() else 50)
@given(data=st.binary(max_size=300))
def test_a_reader_survives_whatever_it_hears(data) -> None:
    fuzz_topics.fuzz(data)
