"""Samples are large enough, inside the payload, and from everywhere in the course of time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.transfer.verify import SAMPLE, Verify, covers, sampled_range, stricter

MODES: list[Verify] = ["off", "sample", "all"]


@given(st.sampled_from(MODES), st.integers(0, 1 << 24), st.integers(0, 1000))
def test_what_one_end_takes_the_other_accepts(verify: Verify, size: int, turn: int) -> None:
    assert covers(verify, size, sampled_range(verify, size, turn))


@given(st.integers(1, 5000))
def test_samples_come_from_every_byte(size: int) -> None:
    seen: set[int] = set()
    for turn in range(SAMPLE):
        seen.update(range(*sampled_range("sample", size, turn)))
    assert len(seen) == size


@pytest.mark.parametrize("checked", [(0, 15), (1, 16), (0, 17), (-1, 16), (16, 0)])
def test_less_than_all_is_not_all(checked: tuple[int, int]) -> None:
    assert not covers("all", 16, checked)


@pytest.mark.parametrize("checked", [(0, 0), (17, 18), (2, 1), (-1, 1)])
def test_a_sample_has_bytes_of_the_payload(checked: tuple[int, int]) -> None:
    assert not covers("sample", 16, checked)


def test_the_stricter_wins() -> None:
    found = {(a, b): stricter(a, b) for a in MODES for b in MODES}
    assert found["off", "sample"] == found["sample", "off"] == "sample"
    assert all(found[mode, "all"] == "all" and found[mode, mode] == mode for mode in MODES)
