"""Every sampling field has its effect in the real vLLM; logits and order are transformers'."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from pdserve.messages.engine import StepOutput, Submit
from tests.engines.vllm import real

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.messages.request import GenerateRequest, TokenLogprob
    from pdserve.testing.inline_engine import InlineEngine

real.require_vllm()
pytestmark = real.MARKS
engines_of_this_file = real.keeps(real.MAIN)

PROMPT = tuple(range(300, 340))
LEAD = {370: 16.0, 419: 14.0, 500: 13.0}
"""A bias with which the same few tokens would come again and again."""


@pytest.fixture
def engine() -> Iterator[InlineEngine]:
    with real.inline() as inline:
        yield inline


@cache
def oracle() -> Any:
    """The same weights in transformers."""
    model: Any = transformers.LlamaForCausalLM
    with real.quiet():
        return model.from_pretrained(real.BUNDLED, dtype=torch.float32).eval()


@torch.inference_mode()
def logits_of(tokens: list[int]) -> torch.Tensor:
    """`[len(tokens), vocabulary]`."""
    logits: torch.Tensor = oracle()(torch.tensor([tokens])).logits[0].float()
    return logits


def adjusted(request: GenerateRequest, output: list[int]) -> torch.Tensor:
    """The logits of the next token, changed in the order that `SamplingParams` promises."""
    wanted = request.sampling
    logits = logits_of([*request.prompt, *output])[-1].clone()
    if wanted.allowed_token_ids:
        keep = torch.zeros_like(logits, dtype=torch.bool)
        keep[list(wanted.allowed_token_ids)] = True
        logits[~keep] = -torch.inf
    for *before, last in wanted.bad_words:
        if not before or output[-len(before) :] == before:
            logits[last] = -torch.inf
    for token, bias in wanted.logit_bias.items():
        logits[token] += bias
    if len(output) < wanted.min_tokens:
        logits[[*wanted.stop_token_ids, *wanted.eos_token_ids]] = -torch.inf
    seen = list({*request.prompt, *output})
    scale = wanted.repetition_penalty
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / scale, logits[seen] * scale)
    for token, count in Counter(output).items():
        logits[token] -= wanted.frequency_penalty * count + wanted.presence_penalty
    return logits


def check(request: GenerateRequest, output: list[int]) -> None:
    """Each token is the best one after those before it."""
    for number, token in enumerate(output):
        logits = adjusted(request, output[:number])
        assert logits.max() - logits[token] < 1e-3, f"token {number}"


FIELDS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.5, "logit_bias": LEAD},
    {"repetition_penalty": 0.6, "logit_bias": {305: 6.0}},
    {"presence_penalty": 1.5, "logit_bias": LEAD},
    {"frequency_penalty": 1.5, "logit_bias": LEAD},
    {"frequency_penalty": -1, "presence_penalty": -0.5, "repetition_penalty": 1.2}
    | {"logit_bias": LEAD},
    {"logit_bias": {370: 100.0}},
    {"logit_bias": {803: -100.0, 645: -100.0}},
    {"allowed_token_ids": tuple(range(500, 510))},
    {"allowed_token_ids": tuple(range(500, 510)), "logit_bias": {505: 3.0}, "presence_penalty": 1},
    {"bad_words": ((803,), (3, 1), (852,))},
    {"bad_words": ((370,), (419, 419)), "frequency_penalty": 0.5, "logit_bias": LEAD},
    {"top_p": 0.1, "top_k": 3, "min_p": 0.5},
]


@pytest.mark.parametrize("fields", FIELDS, ids=[",".join(f) or "none" for f in FIELDS])
def test_the_best_tokens_are_those_of_the_adjusted_logits(
    engine: InlineEngine, fields: dict[str, Any]
) -> None:
    request = real.request(PROMPT, max_tokens=20, **fields)
    ((output,),) = engine.generate([request])
    check(request, output)


def test_all_fields_at_once_in_one_batch(engine: InlineEngine) -> None:
    """Requests do not get each other's settings."""
    requests = [real.request(PROMPT, max_tokens=12, **fields) for fields in FIELDS]
    for request, (output,) in zip(requests, engine.generate(requests), strict=True):
        check(request, output)


def test_fields_change_the_output(engine: InlineEngine) -> None:
    """Else the tests above would say nothing."""
    shape: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 20}
    same = []
    for fields in FIELDS[1:-1]:
        bias = {name: value for name, value in fields.items() if name == "logit_bias"}
        without = {} if bias == fields else bias
        if real.answer(engine, **shape, **fields) == real.answer(engine, **shape, **without):
            same.append(fields)
    assert same == []


# ------------------------------------------------------------------ noise


NOISY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 16, "temperature": 1.5}


def test_noise_repeats_by_its_seed(engine: InlineEngine) -> None:
    once = real.answer(engine, **NOISY, seed=5)
    assert real.answer(engine, **NOISY, seed=5) == once
    assert real.answer(engine, **NOISY, seed=6) != once
    assert real.answer(engine, **NOISY, seed=5, prompt_index=1) != once


def test_choices_differ_and_do_not_depend_on_their_number(engine: InlineEngine) -> None:
    three = real.answer(engine, **NOISY, seed=5, n=3)
    assert len({tuple(tokens) for tokens in three}) == 3
    assert real.answer(engine, **NOISY, seed=5, n=2) == three[:2]


def test_noise_does_not_depend_on_other_requests(engine: InlineEngine) -> None:
    alone = real.answer(engine, **NOISY, seed=5)
    others = [real.request(PROMPT, temperature=1.0, seed=seed) for seed in range(6)]
    together = engine.generate([*others, real.request(**NOISY, seed=5), *others])
    assert together[6] == alone


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_what_leaves_one_token_leaves_the_best(
    engine: InlineEngine, fields: dict[str, Any]
) -> None:
    best = real.answer(engine, prompt=PROMPT, max_tokens=16)
    assert real.answer(engine, **NOISY, seed=5, **fields) == best


@pytest.mark.parametrize(
    ("fields", "tokens"), [({"top_k": 2}, 2), ({"top_p": 0.999}, None), ({"min_p": 0.4}, None)]
)
def test_cuts_leave_the_likeliest(
    engine: InlineEngine, fields: dict[str, Any], tokens: int | None
) -> None:
    """First tokens of many seeds lie in the set that the cut leaves, and fill it if it is small."""
    probabilities = logits_of(list(PROMPT))[-1].softmax(-1)
    order = probabilities.sort(descending=True)
    if "top_k" in fields:
        left = set(order.indices[: fields["top_k"]].tolist())
    elif "top_p" in fields:
        count = int((order.values.cumsum(0) < fields["top_p"]).sum()) + 2
        left = set(order.indices[:count].tolist())
    else:
        least = fields["min_p"] * probabilities.max() * 0.999
        left = set((probabilities >= least).nonzero().flatten().tolist())
    shape: dict[str, Any] = {"max_tokens": 1, "temperature": 1.0} | fields
    requests = [real.request(PROMPT, seed=seed, **shape) for seed in range(80)]
    drawn = {output[0] for (output,) in engine.generate(requests)}
    assert drawn <= left
    if tokens is not None:
        assert len(drawn) == tokens


def test_draws_have_the_models_probabilities(engine: InlineEngine) -> None:
    allowed = tuple(logits_of(list(PROMPT))[-1].topk(3).indices.tolist())
    expected = logits_of(list(PROMPT))[-1][list(allowed)].softmax(-1).tolist()
    shape: dict[str, Any] = {"max_tokens": 1, "temperature": 1.0, "allowed_token_ids": allowed}
    requests = [real.request(PROMPT, seed=seed, **shape) for seed in range(400)]
    drawn = Counter(output[0] for (output,) in engine.generate(requests))
    for token, probability in zip(allowed, expected, strict=True):
        assert drawn[token] / 400 == pytest.approx(probability, abs=0.1)


# ------------------------------------------------------------------ ends


def test_stop_tokens_are_a_part_of_the_output(engine: InlineEngine) -> None:
    ((whole,),) = engine.generate([real.request(PROMPT, max_tokens=12)])
    stop = whole[5]
    ledger = engine.submit(real.request(PROMPT, max_tokens=12, stop_token_ids=(stop, 5)))
    engine.run()
    assert ledger.tokens[0] == whole[: whole.index(stop) + 1]
    assert ledger.finishes[0] is not None
    assert ledger.finishes[0].stop_reason == stop


def test_the_checkpoints_own_end_token_is_not_added(engine: InlineEngine) -> None:
    """Only the request's end tokens end it; vLLM would take those of generation_config.json."""
    shape: dict[str, Any] = {"max_tokens": 6, "logit_bias": {3: 100.0}, "eos_token_ids": (3,)}
    ledger = engine.submit(real.request(PROMPT, ignore_eos=True, **shape))
    other = engine.submit(real.request(PROMPT, ignore_eos=False, **shape))
    engine.run()
    assert ledger.tokens[0] == [3] * 6
    assert other.tokens[0] == [3]


def test_the_least_length_bars_stop_and_end_tokens(engine: InlineEngine) -> None:
    shape: dict[str, Any] = {"logit_bias": {3: 90.0, 4: 50.0}, "ignore_eos": False}
    shape |= {"eos_token_ids": (3,), "stop_token_ids": (4,), "min_tokens": 5, "max_tokens": 9}
    request = real.request(PROMPT, **shape)
    ((output,),) = engine.generate([request])
    assert output[5:] == [3]
    assert not {3, 4} & set(output[:5])
    check(request, output)


# ------------------------------------------------------------------ logprobs


def assert_close(found: TokenLogprob, expected: torch.Tensor, top: int) -> None:
    assert found.logprob == pytest.approx(float(expected[found.token]), abs=1e-3)
    own = expected[found.token]
    # Among equal logits the rank is a matter of rounding.
    assert int((expected > own + 1e-3).sum()) < found.rank
    assert found.rank <= int((expected > own - 1e-3).sum())
    assert len(found.top) == top
    best = expected.topk(top).values.tolist() if top else []
    assert [value for _, value in found.top] == pytest.approx(best, abs=1e-3)
    for token, value in found.top:
        assert value == pytest.approx(float(expected[token]), abs=1e-3)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.3, "seed": 4}, {"frequency_penalty": 1}])
@pytest.mark.parametrize("top", [0, 3, 30])
def test_logprobs_are_the_models(engine: InlineEngine, top: int, fields: dict[str, Any]) -> None:
    """Before temperature and penalties."""
    ledger = engine.submit(real.request(PROMPT, logprobs=top, **fields))
    engine.run()
    output = ledger.tokens[0]
    expected = logits_of([*PROMPT, *output]).log_softmax(-1)[len(PROMPT) - 1 :]
    for found, row in zip(ledger.logprobs[0], expected, strict=False):
        assert_close(found, row, top)
    assert len(ledger.logprobs[0]) == len(output)


@pytest.mark.parametrize("top", [0, 2])
def test_prompt_logprobs_are_the_models(engine: InlineEngine, top: int) -> None:
    """Of a prompt in several chunks, whose beginning another request has left in the cache."""
    prompt = tuple(range(300, 450))
    real.answer(engine, prompt=prompt)
    ledger = engine.submit(real.request(prompt, prompt_logprobs=top))
    engine.run()
    found = ledger.prompt_logprobs[0]
    assert found is not None
    assert len(found) == len(prompt) - 1
    for one, row in zip(found, logits_of(list(prompt)).log_softmax(-1), strict=False):
        assert_close(one, row, top)


def test_each_request_of_a_batch_gets_the_alternatives_it_asks_for(engine: InlineEngine) -> None:
    """vLLM computes as many for all as one wants."""
    tops = [None, 0, 1, 5, 2, 9]
    ledgers = [engine.submit(real.request(PROMPT, logprobs=top)) for top in tops]
    engine.run()
    for top, ledger in zip(tops, ledgers, strict=True):
        assert len(ledger.logprobs[0]) == (0 if top is None else 8)
        expected = logits_of([*PROMPT, *ledger.tokens[0]]).log_softmax(-1)[len(PROMPT) - 1 :]
        for found, row in zip(ledger.logprobs[0], expected, strict=False):
            assert_close(found, row, top or 0)


def test_chosen_tokens_come_beside_the_likeliest_of_others(engine: InlineEngine) -> None:
    chosen = (958, 3, 700, 0, 29)
    plain = engine.submit(real.request(PROMPT, logprobs=3))
    records: list[TokenLogprob] = []
    request = real.request(PROMPT, logprobs=0, logprob_token_ids=chosen)
    engine.core.handle(Submit(handle=99, request=request))
    while not plain.done or engine.core.has_work:
        for event in engine.core.step():
            for delta in event.deltas if isinstance(event, StepOutput) else ():
                if delta.handle == 99:
                    records += delta.logprobs or []
                else:
                    plain.take(delta)
    expected = logits_of([*PROMPT, *plain.tokens[0]]).log_softmax(-1)[len(PROMPT) - 1 :]
    for found, row in zip(plain.logprobs[0], expected, strict=False):
        assert_close(found, row, 3)
    assert len(records) == 8
    for found, row in zip(records, expected, strict=False):
        assert {token for token, _ in found.top} == set(chosen)
        for token, value in found.top:
            assert value == pytest.approx(float(row[token]), abs=1e-3)


REFUSED: list[dict[str, Any]] = [
    {"logit_bias": {1280: 1.0}},
    {"allowed_token_ids": (5, 4000)},
    {"bad_words": ((4000,),)},
    {"stop_token_ids": (-1,)},
    {"logprobs": 5000},
    {"repetition_penalty": 0.0},
    {"top_p": 7.0},
]


def test_what_vllm_refuses_ends_one_request(engine: InlineEngine) -> None:
    """Whatever the frontend lets through; an engine that ended would take all others along."""
    good = engine.submit(real.request(PROMPT, max_tokens=20))
    for fields in REFUSED:
        ledger = engine.submit(real.request(PROMPT, n=2, **fields))
        engine.run()
        assert ledger.done
    assert good.error is None
    assert real.answer(engine, prompt=PROMPT, max_tokens=20) == good.tokens
