"""The batched sampler against a naive one: one row at a time, plain Python floats, no shortcuts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine_core.scheduler.sequence import Sequence
from pdserve.messages.request import GenerateRequest, SamplingParams, TokenLogprob
from pdserve.token_ids import token_ids
from pdserve_engines.torch.sampling import sampler
from pdserve_engines.torch.sampling.filters import filter_
from pdserve_engines.torch.sampling.noise import uniforms
from pdserve_engines.torch.sampling.row_params import RowFilters
from pdserve_engines.torch.sampling.sampler import Sampler

VOCAB = 24
CPU = torch.device("cpu")

Batch = list[tuple[Sequence, list[float]]]


def sequence(
    params: SamplingParams,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    choice: int = 0,
    prompt_index: int = 0,
    handle: int = 1,
) -> Sequence:
    prompt = prompt or [1, 2]
    request = GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids(prompt),
        sampling=params,
        prompt_index=prompt_index,
    )
    tokens = prompt + (output or [])
    return Sequence(handle, choice, request, token_ids(tokens), len(prompt), arrival=0.0)


# ---------------------------------------------------------------- the reference


def adjusted(logits: list[float], seq: Sequence) -> list[float]:
    """Bias, mask, penalties, in the contract's order."""
    params, out = seq.sampling, list(logits)
    for token, bias in params.logit_bias.items():
        out[token] += bias
    if seq.num_output < params.min_tokens:
        ends = list(params.stop_token_ids)
        ends += [] if params.ignore_eos else list(params.eos_token_ids)
        for token in ends:
            out[token] = -math.inf
    for token in set(seq.tokens):
        factor = params.repetition_penalty
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token in set(seq.output):
        out[token] -= params.frequency_penalty * seq.output.count(token)
        out[token] -= params.presence_penalty
    return out


def survivors(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Token -> probability after temperature and filters, not renormalised."""
    best = max(logits)
    weights = [math.exp((value - best) / params.temperature) for value in logits]
    total = sum(weights)
    kept = {token: weight / total for token, weight in enumerate(weights)}
    floor = params.min_p * max(kept.values())
    kept = {token: p for token, p in kept.items() if p >= floor}
    if 0 < params.top_k < len(kept):
        border = sorted(kept.values(), reverse=True)[params.top_k - 1]
        kept = {token: p for token, p in kept.items() if p >= border}
    mass, covered, border = sum(kept.values()), 0.0, 0.0
    for p in sorted(kept.values(), reverse=True):
        border, covered = p, covered + p
        if covered >= params.top_p * mass:
            break
    return {token: p for token, p in kept.items() if p >= border and p > 0}


@dataclass
class Expected:
    token: int
    certain: bool
    """False where float32 may fairly decide otherwise: a border or a draw within rounding."""


def reference(logits: list[float], seq: Sequence) -> Expected:
    params, values = seq.sampling, adjusted(logits, seq)
    clear = not has_doubtful_ties(logits, values)
    if params.temperature == 0:
        return Expected(values.index(max(values)), clear)
    kept = survivors(values, params)
    total = sum(kept.values())
    noise = uniforms([params.seed], [seq.request.prompt_index], [seq.choice], [seq.num_output])
    target, covered, token = float(noise[0]) * total, 0.0, -1
    clear = clear and is_clear_cut(values, params)
    for candidate in sorted(kept):
        clear = clear and abs(covered - target) > 1e-4 * total
        covered += kept[candidate]
        if token < 0 and covered > target:
            token = candidate
    return Expected(token, clear)


def has_doubtful_ties(before: list[float], after: list[float]) -> bool:
    """Some token was moved to within rounding of another; untouched ones tie exactly."""
    moved = [token for token in range(VOCAB) if after[token] != before[token]]
    return any(
        abs(after[token] - after[other]) < 1e-4
        for token in moved
        for other in range(VOCAB)
        if other != token
    )


def is_clear_cut(values: list[float], params: SamplingParams) -> bool:
    """No filter's border lies within rounding of a token, unless tokens tie exactly."""
    kept = survivors(values, params)
    for nudged in (0.999, 1.001):
        changed = SamplingParams(
            max_tokens=1,
            temperature=params.temperature,
            min_p=min(1.0, params.min_p * nudged),
            top_k=params.top_k,
            top_p=min(1.0, params.top_p * nudged) if params.top_p < 1 else 1.0,
        )
        if set(survivors(values, changed)) != set(kept):
            return False
    return True


# ---------------------------------------------------------------- properties

some_tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
params = st.builds(
    SamplingParams,
    max_tokens=st.just(100),
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.05]),
    top_k=st.sampled_from([0, 1, 2, 5, VOCAB - 1, VOCAB, 1000]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 0.6]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-20, 20), max_size=3),
    logprobs=st.sampled_from([None, 0, 3, VOCAB]),
    min_tokens=st.sampled_from([0, 3, 8]),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=2).map(tuple),
    eos_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
)
rows = st.builds(
    sequence,
    params,
    prompt=some_tokens.filter(bool),
    output=some_tokens,
    choice=st.integers(0, 5),
    prompt_index=st.integers(0, 5),
)
# A coarse grid makes exact ties common.
values = st.lists(st.integers(-24, 24).map(lambda n: n / 4), min_size=VOCAB, max_size=VOCAB)


def check_logprob(record: TokenLogprob, logits: list[float], token: int, count: int) -> None:
    best = max(logits)
    total = best + math.log(sum(math.exp(value - best) for value in logits))
    assert record.token == token
    assert record.logprob == pytest.approx(logits[token] - total, abs=1e-4)
    assert record.rank == sum(value > logits[token] for value in logits) + 1
    assert len(record.top) == count
    assert len({token for token, _ in record.top}) == count
    for top_token, value in record.top:
        assert value == pytest.approx(logits[top_token] - total, abs=1e-4)
    assert all(first[1] >= second[1] for first, second in pairwise(record.top))
    if count:
        assert record.top[0][1] == pytest.approx(best - total, abs=1e-4)


@given(st.lists(st.tuples(rows, values), min_size=1, max_size=6))
def test_every_row_is_what_the_naive_sampler_says(
    batch: list[tuple[Sequence, list[float]]],
) -> None:
    sequences = [row for row, _ in batch]
    for handle, row in enumerate(sequences):
        row.handle = handle
    tokens, logprobs = Sampler().sample(torch.tensor([value for _, value in batch]), sequences)
    for token, record, (row, logits) in zip(tokens, logprobs, batch, strict=True):
        expected = reference(logits, row)
        if expected.certain:
            assert token == expected.token
        wanted = row.sampling.logprobs
        assert (record is None) == (wanted is None)
        if record is not None and wanted is not None:
            check_logprob(record, logits, token, wanted)


@given(st.lists(st.tuples(rows, values), min_size=2, max_size=6))
def test_a_row_does_not_depend_on_its_batch(batch: Batch) -> None:
    sequences = [row for row, _ in batch]
    for handle, row in enumerate(sequences):
        row.handle = handle
    logits = torch.tensor([value for _, value in batch])
    together, logprobs = Sampler().sample(logits.clone(), sequences)
    for index, row in enumerate(sequences):
        token, record = Sampler().sample(logits[index : index + 1].clone(), [row])
        assert token == together[index : index + 1]
        assert record == logprobs[index : index + 1]


def test_rows_are_drawn_one_by_one_where_their_number_changes_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in for a GPU: probabilities depend on the number of rows."""
    whole = sampler.draw

    def draw(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        return (whole(logits, *rest) + len(logits) - 1) % logits.shape[-1]

    monkeypatch.setattr(sampler, "draw", draw)
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=3)
    batch = [sequence(params, handle=handle, prompt_index=handle) for handle in range(4)]
    batch.append(sequence(SamplingParams(max_tokens=9, temperature=0.0), handle=9))
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    alone = [
        Sampler().sample(row[None].clone(), [one])[0][0]
        for row, one in zip(logits, batch, strict=True)
    ]
    together = Sampler()
    assert together.sample(logits.clone(), batch)[0] != alone
    together.one_by_one = True
    assert together.sample(logits.clone(), batch)[0] == alone


@pytest.mark.parametrize("vocab", [200, 2000])
def test_a_nucleus_wider_than_the_guess_is_still_exact(vocab: int, seed: int) -> None:
    """Flat distributions need more of the likeliest tokens than are looked at first."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    logits = torch.randn(6, vocab, generator=generator) * torch.tensor([[0.01, 0.3, 1, 2, 4, 8]]).T
    shares = [0.95, 0.5, 0.9, 0.99, 0.9, 0.3]
    params = [SamplingParams(max_tokens=1, top_p=share) for share in shares]
    probabilities = logits.softmax(-1)
    filter_(probabilities, RowFilters.of(params, CPU, vocab))
    for row, (kept, param) in enumerate(zip(probabilities, params, strict=True)):
        expected = survivors(logits[row].tolist(), param)
        assert abs(int((kept > 0).sum()) - len(expected)) <= 1
        assert float(kept.sum()) >= param.top_p - 1e-5


def test_draws_follow_the_distribution() -> None:
    """Chi-square over output positions of one request: exactly the noise that serving uses."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0, 1.5, 0.2])
    params = SamplingParams(max_tokens=9, temperature=0.8, top_p=0.97, top_k=7, seed=5)
    expected = survivors(logits.tolist(), params)
    total, count = sum(expected.values()), 20000
    sequences = [sequence(params, output=[0] * position, handle=position) for position in range(50)]
    histogram = dict.fromkeys(range(8), 0)
    for choice in range(count // 50):
        for row in sequences:
            row.choice = choice
        for token in Sampler().sample(logits.repeat(50, 1), sequences)[0]:
            histogram[token] += 1
    assert {token for token, hits in histogram.items() if hits} == set(expected)
    chi_square = sum(
        (histogram[token] - count * p / total) ** 2 / (count * p / total)
        for token, p in expected.items()
    )
    assert chi_square < 24.3  # 99.9th percentile at 7 degrees of freedom; here there are fewer


def test_penalties_follow_a_growing_output_and_forget_on_demand() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0, frequency_penalty=1.0)
    row, sampler = sequence(params), Sampler()
    for expected in ([3, 3, 4, 3, 4, 3], [3, 3, 4, 3, 4, 3]):
        row.tokens = row.tokens[: row.prompt_len]
        for token in expected:
            logits = torch.zeros(1, VOCAB)
            logits[0, 3], logits[0, 4] = 5.1, 3.6
            row.tokens.extend(sampler.sample(logits, [row])[0])
            assert row.tokens[-1] == token
        sampler.forget([row.key, (99, 99)])


def test_ends_come_back_when_min_tokens_are_reached() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0, min_tokens=2, eos_token_ids=(3,))
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 9.0
    found = [
        Sampler().sample(logits.clone(), [sequence(params, output=[0] * count)])[0][0] == 3
        for count in range(4)
    ]
    assert found == [False, False, True, True]


def test_a_tiny_temperature_is_nearly_greedy_and_never_overflows() -> None:
    params = SamplingParams(max_tokens=9, temperature=1e-6, seed=3)
    logits = torch.linspace(-80, 80, VOCAB)[None]
    assert Sampler().sample(logits, [sequence(params)])[0] == [VOCAB - 1]


@pytest.mark.parametrize("temperature", [1e-38, 1e-45, 1e-300])
def test_a_temperature_below_what_floats_can_divide_by_is_its_limit(temperature: float) -> None:
    params = SamplingParams(max_tokens=9, temperature=temperature, seed=3)
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 7]] = 1.0
    rows = [sequence(params, choice=choice) for choice in range(8)]
    assert set(Sampler().sample(logits.repeat(8, 1), rows)[0]) == {5, 7}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [1e-38, 1e-300])
def test_a_vanishing_repetition_penalty_prefers_what_was_there(
    penalty: float, temperature: float
) -> None:
    params = SamplingParams(
        max_tokens=9, temperature=temperature, repetition_penalty=penalty, seed=3
    )
    logits = torch.full((1, VOCAB), 2.0)
    assert Sampler().sample(logits, [sequence(params, prompt=[4, 6])])[0][0] in (4, 6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_vanishing_repetition_penalty_leaves_a_masked_end_masked(temperature: float) -> None:
    params = SamplingParams(
        max_tokens=9,
        min_tokens=2,
        stop_token_ids=(4,),
        temperature=temperature,
        repetition_penalty=1e-300,
        seed=3,
    )
    logits = torch.full((1, VOCAB), 2.0)
    assert Sampler().sample(logits, [sequence(params, prompt=[4, 6])])[0] == [6]


def test_tokens_that_tie_at_the_border_all_stay() -> None:
    probabilities = torch.tensor([[0.2, 0.2, 0.2, 0.2, 0.2]])
    filter_(probabilities, RowFilters.of([SamplingParams(max_tokens=1, top_k=2)], CPU, 5))
    assert int((probabilities > 0).sum()) == 5
