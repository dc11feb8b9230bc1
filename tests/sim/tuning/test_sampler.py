"""optuna proposes; without it the error says what to install."""

from __future__ import annotations

import sys

import pytest

from pdserve.errors import ConfigError
from pdserve.sim.tuning.sampler import OptunaSampler, check_optuna

SIZES = {"one": 20, "other": 5}


def scores(seed: int) -> list[tuple[tuple[int, ...], float]]:
    """Forty choices; the best is (13, 2)."""
    sampler, found = OptunaSampler(SIZES, (4, 4), seed), []
    for _ in range(40):
        choice = sampler.ask()
        score = -abs(choice[0] - 13) - abs(choice[1] - 2)
        sampler.tell(score)
        found.append((choice, float(score)))
    return found


def test_it_begins_with_todays_values_and_finds_better_ones() -> None:
    pytest.importorskip("optuna")
    found = scores(1)
    assert found[0][0] == (4, 4)
    assert all(0 <= one < 20 and 0 <= other < 5 for (one, other), _ in found)
    assert max(score for _, score in found) >= -2


def test_the_same_seed_asks_the_same() -> None:
    pytest.importorskip("optuna")
    assert scores(2) == scores(2) != scores(3)


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install 'pdserve\[tune\]'"):
        check_optuna()
