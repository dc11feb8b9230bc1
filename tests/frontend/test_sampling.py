import json

import pytest

from pdserve.errors import ContextLengthExceeded, InvalidRequest
from pdserve.frontend.sampling import (
    MAX_PROMPT_LOGPROBS,
    MAX_STREAMED_PROMPT_LOGPROBS,
    check_prompt_logprobs,
    choices,
    sampling_params,
    scores_only,
    stop_strings,
)
from pdserve.messages.card import GenerationDefaults
from pdserve.openai.decode import CHAT, COMPLETION
from tests.frontend.support import HELLO, card

CARD = card(max_model_len=100)


def chat(**fields):
    return CHAT.decode(json.dumps(HELLO | fields).encode()).request


def completion(**fields):
    return COMPLETION.decode(json.dumps({"prompt": "x"} | fields).encode()).request


def params(request, prompt_tokens=10, model=CARD):
    return sampling_params(request, model, prompt_tokens, seed=99)


def refused(request, prompt_tokens=10, model=CARD):
    with pytest.raises(InvalidRequest) as caught:
        params(request, prompt_tokens, model)
    return caught.value


def test_chat_may_fill_the_context_and_completions_get_sixteen():
    assert params(chat()).max_tokens == 90
    assert params(completion()).max_tokens == 16
    assert params(completion(), 95).max_tokens == 5


def test_the_models_own_limit_is_the_default_for_chat():
    model = card(max_model_len=100, defaults=GenerationDefaults(max_tokens=7))
    assert params(chat(), model=model).max_tokens == 7
    assert params(chat(), 96, model).max_tokens == 4
    assert params(chat(max_tokens=20), model=model).max_tokens == 20


def test_max_completion_tokens_wins_over_max_tokens():
    assert params(chat(max_tokens=3, max_completion_tokens=4)).max_tokens == 4


def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers():
    error = refused(chat(), 100)
    assert isinstance(error, ContextLengthExceeded)
    assert "100 tokens" in error.message
    assert error.param == "messages"
    assert refused(completion(), 101).param == "prompt"


def test_too_much_output_is_refused_with_what_would_fit():
    error = refused(chat(max_tokens=91))
    assert error.code == "context_length_exceeded"
    assert "lower 'max_tokens' to 90" in error.message
    assert error.param == "max_tokens"
    assert refused(chat(max_completion_tokens=91)).param == "max_completion_tokens"


def test_zero_tokens_need_an_echo_and_ask_the_engine_for_one():
    request = completion(max_tokens=0, echo=True)
    assert params(request).max_tokens == 1
    assert scores_only(request)
    assert not scores_only(completion(max_tokens=1))
    assert refused(completion(max_tokens=0)).param == "max_tokens"


def test_min_tokens_must_fit():
    assert params(chat(min_tokens=5, max_tokens=5)).min_tokens == 5
    assert refused(chat(min_tokens=6, max_tokens=5)).param == "min_tokens"


def test_what_the_request_leaves_open_the_model_recommends():
    model = card(
        defaults=GenerationDefaults(
            temperature=0.6, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.1
        )
    )
    got = params(chat(), model=model)
    assert (got.temperature, got.top_p, got.top_k) == (0.6, 0.9, 40)
    assert (got.min_p, got.repetition_penalty) == (0.05, 1.1)
    own = params(chat(temperature=0, top_p=1, top_k=-1, min_p=0, repetition_penalty=1), model=model)
    assert (own.temperature, own.top_p, own.top_k, own.min_p) == (0.0, 1.0, 0, 0.0)


def test_without_recommendations_everything_is_neutral():
    got = params(chat())
    assert (got.temperature, got.top_p, got.top_k, got.min_p) == (1.0, 1.0, 0, 0.0)
    assert (got.repetition_penalty, got.presence_penalty, got.frequency_penalty) == (1.0, 0.0, 0.0)
    assert got.logprobs is None
    assert got.prompt_logprobs is None
    assert got.eos_token_ids == CARD.eos_token_ids


def test_a_seed_is_kept_in_range_and_drawn_if_absent():
    assert params(chat(seed=5)).seed == 5
    assert params(chat(seed=-1)).seed == 2**63 - 1
    assert params(chat()).seed == 99


def test_logprobs_of_chat_and_completions():
    assert params(chat(logprobs=True)).logprobs == 0
    assert params(chat(logprobs=True, top_logprobs=3)).logprobs == 3
    assert params(chat(logprobs=False)).logprobs is None
    assert refused(chat(top_logprobs=3)).param == "top_logprobs"
    assert params(completion(logprobs=0)).logprobs == 0
    echoed = params(completion(logprobs=2, echo=True))
    assert (echoed.logprobs, echoed.prompt_logprobs) == (2, 2)
    assert params(completion(logprobs=2)).prompt_logprobs is None


def test_token_ids_must_exist():
    size = CARD.vocab_size
    assert params(chat(logit_bias={"5": 1})).logit_bias == {5: 1.0}
    assert refused(chat(logit_bias={str(size): 1})).param == "logit_bias"
    assert params(chat(stop_token_ids=[5, 5])).stop_token_ids == (5,)
    assert refused(chat(stop_token_ids=[size])).param == "stop_token_ids"


def test_stop_strings_are_a_tuple_without_repetitions():
    assert stop_strings(chat()) == ()
    assert stop_strings(chat(stop="a")) == ("a",)
    assert stop_strings(chat(stop=["b", "a", "b"])) == ("b", "a")


def test_choices_are_bounded_over_all_prompts():
    assert choices(chat(), 1, 8) == 1
    assert choices(completion(n=4, best_of=4), 2, 8) == 4
    with pytest.raises(InvalidRequest, match="limit is 8"):
        choices(chat(n=3), 3, 8)
    with pytest.raises(InvalidRequest, match="best_of"):
        choices(completion(best_of=2), 1, 8)


def test_prompt_logprobs_are_bounded_over_all_choices():
    few = completion(echo=True, logprobs=1)
    check_prompt_logprobs(few, MAX_PROMPT_LOGPROBS // 4, n=2)
    with pytest.raises(InvalidRequest, match="'logprobs' of the echoed") as caught:
        check_prompt_logprobs(few, MAX_PROMPT_LOGPROBS // 4 + 1, n=2)
    assert caught.value.param == "logprobs"
    streamed = completion(echo=True, logprobs=1, stream=True)
    with pytest.raises(InvalidRequest, match="the limit is"):
        check_prompt_logprobs(streamed, MAX_STREAMED_PROMPT_LOGPROBS, n=1)
    for free in (completion(echo=True), completion(logprobs=20), chat(logprobs=True)):
        check_prompt_logprobs(free, 1 << 30, n=128)
