"""What is said of a token: its logprob and rank, the likeliest tokens, and those asked for."""

from __future__ import annotations

import pytest
import torch

from pdserve_engines.torch.models.download import Download
from pdserve_engines.torch.sampling.logprobs import LogprobWishes, describe, look_up, records

CPU = torch.device("cpu")
RAW = torch.tensor([[0.6, 0.1, 0.3], [0.2, 0.5, 0.3], [0.25, 0.25, 0.5], [0.1, 0.2, 0.7]]).log()


def rounded(top: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(token, round(float(torch.tensor(value).exp()), 4)) for token, value in top]


def test_each_row_gets_what_it_asks_for() -> None:
    wishes = LogprobWishes([2, 0, 2, 9], [(), (2,), (2, 1), ()], CPU)
    tokens = [2, 1, 0, 2]
    found = records(tokens, wishes, look_up(RAW, torch.tensor(tokens), wishes))
    assert [each.token for each in found] == tokens
    assert [each.rank for each in found] == [2, 1, 2, 1]
    assert [round(each.logprob, 4) for each in found] == [-1.204, -0.6931, -1.3863, -0.3567]
    assert rounded(found[0].top) == [(0, 0.6), (2, 0.3)]
    assert rounded(found[1].top) == [(2, 0.3)]
    first, second, *others = found[2].top
    assert rounded([first]) == [(2, 0.5)]
    assert second[0] in (0, 1)
    assert [token for token, _ in others] == [token for token in (1,) if token != second[0]]
    assert rounded(found[3].top) == [(2, 0.7), (1, 0.2), (0, 0.1)]


@pytest.mark.parametrize("rows", [None, [1, 3]])
def test_rows_of_a_batch_that_want_nothing_are_left_out(rows: list[int] | None) -> None:
    wanted = 4 if rows is None else len(rows)
    wishes = LogprobWishes([1] * wanted, [()] * wanted, CPU, rows)
    assert wishes.rows == (rows or [0, 1, 2, 3])
    assert torch.equal(wishes.of_rows(RAW), RAW if rows is None else RAW[rows])


def test_a_prompt_is_described_in_the_same_way() -> None:
    wishes = LogprobWishes([1, 1, 1, 1], [()] * 4, CPU)
    tokens = [0, 1, 2, 0]
    expected = records(tokens, wishes, look_up(RAW, torch.tensor(tokens), wishes))
    assert describe(RAW, tokens, [1, 1, 1, 1]) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_device_says_the_same() -> None:
    tokens, found = [2, 1, 0, 2], []
    for device in (CPU, torch.device("cuda")):
        wishes = LogprobWishes([2, 0, 1, 3], [(), (2,), (1,), ()], device)
        launched = look_up(RAW.to(device), torch.tensor(tokens, device=device), wishes)
        found.append(records(tokens, wishes, Download(launched).wait()))
    assert found[0] == found[1]
