"""Translations and wording of the other APIs by themselves: no body breaks the one, no cut the
other."""

from __future__ import annotations

import itertools
import json
import re
from types import SimpleNamespace
from typing import Any

import msgspec
from anthropic.lib.streaming._messages import accumulate_event
from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai._models import construct_type_unchecked
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent

from pdserve.errors import InvalidRequest
from pdserve.frontend.api.adapters import anthropic_request, ollama_request, responses_request
from pdserve.frontend.api.adapters.anthropic_output import AnthropicAdapter
from pdserve.frontend.api.adapters.ollama_output import OllamaAdapter
from pdserve.frontend.api.adapters.responses_output import ResponsesAdapter
from pdserve.frontend.api.adapters.responses_tools import Toolset, toolset_of
from pdserve.frontend.output.chat_parts import chat_message
from pdserve.frontend.output.output_processor import OutputDelta
from pdserve.messages.request import SamplingParams
from pdserve.protocols.anthropic_messages import MESSAGES
from pdserve.protocols.completion_requests import ChatRequest
from pdserve.protocols.completion_responses import (
    ChatChoice,
    ChatCompletion,
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from pdserve.protocols.ollama.requests import OLLAMA_CHAT
from pdserve.protocols.responses_api import RESPONSES
from pdserve.protocols.sse import SseDecoder
from pdserve.text.output_parts import (
    ContentDelta,
    OutputPart,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)

# ---------------------------------------------------------------------- translations

TEXT = st.text(max_size=5)
KINDS = st.sampled_from(
    [
        *("message", "reasoning", "function_call", "function_call_output", "item_reference"),
        *("input_text", "output_text", "refusal", "input_image", "text", "image", "thinking"),
        *("tool_use", "tool_result", "function", "web_search", "enabled", "disabled", "auto"),
        *("namespace", "custom_tool_call", "custom_tool_call_output", "allowed_tools"),
        *("any", "tool", "none", "json_schema", "json_object", "custom", "adaptive", ""),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 30) | TEXT | KINDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)


def objects(*fields: str, **kinds: Any) -> Any:
    """Objects with some of these fields, likely ones in them."""
    optional = dict.fromkeys(fields, TEXT) | kinds
    return st.fixed_dictionaries({}, optional=optional) | st.fixed_dictionaries(
        {"type": KINDS}, optional=optional
    )


PART = objects("text", "refusal", "thinking", "signature", "id", "name", "tool_use_id", "tool")
PARTS = TEXT | st.lists(PART, max_size=3)
ROLES = st.sampled_from(["user", "assistant", "system", "developer", "tool"])
ITEM = objects(
    *("id", "call_id", "name", "arguments", "encrypted_content", "input", "namespace"),
    role=ROLES,
    content=PARTS,
    summary=st.lists(PART, max_size=2),
    output=PARTS,
)
BLOCK = objects(
    *("text", "thinking", "id", "name", "tool_use_id"),
    input=st.dictionaries(TEXT, VALUES, max_size=2),
    content=PARTS,
)
MESSAGE = st.fixed_dictionaries(
    {"role": ROLES, "content": TEXT | st.lists(BLOCK, max_size=3)},
)
TOOL = objects("name", "description", parameters=VALUES, input_schema=VALUES)
TOOLS = st.lists(
    TOOL | objects("name", tools=st.lists(TOOL, max_size=2), format=objects("definition")),
    max_size=2,
)


def bodies(required: dict[str, Any], **optional: Any) -> Any:
    return st.fixed_dictionaries(required, optional=optional)


@given(
    bodies(
        {"input": TEXT | st.lists(ITEM, max_size=4)},
        instructions=TEXT,
        tools=TOOLS,
        tool_choice=KINDS | objects("name", tools=st.lists(objects("name"), max_size=2)),
        text=objects(format=objects("name", schema=VALUES)),
        reasoning=objects("effort"),
        include=st.lists(KINDS, max_size=2),
        truncation=KINDS,
    )
)
def test_every_body_of_responses_is_a_chat_or_refused(body):
    chat = translated(RESPONSES, as_chat, body)
    assert chat is None or well_formed(chat)


def as_chat(request: Any) -> ChatRequest:
    return responses_request.chat_request(request, toolset_of(request, strict=False))


@given(
    bodies(
        {"messages": st.lists(MESSAGE, max_size=4), "max_tokens": st.just(5)},
        system=PARTS,
        tools=TOOLS,
        tool_choice=objects("name"),
        thinking=objects(budget_tokens=st.integers(0, 9)),
        output_config=objects("effort", format=objects(schema=VALUES)),
    )
)
def test_every_body_of_messages_is_a_chat_or_refused(body):
    chat = translated(MESSAGES, anthropic_request.chat_request, body)
    if chat is not None:
        assert well_formed(chat)
        roles = [message.role for message in chat.messages]
        assert all(a != b or a == "tool" for a, b in itertools.pairwise(roles)), roles


OLLAMA_MESSAGE = st.fixed_dictionaries(
    {"role": ROLES, "content": TEXT | st.none()},
    optional={
        "thinking": TEXT,
        "tool_name": TEXT,
        "tool_call_id": TEXT,
        "tool_calls": st.lists(
            st.fixed_dictionaries(
                {
                    "function": st.fixed_dictionaries(
                        {"name": TEXT, "arguments": st.dictionaries(TEXT, VALUES, max_size=2)}
                    )
                }
            ),
            max_size=3,
        ),
    },
)


@given(
    bodies(
        {"messages": st.lists(OLLAMA_MESSAGE, min_size=1, max_size=6)},
        format=KINDS | st.dictionaries(TEXT, VALUES, max_size=2),
        think=st.booleans() | KINDS | st.just("high"),
        options=bodies(
            {},
            num_predict=st.integers(-2, 9),
            seed=st.integers(-1, 3),
            repeat_last_n=st.integers(-1, 9),
            repeat_penalty=st.just(1.1),
            mirostat=st.integers(0, 2),
        ),
    )
)
def test_every_body_of_ollama_is_a_chat_or_refused(body):
    model: Any = SimpleNamespace(reasoning=object(), card=SimpleNamespace(name="m"))
    chat = translated(OLLAMA_CHAT, lambda each: ollama_request.chat_request(each, model), body)
    if chat is not None:
        assert well_formed(chat)
        ids = [call.id for message in chat.messages for call in message.tool_calls or ()]
        assert len(set(ids)) == len(ids)


def translated(decoder: Any, translate: Any, body: Any) -> ChatRequest | None:
    """None: it was refused, by a name that stands in the body."""
    fault = None
    try:
        chat: ChatRequest = translate(decoder.decode(json.dumps(body).encode()).request)
    except InvalidRequest as error:
        fault = error
    if fault is None:
        return chat
    assert fault.param is None or re.split(r"[.\[]", fault.param)[0] in body
    return None


def well_formed(chat: ChatRequest) -> bool:
    """It would have been taken as a chat's own body, and has something to say."""
    msgspec.json.decode(msgspec.json.encode(chat), type=ChatRequest)
    assert chat.messages
    return all(
        message.content is not None or message.role == "assistant" for message in chat.messages
    )


# ---------------------------------------------------------------------- wording

WORDS = st.text(min_size=1, max_size=4)
USAGE = Usage(
    prompt_tokens=9,
    completion_tokens=5,
    total_tokens=14,
    prompt_tokens_details=PromptTokensDetails(cached_tokens=4),
    completion_tokens_details=CompletionTokensDetails(reasoning_tokens=2),
)


@st.composite
def answers(draw: Any) -> list[OutputPart]:
    """Reasoning, content and calls, each in any number of parts."""
    parts: list[OutputPart] = [ReasoningDelta(text) for text in draw(st.lists(WORDS, max_size=3))]
    parts += [ContentDelta(text) for text in draw(st.lists(WORDS, max_size=3))]
    for index in range(draw(st.integers(0, 3))):
        arguments = json.dumps(draw(st.dictionaries(WORDS, WORDS | st.integers(), max_size=2)))
        cut = draw(st.integers(0, len(arguments)))
        parts.append(ToolCallStart(index, draw(WORDS)))
        texts = (arguments[:cut], arguments[cut:])
        parts += [ToolCallArguments(index, text) for text in texts if text]
    return parts


def plan() -> Any:
    """As much of one as words need."""
    numbers = itertools.count()
    return SimpleNamespace(
        answer_id="id-1",
        created=1,
        model_name="m",
        requests=[SimpleNamespace(request_id="r", sampling=SamplingParams(max_tokens=1))],
        call_id=lambda: f"call-{next(numbers)}",
        logprobs=False,
        model=SimpleNamespace(card=SimpleNamespace(block_size=4)),
    )


def whole(parts: list[OutputPart]) -> ChatCompletion:
    """The same answer, not streamed."""
    choice = ChatChoice(
        index=0, message=chat_message(parts, plan().call_id), finish_reason="tool_calls"
    )
    return ChatCompletion(id="id-1", created=1, model="m", choices=[choice], usage=USAGE)


def streamed(adapter: Any, parts: list[OutputPart], cuts: list[int]) -> list[Any]:
    """The data of all events, with so many parts told at once."""
    told = adapter.begin(plan(), USAGE)
    left = list(parts)
    for cut in itertools.cycle(cuts):
        if not left:
            break
        told += adapter.parts(left[:cut], OutputDelta(""))
        del left[:cut]
    told += adapter.finish("tool_calls", None, USAGE)
    return [json.loads(event.data) for event in SseDecoder().feed(told)]


EVENT: Any = ResponseStreamEvent
CUTS = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@given(answers(), CUTS)
def test_events_of_messages_add_up_to_the_whole_message(parts, cuts):
    expected = json.loads(AnthropicAdapter(plan()).whole(whole(parts)))
    message: Any = None
    buffers: dict[int, bytes] = {}
    for event in streamed(AnthropicAdapter(plan()), parts, cuts):
        message = accumulate_event(event=event, current_snapshot=message, json_bufs=buffers)
    found = json.loads(message.to_json())
    found.pop("stop_details", None)
    assert found == expected


@given(answers(), CUTS)
def test_events_of_responses_add_up_to_the_whole_response(parts, cuts):
    request = RESPONSES.decode(b'{"input": "x"}').request
    expected = json.loads(ResponsesAdapter(request, plan(), Toolset()).whole(whole(parts)))
    state: Any = ResponseStreamState(input_tools=omit, text_format=omit)
    events = streamed(ResponsesAdapter(request, plan(), Toolset()), parts, cuts)
    for event in events:
        state.handle_event(construct_type_unchecked(type_=EVENT, value=event))
    found = events[-1]["response"]
    assert found | {"completed_at": None} == expected | {"completed_at": None}
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert items == expected["output"]


@given(answers(), CUTS)
def test_lines_of_ollama_add_up_to_the_whole_answer(parts, cuts):
    def adapter() -> OllamaAdapter:
        context: Any = SimpleNamespace(arrival=0.0, time=lambda: 2.0)
        return OllamaAdapter("m", context, chat=True, plan=plan())

    expected = json.loads(adapter().whole(whole(parts)))
    lines = written(adapter(), parts, cuts)
    replies = [line.pop("message") for line in lines]
    for name in ("content", "thinking"):
        told = "".join([reply.get(name, "") for reply in replies])
        assert told == expected["message"].get(name, "")
    calls = [call for reply in replies for call in reply.get("tool_calls", ())]
    assert calls == expected["message"].get("tool_calls", [])
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    del expected["message"], expected["created_at"], lines[-1]["created_at"]
    assert lines[-1] == expected


def written(adapter: OllamaAdapter, parts: list[OutputPart], cuts: list[int]) -> list[Any]:
    """The objects of a stream, with so many parts told at once."""
    told = adapter.begin(plan(), USAGE)
    left = list(parts)
    for cut in itertools.cycle(cuts):
        if not left:
            break
        told += adapter.parts(left[:cut], OutputDelta(""))
        del left[:cut]
    told += adapter.finish("tool_calls", None, USAGE)
    return [json.loads(line) for line in told.splitlines()]
