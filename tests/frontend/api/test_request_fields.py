"""Each of the less common fields has its effect on the answer, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from pdserve.frontend.preprocess import input_processor
from tests.frontend.support import HELLO, MODEL, TOKENIZER, card, frontend, text_of, tokens
from tests.support.fake_backend import Script
from tests.text import builders

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ABLE = {MODEL: card(features=("bans",))}
WORDS = tokens("one two three four five six seven")


def saying(text: str = "one two three four five six seven") -> Script:
    return Script(tokens=tokens(text), repeat=False)


async def refused(client: Any, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    """The error of a request that has to be a 400."""
    first = HELLO if path == CHAT else {"prompt": "hello"}
    status, _, answer = await client.post(path, first | fields)
    assert status == 400, answer
    error: dict[str, Any] = answer["error"]
    return error


# ---------------------------------------------------------------- logprobs


async def test_prompt_logprobs_go_by_token_id_on_top_of_a_chat_and_in_each_completion():
    async with frontend(saying()) as client:
        chat = await client.chat(prompt_logprobs=2, return_token_ids=True)
        prompt = chat["prompt_token_ids"]
        first, *rest = chat["prompt_logprobs"]
        assert first is None
        assert [next(iter(scores)) for scores in rest] == [str(token) for token in prompt[1:]]
        assert set(rest[0]) == {str(prompt[1]), str(prompt[1] + 1)}
        assert rest[0][str(prompt[1])] == {
            "logprob": -0.5,
            "rank": 1,
            "decoded_token": TOKENIZER.token_text(prompt[1]),
        }
        (choice,) = (await client.complete(prompt_logprobs=0))["choices"]
        assert [score and len(score) for score in choice["prompt_logprobs"]] == [None] + [1] * (
            len(tokens("hello")) - 1
        )
        plain = await client.chat()
        assert plain["prompt_logprobs"] is plain["prompt_token_ids"] is None
        (choice,) = (await client.complete())["choices"]
        assert choice["prompt_logprobs"] is choice["prompt_token_ids"] is None
        assert (await refused(client, prompt_logprobs=1, stream=True))["param"] == "prompt_logprobs"


async def test_prompt_logprobs_and_an_echo_have_alternatives_of_their_own_number():
    async with frontend(saying()) as client:
        answer = await client.complete(prompt_logprobs=3, echo=True, logprobs=1, max_tokens=1)
        (choice,) = answer["choices"]
        assert {len(score) for score in choice["prompt_logprobs"][1:]} == {3}
        assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} == {1}


@pytest.mark.parametrize("stream", [False, True])
async def test_return_tokens_as_token_ids_names_tokens_by_their_ids(stream: bool):
    names = [f"token_id:{token}" for token in WORDS[:2]]
    fields: dict[str, Any] = {"return_tokens_as_token_ids": True, "max_tokens": 2}
    async with frontend(saying()) as client:
        if stream:
            chunks = await client.chunks(logprobs=True, **fields)
            entries = [
                entry["token"]
                for chunk in chunks
                for choice in chunk["choices"]
                if choice["logprobs"]
                for entry in choice["logprobs"]["content"]
            ]
        else:
            answer = await client.chat(logprobs=True, **fields)
            entries = [e["token"] for e in answer["choices"][0]["logprobs"]["content"]]
        assert entries == names
        answer = await client.complete(logprobs=1, echo=True, **fields)
        told = answer["choices"][0]["logprobs"]
        assert told["tokens"] == [f"token_id:{token}" for token in [*tokens("hello"), *WORDS[:2]]]
        assert list(told["top_logprobs"][1]) == [f"token_id:{tokens('hello')[1]}"]


async def test_logprob_token_ids_reach_the_engine():
    async with frontend(saying(), models=ABLE) as client:
        await client.chat(logprobs=True, logprob_token_ids=[70, 71])
        assert client.backend.requests[-1].sampling.logprob_token_ids == (70, 71)
        assert client.backend.requests[-1].sampling.logprobs == 0
    async with frontend(saying()) as client:
        error = await refused(client, logprobs=True, logprob_token_ids=[70])
        assert error["param"] == "logprob_token_ids"


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_asked_for_by_id_come_with_the_sampled_one_and_no_other(stream: bool):
    names = [f"token_id:{token}" for token in (WORDS[0], 70, 71)]
    fields: dict[str, Any] = {"logprob_token_ids": [70, 71], "max_tokens": 1}
    fields["return_tokens_as_token_ids"] = True
    async with frontend(saying(), models=ABLE) as client:
        if stream:
            chunks = await client.chunks(logprobs=True, top_logprobs=2, **fields)
            chat = [one["logprobs"] for chunk in chunks for one in chunk["choices"]]
            chat = [one for one in chat if one]
        else:
            answer = await client.chat(logprobs=True, top_logprobs=2, **fields)
            chat = [answer["choices"][0]["logprobs"]]
        (entry,) = [entry for one in chat for entry in one["content"]]
        assert [top["token"] for top in entry["top_logprobs"]] == names
        answer = await client.complete(logprobs=2, echo=True, **fields)
    told = answer["choices"][0]["logprobs"]["top_logprobs"]
    assert list(told[-1]) == names
    assert [len(top) for top in told[1:-1]] == [2] * (len(tokens("hello")) - 1)


# ---------------------------------------------------------------- what may be said


async def test_allowed_token_ids_and_bad_words_reach_the_engine_as_tokens():
    async with frontend(saying(), models=ABLE) as client:
        await client.chat(allowed_token_ids=[71, 70], bad_words=["no"])
        sampling = client.backend.requests[-1].sampling
        assert sampling.allowed_token_ids == (70, 71)
        assert tuple(tokens("no")) in sampling.bad_words
        assert (await refused(client, allowed_token_ids=[70, 99999]))["param"] == (
            "allowed_token_ids[1]"
        )
        error = await refused(client, bad_words=["no"], structured_outputs={"regex": "a"})
        assert "exclude each other" in error["message"]


async def test_what_an_engine_cannot_do_is_refused():
    async with frontend(saying()) as client:
        for fields in ({"allowed_token_ids": [70]}, {"bad_words": ["no"]}):
            error = await refused(client, COMPLETIONS, **fields)
            assert error["param"] == next(iter(fields))


# ---------------------------------------------------------------- the prompt


async def test_truncate_prompt_tokens_keeps_the_end_and_the_echo_shows_what_is_left():
    text = "one two three four five"
    kept = tokens(text)[-3:]
    async with frontend(saying("!")) as client:
        answer = await client.complete(
            prompt=text, truncate_prompt_tokens=3, echo=True, logprobs=0, max_tokens=1
        )
        assert client.backend.requests[-1].prompt.tolist() == kept
        (choice,) = answer["choices"]
        assert choice["text"] == TOKENIZER.decode(kept) + "!"
        assert len(choice["logprobs"]["tokens"]) == 4
        assert answer["usage"]["prompt_tokens"] == 3
        await client.chat(truncate_prompt_tokens=2)
        assert len(client.backend.requests[-1].prompt) == 2
        error = await refused(client, truncate_prompt_tokens=0)
        assert error["param"] == "truncate_prompt_tokens"


async def test_truncation_side_says_which_end_is_cut_off():
    fields: dict[str, Any] = {"truncate_prompt_tokens": 2, "max_tokens": 1}
    async with frontend(saying("!")) as client:
        for side, kept in (("right", [10, 11]), ("left", [12, 13]), (None, [12, 13])):
            answer = await client.complete(
                prompt=[10, 11, 12, 13], truncation_side=side, return_token_ids=True, **fields
            )
            assert answer["choices"][0]["prompt_token_ids"] == kept
        await client.chat(truncation_side="right", **fields)
        kept = client.backend.requests[-1].prompt.tolist()
        await client.chat()
        assert kept == client.backend.requests[-1].prompt[:2].tolist()


async def test_a_budget_of_minus_one_is_none_and_completions_have_no_budget():
    async with frontend(saying()) as client:
        await client.chat(thinking_token_budget=-1)
        await client.complete(thinking_token_budget=-1)
        for budget in (5, -7):
            error = await refused(client, COMPLETIONS, thinking_token_budget=budget)
            assert error["param"] == "thinking_token_budget"
        assert (await refused(client, thinking_token_budget=-2))["param"] == "thinking_token_budget"


async def test_truncation_takes_prompts_that_are_longer_than_the_context(monkeypatch):
    text = "hello " * 3000
    async with frontend(saying()) as client:
        assert (await refused(client, COMPLETIONS, prompt=text))["code"] == (
            "context_length_exceeded"
        )
        await client.complete(prompt=text, truncate_prompt_tokens=-1, max_tokens=5)
        assert len(client.backend.requests[-1].prompt) == 4096 - 5
        monkeypatch.setattr(input_processor, "_MAX_CHARS", 40_000)
        error = await refused(client, COMPLETIONS, prompt="a" * 40_001, truncate_prompt_tokens=9)
        assert "shorten it" in error["message"]


CONTINUED: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "count"},
        {"role": "assistant", "content": "zero "},
    ],
    "continue_final_message": True,
}


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_continued_message_before_the_answer(stream: bool):
    async with frontend(saying()) as client:
        for fields, expected in (
            ({"echo": True}, "zero one two three"),
            ({"echo": False}, "one two three"),
            ({"echo": True, "logprobs": True}, "zero one two three"),
        ):
            body = CONTINUED | fields | {"max_tokens": len(tokens("one two three"))}
            if stream:
                chunks = await client.chunks(**body)
                assert text_of(chunks) == expected
            else:
                _, _, answer = await client.post(CHAT, body)
                assert answer["choices"][0]["message"]["content"] == expected
        answer = await client.chat(echo=True, max_tokens=1)
        assert answer["choices"][0]["message"]["content"] == TOKENIZER.decode(WORDS[:1])


async def test_continue_final_message_leaves_the_last_turn_open():
    async with frontend(saying()) as client:
        await client.post(CHAT, CONTINUED)
        assert TOKENIZER.decode(client.backend.requests[-1].prompt).endswith("assistant: zero ")
        wrong = CONTINUED | {"add_generation_prompt": True}
        error = await refused(client, **wrong)
        assert error["param"] == "continue_final_message"


async def test_add_generation_prompt_and_special_tokens_are_the_callers_to_choose():
    raw = Tokenizer.from_str(builders.byte_level().to_str())  # the other one is shared
    raw.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    model = card(tokenizer_json=raw.to_str().encode())
    async with frontend(saying(), models={MODEL: model}) as client:
        await client.chat()
        own = client.backend.requests[-1].prompt
        await client.chat(add_generation_prompt=False)
        assert len(client.backend.requests[-1].prompt) < len(own)
        await client.chat(add_special_tokens=True)
        assert client.backend.requests[-1].prompt.tolist() == [0, *own]
        await client.complete()
        whole = client.backend.requests[-1].prompt.tolist()
        await client.complete(add_special_tokens=False)
        assert client.backend.requests[-1].prompt.tolist() == tokens("hello")
        assert whole == [0, *tokens("hello")]


async def test_documents_are_handed_to_the_template():
    template = "{% for d in documents %}[{{ d.title }}]{% endfor %}{{ messages[0].content }}"
    async with frontend(saying(), models={MODEL: card(chat_template=template)}) as client:
        await client.chat(documents=[{"title": "one"}, {"title": "two"}])
        assert TOKENIZER.decode(client.backend.requests[-1].prompt) == "[one][two]hello"
        error = await refused(client, documents="one")
        assert error["param"] == "documents"
        error = await refused(client, documents=[{}] * 1025)
        assert error["param"] == "documents"


# ---------------------------------------------------------------- the shape of the answer


async def test_return_token_ids_tells_prompt_and_output():
    async with frontend(saying()) as client:
        (choice,) = (await client.complete(return_token_ids=True, max_tokens=3))["choices"]
        assert choice["token_ids"] == WORDS[:3]
        assert choice["prompt_token_ids"] == client.backend.requests[-1].prompt.tolist()


def told(chunks: list[Any]) -> list[list[int]]:
    """The ids on each chunk that has some."""
    return [
        choice["token_ids"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice.get("token_ids")
    ]


async def test_stream_interval_gathers_tokens_after_the_first():
    async with frontend(saying()) as client:
        chunks = await client.chunks(stream_interval=3, return_token_ids=True, max_tokens=6)
        assert told(chunks) == [WORDS[:1], WORDS[1:4], WORDS[4:6]]
        assert text_of(chunks) == TOKENIZER.decode(WORDS[:6])
        chunks = await client.chunks(stream_interval=3, max_tokens=6)
        assert text_of(chunks) == TOKENIZER.decode(WORDS[:6])
        assert sum(bool(chunk["choices"][0]["delta"].get("content")) for chunk in chunks) == 3


@pytest.mark.parametrize("interval", [1, 2, 5, 100])
async def test_no_interval_loses_anything(interval: int):
    """Stop strings, logprobs, usage and several choices, all at once."""
    fields: dict[str, Any] = {
        "stream_interval": interval,
        "stop": "five",
        "logprobs": True,
        "n": 2,
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    async with frontend(saying()) as client:
        chunks = await client.chunks(**fields)
        plain = await client.chat(**{k: v for k, v in fields.items() if "stream" not in k})
    for index, choice in enumerate(plain["choices"]):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert text_of(chunks, index) == choice["message"]["content"] == "one two three four "
        assert [token for c in own for token in c.get("token_ids") or ()] == choice["token_ids"]
        entries = [e for c in own if c["logprobs"] for e in c["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        assert own[-1]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_repetition_detection_ends_what_says_the_same_over_and_over(stream: bool):
    again = tokens("la")
    script = Script(tokens=again)
    size = len(again)
    fields: dict[str, Any] = {"repetition_detection": {"max_pattern_size": size, "min_count": 4}}
    async with frontend(script) as client:
        if stream:
            chunks = await client.chunks(**fields)
            last, text = chunks[-1]["choices"][0], text_of(chunks)
        else:
            (last,) = (await client.chat(**fields))["choices"]
            text = last["message"]["content"]
        assert (last["finish_reason"], last["stop_reason"]) == (
            "repetition",
            "repetition_detected",
        )
        assert text == "la" * 4
        assert client.backend.streams[-1].cancelled
        answer = await client.chat(min_tokens=6 * size, **fields)
        assert answer["choices"][0]["message"]["content"] == "la" * 6
        error = await refused(
            client,
            repetition_detection={"max_pattern_size": 1, "min_count": 2, "min_pattern_size": 2},
        )
        assert error["param"] == "repetition_detection.min_pattern_size"


async def test_penalties_and_ends_reach_the_engine():
    fields = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "ignore_eos": True}
    async with frontend(saying()) as client:
        await client.chat(**fields)
        sampling = client.backend.requests[-1].sampling
        assert {name: getattr(sampling, name) for name in fields} == fields


async def test_include_stop_str_in_output_leaves_the_stop_string_in():
    async with frontend(saying()) as client:
        for include, expected in ((True, "one two three"), (False, "one two ")):
            answer = await client.chat(stop="three", include_stop_str_in_output=include)
            assert answer["choices"][0]["message"]["content"] == expected


async def test_spaces_between_special_tokens_are_the_callers_to_choose():
    raw = builders.word_level()
    model = card(tokenizer_json=raw.to_str().encode(), vocab_size=raw.get_vocab_size())
    special = [raw.get_vocab()["<s>"]] * 3
    script = Script(tokens=special, repeat=False)
    seen = []
    async with frontend(script, models={MODEL: model}) as client:
        for spaces in (True, False):
            plan = {"skip_special_tokens": False, "ignore_eos": True}
            answer = await client.chat(spaces_between_special_tokens=spaces, **plan)
            seen.append(answer["choices"][0]["message"]["content"])
    assert seen == ["<s> <s> <s>", "<s><s><s>"]
