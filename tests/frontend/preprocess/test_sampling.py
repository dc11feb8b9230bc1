import json

import pytest

from pdserve.errors import ContextLengthExceeded, InvalidRequest
from pdserve.frontend.preprocess.sampling import (
    MAX_PROMPT_LOGPROBS,
    MAX_STREAMED_PROMPT_LOGPROBS,
    bad_word_ids,
    check_prompt_logprobs,
    check_token_bans,
    choice_count,
    repetition_detector,
    sampling_params,
    scores_only,
    stop_strings,
    truncate_prompt,
)
from pdserve.messages.card import GenerationDefaults
from pdserve.protocols.request_decoder import CHAT, COMPLETION
from pdserve.token_ids import token_ids
from tests.frontend.support import HELLO, TOKENIZER, card, tokens

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


def test_more_output_than_fits_is_cut():
    assert params(chat(max_tokens=91)).max_tokens == 90
    assert params(completion(max_tokens=100)).max_tokens == 90
    assert refused(chat(max_completion_tokens=101)).param == "max_completion_tokens"
    assert refused(chat(max_tokens=95, min_tokens=91)).param == "min_tokens"


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
    assert own.repetition_penalty == 1.0


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
    assert refused(chat(stop_token_ids=[size])).param == "stop_token_ids[0]"


def test_stop_strings_are_a_tuple_without_repetitions():
    assert stop_strings(chat()) == ()
    assert stop_strings(chat(stop="a")) == ("a",)
    assert stop_strings(chat(stop=["b", "a", "b"])) == ("b", "a")


def test_choices_are_bounded_over_all_prompts():
    assert choice_count(chat(), 1, 8) == 1
    assert choice_count(completion(n=4, best_of=4), 2, 8) == 4
    with pytest.raises(InvalidRequest, match="limit is 8"):
        choice_count(chat(n=3), 3, 8)
    with pytest.raises(InvalidRequest, match="best_of"):
        choice_count(completion(best_of=2), 1, 8)


def test_prompt_logprobs_are_bounded_over_all_choices():
    few = completion(echo=True, logprobs=1)
    check_prompt_logprobs(few, MAX_PROMPT_LOGPROBS // 4, n=2)
    with pytest.raises(InvalidRequest, match="'logprobs' of the prompts") as caught:
        check_prompt_logprobs(few, MAX_PROMPT_LOGPROBS // 4 + 1, n=2)
    assert caught.value.param == "logprobs"
    streamed = completion(echo=True, logprobs=1, stream=True)
    with pytest.raises(InvalidRequest, match="the limit is"):
        check_prompt_logprobs(streamed, MAX_STREAMED_PROMPT_LOGPROBS, n=1)
    for free in (completion(echo=True), completion(logprobs=20), chat(logprobs=True)):
        check_prompt_logprobs(free, 1 << 30, n=128)


# ---------------------------------------------------------------- what may be sampled

ABLE = card(max_model_len=100, features=("bans",))


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [5]},
        {"bad_words": ["no"]},
        {"logprob_token_ids": [5], "logprobs": True},
    ],
)
def test_what_the_engine_cannot_keep_to_is_refused(fields):
    with pytest.raises(InvalidRequest, match="not supported by the engine") as caught:
        check_token_bans(chat(**fields), CARD)
    assert caught.value.param == next(iter(fields))
    check_token_bans(chat(**fields), ABLE)


@pytest.mark.parametrize("field", [{"allowed_token_ids": [5]}, {"bad_words": ["no"]}])
@pytest.mark.parametrize(
    "other",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
        {"thinking_token_budget": 4},
    ],
)
def test_two_fields_do_not_both_decide_which_tokens_fit(field, other):
    with pytest.raises(InvalidRequest, match="exclude each other") as caught:
        check_token_bans(chat(**field, **other), ABLE)
    assert caught.value.param == next(iter(field))
    check_token_bans(chat(**field, response_format={"type": "text"}), ABLE)


def test_allowed_tokens_are_in_order_and_exist():
    assert params(chat(allowed_token_ids=[7, 5, 7])).allowed_token_ids == (5, 7)
    assert refused(chat(allowed_token_ids=[5, CARD.vocab_size])).param == "allowed_token_ids[1]"
    assert refused(chat(allowed_token_ids=[])).param == "allowed_token_ids"


def test_something_is_left_to_be_said():
    assert refused(chat(allowed_token_ids=[1], min_tokens=2)).param == "allowed_token_ids"
    assert params(chat(allowed_token_ids=[1, 5], min_tokens=2)).allowed_token_ids == (1, 5)
    only = chat(allowed_token_ids=[5])
    with pytest.raises(InvalidRequest, match="nothing to say"):
        sampling_params(only, CARD, 10, 0, bad_words=((6, 5),))
    every = tuple((token,) for token in range(CARD.vocab_size))
    with pytest.raises(InvalidRequest, match="nothing to say"):
        sampling_params(chat(), CARD, 10, 0, bad_words=every)


def test_bad_words_are_kept_from_both_of_their_beginnings():
    first, within = tokens("no"), tokens(" no")
    found = bad_word_ids(["no", " no"], TOKENIZER)
    assert tuple(first) in found
    assert len(found) == 1 + (len(first) == len(within) and first[0] != within[0])


def test_bad_words_without_tokens_or_with_too_many_are_refused():
    with pytest.raises(InvalidRequest) as caught:
        bad_word_ids(["no", "  "], TOKENIZER)
    assert caught.value.param == "bad_words[1]"
    with pytest.raises(InvalidRequest, match="send fewer"):
        bad_word_ids([f"{number}" + "ab" * 500 for number in range(1024)], TOKENIZER)


def test_logprobs_of_named_tokens_need_logprobs_and_exist():
    assert refused(chat(logprob_token_ids=[5])).param == "logprob_token_ids"
    assert params(completion(logprobs=0, logprob_token_ids=[6, 5, 6])).logprob_token_ids == (6, 5)
    wrong = chat(logprobs=True, logprob_token_ids=[CARD.vocab_size])
    assert refused(wrong).param == "logprob_token_ids[0]"


def test_prompt_logprobs_are_the_most_that_any_field_asks_for():
    assert params(chat(prompt_logprobs=0)).prompt_logprobs == 0
    assert params(completion(prompt_logprobs=5, echo=True, logprobs=2)).prompt_logprobs == 5
    assert params(completion(prompt_logprobs=1, echo=True, logprobs=2)).prompt_logprobs == 2
    assert params(completion(prompt_logprobs=1, logprobs=2)).prompt_logprobs == 1


def test_prompt_logprobs_are_not_streamed():
    with pytest.raises(InvalidRequest, match="whole answers") as caught:
        check_prompt_logprobs(chat(prompt_logprobs=0, stream=True), 10, 1)
    assert caught.value.param == "prompt_logprobs"
    check_prompt_logprobs(chat(prompt_logprobs=0), 10, 1)


# ---------------------------------------------------------------- the prompt's length


def test_a_prompt_keeps_its_last_tokens():
    ids = token_ids(range(10))
    assert truncate_prompt(ids, chat(truncate_prompt_tokens=3), CARD).tolist() == [7, 8, 9]
    assert truncate_prompt(ids, chat(truncate_prompt_tokens=30), CARD) == ids
    assert truncate_prompt(ids, chat(), CARD) is ids
    with pytest.raises(InvalidRequest) as caught:
        truncate_prompt(ids, chat(truncate_prompt_tokens=0), CARD)
    assert caught.value.param == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("fields", "left"),
    [({}, 84), ({"max_tokens": 40}, 60), ({"max_tokens": 99}, 1), ({"max_tokens": 500}, 1)],
)
def test_minus_one_leaves_room_for_what_is_asked_for(fields, left):
    ids = token_ids(range(1000))
    assert (
        truncate_prompt(ids, completion(truncate_prompt_tokens=-1, **fields), CARD) == ids[-left:]
    )


def test_a_pattern_is_at_most_as_long_as_the_longest():
    assert repetition_detector(chat()) is None
    make = repetition_detector(chat(repetition_detection={"max_pattern_size": 2, "min_count": 3}))
    assert make is not None
    detector = make()
    assert [detector.feed(token) for token in (5, 6, 5, 6, 5, 6)] == [False] * 5 + [True]
    wrong = {"max_pattern_size": 2, "min_count": 3, "min_pattern_size": 3}
    with pytest.raises(InvalidRequest) as caught:
        repetition_detector(chat(repetition_detection=wrong))
    assert caught.value.param == "repetition_detection.min_pattern_size"


def test_a_list_of_nothing_asks_for_nothing():
    nothing = chat(bad_words=[], logprob_token_ids=[], response_format={"type": "json_object"})
    check_token_bans(nothing, CARD)
    assert params(nothing).logprob_token_ids == ()
    with pytest.raises(InvalidRequest):
        check_token_bans(chat(allowed_token_ids=[]), CARD)


def test_prompts_of_one_request_share_what_does_not_depend_on_them():
    """A request may name 65,536 tokens and have 128 prompts."""
    request = completion(allowed_token_ids=[3, 5], max_tokens=None, temperature=0.5, min_tokens=2)
    first = sampling_params(request, CARD, 10, 1)
    second = sampling_params(request, CARD, CARD.max_model_len - 4, 1, like=first)
    assert second.allowed_token_ids is first.allowed_token_ids
    assert second == sampling_params(request, CARD, CARD.max_model_len - 4, 1)
    with pytest.raises(ContextLengthExceeded):
        sampling_params(request, CARD, CARD.max_model_len, 1, like=first)
