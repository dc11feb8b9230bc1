"""What decides whether text work runs on the event loop."""

from __future__ import annotations

import importlib
import json
import threading
from typing import Any

import pytest

from pdserve import accel
from pdserve.frontend.api.adapters.anthropic_request import plan_messages
from pdserve.frontend.api.adapters.ollama_request import plan_ollama_chat
from pdserve.frontend.api.adapters.responses_request import plan_responses
from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.model_registry import PreparedModel
from pdserve.frontend.preprocess.embeddings import plan_embeddings
from pdserve.frontend.preprocess.input_processor import (
    PlanContext,
    chat_tokens,
    plan_chat,
    plan_completion,
)
from pdserve.frontend.preprocess.output_parsers import callable_tools
from pdserve.frontend.preprocess.scoring import plan_rerank, plan_score
from pdserve.frontend.preprocess.text_cost import MIN_STRUCTURED_CHARS, chat_cost, texts_cost
from pdserve.protocols.anthropic_messages import MESSAGES
from pdserve.protocols.embeddings import EMBEDDING
from pdserve.protocols.ollama.requests import OLLAMA_CHAT
from pdserve.protocols.request_decoder import CHAT, COMPLETION, TOKENIZE
from pdserve.protocols.responses_api import RESPONSES
from pdserve.protocols.scoring import RERANK, SCORE
from pdserve.text.text_pool import INLINE_CHARS, INLINE_FAST, TextPool
from tests.frontend.support import HELLO, card

LONG = "x" * (INLINE_CHARS + 1)
SLOW = PreparedModel.from_card(card()).tokenizer
"""A tokenizer without the extension, whether that is built or not."""
SLOW._fast = None
USER: dict[str, Any] = {"role": "user", "content": "hello"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
TOOLS = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(30)]
CASES: dict[str, dict[str, Any]] = {
    "content": {"messages": [{"role": "user", "content": LONG}]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
    "reasoning": {"messages": [USER, {"role": "assistant", "reasoning": LONG}]},
    "reasoning_content": {"messages": [USER, {"role": "assistant", "reasoning_content": LONG}]},
    "a name": {"messages": [USER | {"name": LONG}]},
    "an id": {"messages": [{"role": "tool", "content": "", "tool_call_id": LONG}]},
    "arguments": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": json.dumps({"a": LONG})}}],
            },
        ]
    },
    "many messages": {"messages": [USER] * 80},
    "many calls": {
        "messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 80}]
    },
    "tools": HELLO | {"tools": TOOLS},
    "a document": HELLO | {"documents": [{}]},
    "an argument of the template": HELLO | {"chat_template_kwargs": {"a": [[]]}},
}

needs_extension = pytest.mark.skipif(not accel.NATIVE, reason="the extension is not built")


def request(fields: dict[str, Any], decoder: Any = CHAT) -> Any:
    return decoder.decode(json.dumps(fields).encode()).request


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("decoder", [CHAT, TOKENIZE], ids=["chat", "tokenize"])
async def test_what_is_long_or_has_structure_is_rendered_in_a_thread(
    name: str, decoder: Any, monkeypatch: pytest.MonkeyPatch
):
    """Whatever field it stands in."""
    model = PreparedModel.from_card(card(tool_parser="qwen3_coder"))
    monkeypatch.setattr(model.tokenizer, "_fast", None)
    pool = TextPool()
    context = PlanContext(model=model, config=FrontendConfig(), pool=pool, request_id="r")
    try:
        await chat_tokens(request(CASES[name], decoder), context)
        # A look for images among one or a few parts is cheap.
        looks = int(name == "parts")
        assert pool.stats().inline == looks
        assert pool.stats().handed_over == 1
        await chat_tokens(request(HELLO, decoder), context)
        assert pool.stats().inline == looks + 1
    finally:
        await pool.close()


def test_all_text_counts_where_it_stands():
    few = request(CASES["content"])
    assert chat_cost(few, (), SLOW) == 64 + len(LONG)
    both = CASES["reasoning"]["messages"][1] | {"reasoning_content": LONG}
    twice = request({"messages": [USER, both]})
    assert chat_cost(twice, (), SLOW) == 64 + len("hello") + 64 + 2 * len(LONG)
    small = request(HELLO | {"tools": [TOOL]})
    without = chat_cost(request(HELLO), (), SLOW)
    assert without + 4 * len('{"name":"f"}') < chat_cost(small, small.tools, SLOW) < INLINE_CHARS
    documents = request(CASES["a document"])
    assert chat_cost(documents, (), SLOW) == MIN_STRUCTURED_CHARS
    large = request(HELLO | {"tools": [TOOL | {"function": {"name": "f", "description": LONG}}]})
    assert chat_cost(large, large.tools, SLOW) > len(LONG) + 64
    chinese = request({"messages": [USER, {"role": "user", "content": "\u4e2d" * 100}]})
    assert chat_cost(chinese, (), SLOW) == 64 + len("hello") + 64 + 3 * 100


class Extension:
    """Says only that the extension encodes."""

    is_fast = True


FAST: Any = Extension()


def test_text_that_the_extension_encodes_costs_less_but_items_do_not():
    few = request({"messages": [{"role": "user", "content": "x" * 6400}]})
    assert chat_cost(few, (), FAST) == 64 + 6400 // INLINE_FAST
    many = request({"messages": [{"role": "user", "content": "x"}] * 64})
    assert chat_cost(many, (), FAST) == 64 * 64 + 4 > INLINE_CHARS
    assert texts_cost(["x"] * 64, FAST) > INLINE_CHARS
    assert texts_cost(["x" * 6400], FAST) == 64 + 6400 // INLINE_FAST
    longest = INLINE_FAST * INLINE_CHARS
    assert texts_cost(["x" * (longest + 1)], FAST) == 64 + longest + 1


@needs_extension
async def test_a_long_chat_is_encoded_in_place_by_the_extension_and_not_by_its_twin():
    model = PreparedModel.from_card(card(max_model_len=1 << 17))
    assert model.tokenizer.choose_encoder().fast
    pool = TextPool()
    context = PlanContext(model=model, config=FrontendConfig(), pool=pool, request_id="r")
    body = {"messages": [{"role": "user", "content": "a b c " * 10_000}]}
    try:
        found = await chat_tokens(request(body), context)
        assert (pool.stats().inline, pool.stats().handed_over) == (1, 0)
        model.tokenizer._fast = None
        assert await chat_tokens(request(body), context) == found
        assert pool.stats().handed_over == 1
    finally:
        await pool.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
        {"structured_outputs": {"regex": "a"}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL | {"function": {"name": "f", "strict": True}}]},
    ],
)
async def test_no_grammar_is_made_on_the_event_loop(fields: dict[str, Any]):
    model = PreparedModel.from_card(card(tool_parser="pythonic", features=("grammar",)))
    pool = TextPool()
    context = PlanContext(model=model, config=FrontendConfig(), pool=pool, request_id="r")
    try:
        await plan_chat(request(HELLO | fields), context)
        assert (pool.stats().inline, pool.stats().handed_over) == (1, 2)
    finally:
        await pool.close()


async def test_tools_by_which_no_call_could_be_read_in_time_are_refused():
    """Also where nothing is enforced: the parser looks at them when the model calls one."""
    parts = [{"$ref": "#/properties/x"}] * 1000
    spec = {"name": "f", "parameters": {"properties": {"x": {"anyOf": parts}}}}
    bad = HELLO | {"tools": [TOOL, {"type": "function", "function": spec | {"name": "g"}}]}
    pool = TextPool()
    model = PreparedModel.from_card(card(tool_parser="qwen3_coder"))
    context = PlanContext(model=model, config=FrontendConfig(), pool=pool, request_id="r")
    try:
        with pytest.raises(Exception, match="too complex") as caught:
            await plan_chat(request(bad), context)
        assert getattr(caught.value, "param", "") == "tools[1].function.parameters"
    finally:
        await pool.close()


def test_a_request_has_a_bounded_number_of_tools():
    model = PreparedModel.from_card(card(tool_parser="hermes"))
    asked = request(HELLO | {"tools": [TOOL]})
    asked.tools = [asked.tools[0]] * 1025
    with pytest.raises(Exception, match="the limit is 1024"):
        callable_tools(asked, model)


MANY_BLOCKS = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 100}]


@pytest.mark.parametrize(
    ("plan", "decoder", "fields", "function"),
    [
        (
            plan_responses,
            RESPONSES,
            {"input": [USER]},
            "pdserve.frontend.api.adapters.responses_request._chat",
        ),
        (
            *(plan_messages, MESSAGES, {"max_tokens": 1, "messages": MANY_BLOCKS}),
            "pdserve.frontend.api.adapters.anthropic_request.chat_request",
        ),
        (
            *(plan_ollama_chat, OLLAMA_CHAT, {"messages": [USER] * 100}),
            "pdserve.frontend.api.adapters.ollama_request.chat_request",
        ),
    ],
)
async def test_items_and_blocks_become_messages_in_a_thread(
    plan: Any, decoder: Any, fields: Any, function: str, monkeypatch: pytest.MonkeyPatch
):
    """As many as a body may have take 0.1 s."""
    threads = []
    module, _, name = function.rpartition(".")
    work = getattr(importlib.import_module(module), name)

    def watched(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return work(*args)

    monkeypatch.setattr(function, watched)
    pool = TextPool()
    model = PreparedModel.from_card(card())
    context = PlanContext(model=model, config=FrontendConfig(), pool=pool, request_id="r")
    try:
        await plan(request(fields, decoder), context)
        assert threads
        assert threading.main_thread() not in threads
    finally:
        await pool.close()


@pytest.mark.parametrize(
    ("plan", "decoder", "fields"),
    [
        (plan_completion, COMPLETION, {"prompt": ["a"] * 70}),
        (plan_completion, COMPLETION, {"prompt": "a", "bad_words": ["b"] * 40}),
        (plan_embeddings, EMBEDDING, {"input": ["a"] * 70}),
        (plan_rerank, RERANK, {"query": "a", "documents": ["a"] * 70}),
        (plan_score, SCORE, {"text_1": ["a"] * 70, "text_2": ["a"] * 70}),
    ],
)
async def test_many_short_texts_are_tokenised_in_a_thread(plan: Any, decoder: Any, fields: Any):
    model = PreparedModel.from_card(
        card(features=("bans", "embeddings"), pooling="mean", embedding_size=4)
    )
    pool = TextPool()
    context = PlanContext(model=model, config=FrontendConfig(), pool=pool, request_id="r")
    try:
        await plan(request(fields, decoder), context)
        assert pool.stats().handed_over == 1
    finally:
        await pool.close()
