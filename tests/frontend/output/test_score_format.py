"""Scores from vectors, and their order."""

from __future__ import annotations

import math
import struct

import pytest

from pdserve.frontend.output.score_format import Ranking, ScoreFormat


def packed(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def cosines(queries: int) -> ScoreFormat:
    return ScoreFormat(queries=queries, sigmoid=True, ranking=None)


def test_one_query_is_compared_with_all_and_several_in_pairs() -> None:
    right, up, diagonal, left = packed(2, 0), packed(0, 5), packed(3, 3), packed(-1, 0)
    found = cosines(1).scores([right, right, up, diagonal, left])
    assert found == pytest.approx([1, 0, math.sqrt(0.5), -1])
    found = cosines(2).scores([right, up, diagonal, up])
    assert found == pytest.approx([math.sqrt(0.5), 1])


def test_zeros_have_no_direction_and_no_cosine_is_over_1() -> None:
    assert cosines(1).scores([packed(0, 0), packed(1, 2)]) == [0.0]
    same = packed(*(0.1 * n for n in range(1, 400)))
    (score,) = cosines(1).scores([same, same])
    assert 1 - 1e-9 < score <= 1


def test_a_logit_becomes_a_probability_without_overflow() -> None:
    share = ScoreFormat(queries=0, sigmoid=True, ranking=None)
    given = [packed(n) for n in (0.0, 2.0, -2.0, 3e38, -3e38)]
    high = 1 / (1 + math.exp(-2))
    assert share.scores(given) == pytest.approx([0.5, high, 1 - high, 1.0, 0.0])
    assert ScoreFormat(queries=0, sigmoid=False, ranking=None).scores([packed(-2.0)]) == [-2.0]


@pytest.mark.parametrize(
    ("top_n", "order"), [(0, [2, 0, 1, 3]), (1, [2]), (3, [2, 0, 1]), (9, [2, 0, 1, 3])]
)
def test_the_best_come_first_and_equals_stay_in_order(top_n: int, order: list[int]) -> None:
    assert Ranking(texts=None, top_n=top_n).order([0.5, 0.5, 0.9, -1.0]) == order


def test_an_answer_repeats_the_documents_that_it_shows() -> None:
    def repeats(texts: tuple[str, ...] | None) -> int:
        ranking = Ranking(texts=texts, top_n=0)
        return ScoreFormat(queries=1, sigmoid=True, ranking=ranking).repeats

    assert repeats(("abc", "d")) == 16
    assert repeats(None) == cosines(1).repeats == 0
