"""What a damaged KV cache does to the answers: the bundled model as a check of the whole server.

The KV of a prompt is computed, then some of it is spoilt, then the answer is decoded from it. What
counts is how many answers are still exact: few where the question itself is hit, many where only
earlier turns are, because the model answers the last question and hardly looks further back.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from examples.bundled_model.judge import Case, Judge, Rate, cases, later

if TYPE_CHECKING:
    from collections.abc import Callable

    from examples.bundled_model.qa import Corpus

BLOCK = 32
"""Tokens in one block of KV, pdserve's default."""

Spoil: TypeAlias = "Callable[[torch.Tensor, int], None]"


def zero_block(cached: torch.Tensor, start: int) -> None:
    """The block was never filled."""
    cached[:, :, start : start + BLOCK] = 0


def wrong_block(cached: torch.Tensor, start: int) -> None:
    """The block table names another block, here the first one of the same prompt."""
    cached[:, :, start : start + BLOCK] = cached[:, :, :BLOCK].clone()


@torch.inference_mode()
def answer_after(judge: Judge, case: Case, spoil: Spoil, start: int, limit: int = 160) -> list[int]:
    """Decode greedily from a prompt's KV in which the block at `start` was spoilt."""
    prompt = judge.prompt(case.messages)
    output = judge.model(input_ids=torch.tensor([prompt[:-1]]), use_cache=True)
    cache: Any = output.past_key_values
    for layer in cache.layers:
        spoil(layer.keys, start)
        spoil(layer.values, start)
    tokens = [prompt[-1]]
    while len(tokens) <= limit and tokens[-1] != judge.tokenizer.eos_token_id:
        step = judge.model(input_ids=torch.tensor([tokens[-1:]]), past_key_values=cache)
        tokens.append(int(step.logits[0, -1].argmax()))
    return tokens[1:]


def damage_rates(judge: Judge, corpus: Corpus, seed: int, count: int = 60) -> list[Rate]:
    """Exact answers to trained questions after one block of the prompt's KV was spoilt."""
    rng = random.Random(seed)
    group = rng.sample(cases(corpus, lambda pair: pair.phrasings), count)
    group = [later(case, corpus, judge, 300, rng) for case in group]
    rates = [_rate("undamaged, after turns up to 300 tokens", judge, group, _nothing, _last)]
    for name, spoil in (("zeroed", zero_block), ("of another block", wrong_block)):
        rates.append(_rate(f"last {BLOCK} tokens of KV {name}", judge, group, spoil, _last))
        rates.append(_rate(f"an early block of KV {name}", judge, group, spoil, lambda n: BLOCK))
    return rates


def _rate(
    name: str, judge: Judge, group: list[Case], spoil: Spoil, at: Callable[[int], int]
) -> Rate:
    exact = 0
    for case in group:
        start = at(len(judge.prompt(case.messages)) - 1)
        exact += answer_after(judge, case, spoil, start) == judge.wanted(case)
    return Rate(name, exact, len(group))


def _last(length: int) -> int:
    return max(0, length - BLOCK)


def _nothing(cached: torch.Tensor, start: int) -> None:
    pass
