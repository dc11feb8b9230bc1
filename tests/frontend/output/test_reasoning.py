"""Reasoning told apart from what is said: messages, streams, usage, and what is refused."""

import json
import random
from typing import Any

import openai
import pytest

from tests.frontend.reasoning_model import (
    END,
    TOKENIZER,
    WEATHER,
    call,
    card,
    message_of,
    tokens,
    without_ids,
)
from tests.frontend.support import HELLO, MODEL, frontend
from tests.support.fake_backend import Script

CHAT = "/v1/chat/completions"
THOUGHT = "They say hello.\n\nSo I < 1 & 2 > say 你好 too."
SAID = "Hello, 世界!"
BEGUN = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
"""A template that opens the reasoning."""


def serving(text, *, cuts=None, template=None, **script):
    """A frontend whose model writes `text`."""
    changes = {} if template is None else {"chat_template": template}
    made = Script(tokens=[*tokens(text, cuts), END], repeat=False, **script)
    return frontend(made, models={MODEL: card(**changes)})


WHOLE = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"
CASES = {
    "thought and said": (None, WHOLE, THOUGHT, SAID),
    "begun by the prompt": (BEGUN, f"{THOUGHT}\n</think>\n\n{SAID}", THOUGHT, SAID),
    "said only": (None, SAID, None, SAID),
    "thought only": (None, f"<think>\n{THOUGHT}\n</think>", THOUGHT, ""),
    "an empty thought": (None, f"<think>\n\n</think>\n\n{SAID}", None, SAID),
    "never ended": (None, f"<think>\n{THOUGHT}", THOUGHT, ""),
}


@pytest.mark.parametrize("name", CASES)
async def test_reasoning_is_a_field_of_its_own(name):
    template, text, thought, said = CASES[name]
    async with serving(text, template=template) as client:
        (choice,) = (await client.chat())["choices"]
    message = choice["message"]
    assert message["content"] == said
    assert message["reasoning"] == message["reasoning_content"] == thought
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_adds_up_to_the_whole_answer_wherever_tokens_end(name):
    template, text, _, _ = CASES[name]
    for seed in range(4):
        cuts = random.Random(seed)
        async with serving(text, cuts=cuts, template=template, burst=1 + seed % 3) as client:
            whole = await client.chat()
            chunks = await client.chunks(stream_options={"include_usage": True})
        assert without_ids(message_of(chunks)) == without_ids(whole["choices"][0]["message"])
        assert chunks[-1]["usage"] == whole["usage"]


async def test_thinking_goes_before_speaking_in_a_stream():
    async with serving(WHOLE) as client:
        chunks = await client.chunks()
    deltas = [choice["delta"] for chunk in chunks[1:] for choice in chunk["choices"]]
    kinds = [kind for delta in deltas for kind in ("reasoning", "content") if delta.get(kind)]
    assert kinds == sorted(kinds, reverse=True)
    assert set(kinds) == {"reasoning", "content"}
    assert all(delta["reasoning"] == delta["reasoning_content"] for delta in deltas)


@pytest.mark.parametrize(
    ("template", "text", "counted"),
    [
        (None, WHOLE, f"<think>\n{THOUGHT}\n</think>"),
        (BEGUN, f"{THOUGHT}\n</think>\n\n{SAID}", f"{THOUGHT}\n</think>"),
        (None, SAID, ""),
    ],
)
async def test_usage_counts_reasoning(template, text, counted):
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving(text, template=template) as client:
        whole = await client.chat()
        chunks = await client.chunks(stream_options=options)
    expected = len(tokens(counted)) if counted else 0
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": expected}
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": expected}
    running = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
    assert running == sorted(running)


@pytest.mark.parametrize("extra", [{}, {"logprobs": True}, {"stop": "zzz"}, {"n": 2}])
async def test_every_delta_says_whether_there_is_reasoning(extra):
    """DeepSeek's own sample reads the field of each."""
    async with (
        serving(WHOLE) as client,
        openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="unused", max_retries=0) as api,
    ):
        asked: Any = HELLO | extra | {"model": "tiny", "stream": True}
        stream: Any = await api.chat.completions.create(**asked)
        deltas = [choice.delta async for chunk in stream for choice in chunk.choices]
    assert {delta.reasoning_content or "" for delta in deltas} != {""}
    assert all(delta.reasoning == delta.reasoning_content for delta in deltas)


async def test_a_model_that_does_not_reason_says_nothing_of_it():
    async with frontend(Script(tokens=[5, 1])) as client:
        (choice,) = (await client.chat())["choices"]
        chunks = await client.chunks()
    assert "reasoning" not in choice["message"]
    assert not any(
        "reasoning" in choice["delta"] for chunk in chunks for choice in chunk["choices"]
    )


async def test_usage_of_a_model_that_does_not_reason_says_nothing_of_it():
    async with frontend(Script(tokens=[5, 1])) as client:
        assert "completion_tokens_details" not in (await client.chat())["usage"]


async def test_a_thought_goes_on_where_a_message_broke_off():
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "<think>\nThey say"},
    ]
    async with serving(f" hello.\n</think>\n\n{SAID}") as client:
        whole = await client.chat(messages=turns, continue_final_message=True)
    message = whole["choices"][0]["message"]
    assert (message["reasoning"].strip(), message["content"]) == ("hello.", SAID)


@pytest.mark.parametrize("extra", [{}, {"stop": "zzz"}, {"logprobs": True}])
async def test_reasoning_can_be_left_out(extra):
    async with serving(WHOLE) as client:
        whole = await client.chat(include_reasoning=False, **extra)
        chunks = await client.chunks(
            include_reasoning=False, stream_options={"include_usage": True}, **extra
        )
    message = whole["choices"][0]["message"]
    assert message["content"] == SAID
    assert message["reasoning"] is message["reasoning_content"] is None
    assert without_ids(message_of(chunks)) == without_ids(message)
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == len(tokens(WHOLE)) + 1
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 10
    if "logprobs" in extra:
        told = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
        count = sum(len(one["content"]) for one in told)
        assert count == whole["usage"]["completion_tokens"]


async def test_reasoning_and_a_call_of_a_tool():
    text = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}{call('weather', city='Rome')}"
    for seed in range(4):
        async with serving(text, cuts=random.Random(seed)) as client:
            (choice,) = (await client.chat(tools=[WEATHER]))["choices"]
            chunks = await client.chunks(tools=[WEATHER])
        message = choice["message"]
        assert (message["reasoning"], message["content"]) == (THOUGHT, SAID)
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome"}
        assert choice["finish_reason"] == "tool_calls"
        assert without_ids(message_of(chunks)) == without_ids(message)


@pytest.mark.parametrize("end", ["", f"\n</think>\n{SAID}"])
async def test_a_call_ends_the_block_that_it_stands_in(end: str):
    text = f"<think>\nI look.\n{call('weather', city='Rome')}{end}"
    async with serving(text) as client:
        (choice,) = (await client.chat(tools=[WEATHER]))["choices"]
        (plain,) = (await client.chat())["choices"]
    message = choice["message"]
    assert [one["function"]["name"] for one in message["tool_calls"]] == ["weather"]
    assert message["reasoning"] == "I look."
    assert message["content"] == (SAID if end else None)
    assert choice["finish_reason"] == "tool_calls"
    assert "tool_calls" not in plain["message"], "without tools it is only thought of"


# ---------------------------------------------------------------- effort


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "||"),
        ({"reasoning_effort": "high"}, "high||"),
        ({"reasoning_effort": "none"}, "none|False|False"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "none|True|False",
        ),
        ({"chat_template_kwargs": {"thinking": True, "reasoning_effort": "x"}}, "x||True"),
        ({"enable_thinking": False}, "|False|False"),
        ({"thinking": {"type": "enabled"}}, "|True|True"),
        ({"thinking": {"type": "disabled"}}, "|False|False"),
        ({"thinking": {"type": "auto"}}, "||"),
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "|True|True"),
        ({"reasoning_effort": "none", "enable_thinking": True}, "none|True|True"),
        ({"enable_thinking": True, "chat_template_kwargs": {"thinking": 0}}, "|True|0"),
    ],
)
async def test_effort_is_a_variable_of_the_template(fields, shown):
    template = "{{ reasoning_effort }}|{{ enable_thinking }}|{{ thinking }}"
    async with serving(SAID, template=template) as client:
        await client.chat(**fields)
        (request,) = client.backend.requests
    assert TOKENIZER.decode(request.prompt) == shown


async def test_no_effort_is_no_thinking_where_the_template_knows():
    async with serving(SAID) as client:
        (choice,) = (await client.chat(reasoning_effort="none"))["choices"]
        (request,) = client.backend.requests
    prompt = TOKENIZER.decode(request.prompt, skip_special_tokens=False)
    assert prompt.endswith("<think>\n\n</think>\n\n")
    assert choice["message"]["content"] == SAID


# ---------------------------------------------------------------- models that mark nothing


async def test_a_bound_on_what_cannot_be_told_apart_is_refused():
    fields = {"thinking_token_budget": 10}
    async with frontend(Script(tokens=[5, 1])) as client:
        status, _, answer = await client.post(CHAT, HELLO | fields)
        assert (status, answer["error"]["param"]) == (400, "thinking_token_budget")
        assert "--reasoning-parser" in answer["error"]["message"]
        await client.chat(include_reasoning=True)
        await client.chat(include_reasoning=False)
