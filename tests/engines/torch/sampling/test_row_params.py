"""Columns are made once per batch, and never outlive a change of it."""

from __future__ import annotations

import random

import pytest
import torch

from pdserve.engine_core.scheduler.sequence import Sequence
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.token_ids import token_ids
from pdserve_engines.torch.sampling.row_params import RowParamsCache
from pdserve_engines.torch.sampling.sampler import Sampler

VOCAB = 40

KINDS = (
    SamplingParams(max_tokens=99, temperature=0.0),
    SamplingParams(max_tokens=99, temperature=1.0, seed=5),
    SamplingParams(max_tokens=99, temperature=0.7, top_k=3, seed=6, logit_bias={3: 4.0}),
    SamplingParams(max_tokens=99, temperature=0.9, top_p=0.8, min_p=0.05, seed=7),
    SamplingParams(max_tokens=99, temperature=0.0, min_tokens=4, eos_token_ids=(2, 3)),
    SamplingParams(max_tokens=99, temperature=1.0, repetition_penalty=1.4, seed=8),
    SamplingParams(max_tokens=99, temperature=1.0, allowed_token_ids=(4, 5, 6), seed=9),
    SamplingParams(max_tokens=99, temperature=1.0, bad_words=((3,), (4, 5)), logprobs=3, seed=9),
)


def sequence(handle: int, sampling: SamplingParams) -> Sequence:
    request = GenerateRequest(
        request_id="r", model="m", prompt=token_ids([1, 2, 3]), sampling=sampling
    )
    return Sequence(handle, 0, request, token_ids([1, 2, 3]), 3, arrival=0.0)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_sampler_that_has_followed_its_sequences_says_what_a_new_one_says(
    one_by_one: bool, seed: int, long: bool
) -> None:
    """Whatever it keeps from the step before belongs to the batch of the step before."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed % 2**63)
    batch: list[Sequence] = []
    old, born = Sampler(), 0
    old.one_by_one = one_by_one
    for _ in range(600 if long else 60):
        if not batch or draw.random() < 0.3:
            born += 1
            batch.append(sequence(born, draw.choice(KINDS)))
        if len(batch) > 1 and draw.random() < 0.2:
            old.forget([batch.pop(draw.randrange(len(batch))).key])
        if draw.random() < 0.2:
            draw.shuffle(batch)
        present = [each for each in batch if draw.random() < 0.9] or batch
        logits = torch.randn(len(present), VOCAB, generator=generator)
        expected = Sampler().sample(logits.clone(), present)
        assert old.sample(logits, present) == expected
        for each, token in zip(present, expected[0], strict=True):
            each.tokens.append(token)


def test_the_same_batch_keeps_its_columns_and_another_does_not() -> None:
    cache = RowParamsCache()
    batch = [sequence(number, KINDS[number]) for number in range(3)]
    first = cache.of(batch)
    assert cache.of(list(batch)) is first
    assert cache.of(batch[::-1]) is not first
    second = cache.of(batch)
    cache.forget((99, 0))
    assert cache.of(batch) is second
    cache.forget(batch[1].key)
    assert cache.of(batch) is not second


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_only_a_likeliest_token_without_conditions_is_plain(number: int) -> None:
    sampler, one = Sampler(), sequence(1, KINDS[number])
    assert sampler.is_plain([one]) == (number == 0)
    one.tokens.extend([7] * 4)
    assert sampler.is_plain([one]) == (number in (0, 4))
