"""Terms that wait for KV to move."""

from __future__ import annotations

import pytest

from pdserve.router.predict.model import TimeModel
from pdserve.router.predict.moves import soonest_prefill, transfer

MODEL = TimeModel(base=0.0, per_token=0.001, per_pair=0.0)


@pytest.mark.parametrize(
    ("size", "hidden", "seconds"),
    [(0, 0.0, 0.0), (100, 0.0, 10.5), (100, 4.0, 6.5), (100, 99, 0.5)],
)
def test_only_what_could_not_overlap_is_waited_for(size: int, hidden: float, seconds: float):
    assert transfer(size, 10.0, 0.5, hidden) == seconds


def test_the_cheapest_source_of_a_prefix_is_taken():
    assert soonest_prefill(MODEL, 2.0, 1000, 400) == pytest.approx(1.2)
    assert soonest_prefill(MODEL, 2.0, 1000, 400, [(900, 0.1), (950, 5.0)]) == pytest.approx(0.3)


def test_a_source_that_has_less_is_no_help():
    assert soonest_prefill(MODEL, 1.0, 1000, 400, [(300, 0.0)]) == pytest.approx(0.6)


def test_the_last_token_is_always_computed():
    assert soonest_prefill(MODEL, 1.0, 1000, 0, [(1000, 0.0)]) == pytest.approx(0.001)
