"""Translates `/v1/responses` to a chat: items become messages, and other fields get chat's names.

An assistant's turn is several items there (reasoning, a message, function calls) and one message
here. Content other than text and images, and references to stored data, are refused with an error
that names them. `responses_tools.py` translates tools.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from pdserve.errors import ContextLengthExceeded, InvalidRequest
from pdserve.frontend.api.adapters.common import (
    content_of,
    image_part,
    missing,
    required,
    unsupported,
)
from pdserve.frontend.api.adapters.responses_output import (
    ResponsesAdapter,
    failed_stream_events,
    initial_response,
)
from pdserve.frontend.api.adapters.responses_tools import INPUT, Toolset, flat_name, toolset_of
from pdserve.frontend.preprocess.error_fields import reword_errors
from pdserve.frontend.preprocess.input_processor import plan_chat
from pdserve.frontend.preprocess.text_cost import MIN_STRUCTURED_CHARS
from pdserve.protocols.completion_requests import (
    ChatRequest,
    ContentPart,
    FunctionCall,
    JsonSchemaFormat,
    Message,
    MessageRole,
    ResponseFormat,
    ToolCall,
)
from pdserve.protocols.extensions import extensions_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.frontend.plan import RequestPlan
    from pdserve.frontend.preprocess.input_processor import PlanContext
    from pdserve.protocols.responses_api import InputItem, InputPart, ResponsesRequest

_NAMES = {
    r"messages(?:\[\d+\][\w.\[\]]*)?": "input",
    r"max_completion_tokens": "max_output_tokens",
    r"response_format\.json_schema": "text.format",
    r"response_format": "text.format",
    r"reasoning_effort": "reasoning.effort",
    r"logprobs": "include",
    r"tools(\[\d+\])\.function": r"tools\1",
    r"tool_choice\.function": "tool_choice",
}
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (
    _LOGPROBS,
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)


async def plan_responses(request: ResponsesRequest, context: PlanContext) -> RequestPlan:
    """Makes the plan of a `/v1/responses` request. Errors: `InvalidRequest` and its subclasses,
    `Overloaded`."""
    size = MIN_STRUCTURED_CHARS if request.tools or isinstance(request.input, list) else 0
    tools, chat = await context.pool.run(size, _chat, request, context.config.strict_api)
    context = replace(context, any_output=True)
    try:
        with reword_errors(_NAMES, tools.places):
            plan = await plan_chat(chat, context)
    except ContextLengthExceeded as error:
        if not request.stream:
            raise
        said = initial_response(request, tools, f"resp_{context.request_id}", int(time.time()))
        raise FailedStream(error, failed_stream_events(said, error)) from None
    plan = replace(plan, answer_id=f"resp_{context.request_id}", left_out=tools.left_out)
    return replace(plan, adapter=ResponsesAdapter(request, plan, tools))


def _chat(request: ResponsesRequest, strict: bool) -> tuple[Toolset, ChatRequest]:
    """Translates the request; takes 0.1 s for as many items as a body can have."""
    tools = toolset_of(request, strict=strict)
    return tools, chat_request(request, tools)


class FailedStream(ContextLengthExceeded):
    """The prompt of a stream does not fit. As at OpenAI, the error is an event of the stream: Codex
    then shortens the conversation, while it gives up at a 400."""

    def __init__(self, error: ContextLengthExceeded, events: bytes) -> None:
        super().__init__(error.message, param=error.param, overrun=error.overrun)
        self.events = events


def chat_request(request: ResponsesRequest, tools: Toolset) -> ChatRequest:
    """The request as a chat. Errors: `InvalidRequest` for what a chat cannot express."""
    _check(request)
    logprobs = bool(request.top_logprobs) or _LOGPROBS in (request.include or ())
    reasoning = request.reasoning
    return ChatRequest(
        messages=_messages(request),
        model=request.model,
        stream=request.stream,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        stop=request.stop,
        user=request.user,
        logprobs=logprobs or None,
        top_logprobs=request.top_logprobs if logprobs else None,
        tools=list(tools.functions) or None,
        tool_choice=tools.choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request),
        reasoning_effort=None if reasoning is None else reasoning.effort,
        thinking_token_budget=request.thinking_token_budget,
        verbosity=None if request.text is None else request.text.verbosity,
        prompt_cache_retention=request.prompt_cache_retention,
        **extensions_of(request),
    )


def _check(request: ResponsesRequest) -> None:
    """Checks fields for which only the default value is supported."""
    if request.background:
        raise InvalidRequest(
            "'background' is not supported: nothing is stored here; use 'stream' for long answers",
            param="background",
        )
    if request.truncation not in (None, "disabled"):
        instead = "leave it out, and shorten 'input' yourself"
        raise unsupported("truncation", request.truncation, instead)
    for index, name in enumerate(request.include or ()):
        if name not in _INCLUDABLE:
            raise unsupported(f"include[{index}]", name, f"use '{_LOGPROBS}' for logprobs")


# ---------------------------------------------------------------- input


def _messages(request: ResponsesRequest) -> list[Message]:
    conversation = _Conversation()
    if request.instructions:
        conversation.say("system", request.instructions)
    if isinstance(request.input, str):
        conversation.say("user", request.input)
    elif not request.input:
        raise InvalidRequest("'input' must not be empty", param="input")
    else:
        for index, item in enumerate(request.input):
            conversation.take(item, f"input[{index}]")
    return conversation.messages()


@dataclass
class _Turn:
    """An assistant's message that is being built. Uses lists, so that many items take linear
    time."""

    message: Message
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def answers(self) -> bool:
        """True if it has content or calls, so that further reasoning belongs to another message."""
        return bool(self.message.content or self.calls)

    def end(self) -> None:
        """Ends the message."""
        message = self.message
        message.reasoning = message.reasoning_content = "\n".join(self.thoughts) or None
        message.tool_calls = self.calls or None


class _Conversation:
    """Builds messages from items."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._turn: _Turn | None = None
        """The assistant's message that the next item may still belong to."""

    def messages(self) -> list[Message]:
        """The messages of the chat; call it after the last item."""
        self._end_turn()
        return self._messages

    def take(self, item: InputItem, where: str) -> None:
        """Adds an item. Errors: `InvalidRequest` for an unsupported or incomplete item."""
        kind = item.type or ("message" if item.role is not None else "item_reference")
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reason(item, where)
        elif kind == "function_call":
            self._call(item, where)
        elif kind == "custom_tool_call":
            self._custom_call(item, where)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            content = _content(item.output, f"{where}.output")
            call_id = required(item.call_id, f"{where}.call_id")
            self._add(Message(role="tool", content=content, tool_call_id=call_id))
        elif kind == "item_reference":
            instead = "nothing is stored here: send the item itself"
            raise unsupported(f"{where}.type", kind, instead)
        else:
            instead = "use messages, reasoning, and calls of functions and custom tools"
            raise unsupported(f"{where}.type", kind, instead)

    def say(self, role: MessageRole, content: str) -> None:
        """Adds a message of another role."""
        self._add(Message(role=role, content=content))

    def _message(self, item: InputItem, where: str) -> None:
        role = required(item.role, f"{where}.role")
        content = _content(item.content, f"{where}.content")
        if role in ("user", "system", "developer"):
            self._add(Message(role=role, content=content))  # type: ignore[arg-type]  # checked above
        elif role == "assistant":
            self._unanswered().message.content = content
        else:
            raise unsupported(f"{where}.role", role, "use user, assistant, system or developer")

    def _reason(self, item: InputItem, where: str) -> None:
        parts = item.content if isinstance(item.content, list) else []
        texts = _texts(parts, f"{where}.content") or _texts(item.summary or [], f"{where}.summary")
        if not texts and item.encrypted_content is not None:
            raise InvalidRequest(
                f"'{where}.encrypted_content' cannot be read here; send 'content', or leave the "
                "item out",
                param=f"{where}.encrypted_content",
            )
        thoughts = self._unanswered().thoughts
        thoughts += texts if thoughts or any(texts) else ()

    def _call(self, item: InputItem, where: str) -> None:
        self._called(item, required(item.arguments, f"{where}.arguments"), where)

    def _custom_call(self, item: InputItem, where: str) -> None:
        arguments = {INPUT: required(item.input, f"{where}.input")}
        self._called(item, msgspec.json.encode(arguments).decode(), where)

    def _called(self, item: InputItem, arguments: str, where: str) -> None:
        name = flat_name(item.namespace, required(item.name, f"{where}.name"))
        function = FunctionCall(name=name, arguments=arguments)
        call_id = required(item.call_id, f"{where}.call_id")
        turn = self._turn or self._begin()
        turn.calls.append(ToolCall(id=call_id, type="function", function=function))

    def _unanswered(self) -> _Turn:
        """The open message that has no answer yet, to which reasoning or an answer belongs."""
        turn = self._turn
        return self._begin() if turn is None or turn.answers() else turn

    def _begin(self) -> _Turn:
        turn = _Turn(Message(role="assistant", content=""))
        self._add(turn.message)
        self._turn = turn
        return turn

    def _add(self, message: Message) -> None:
        self._end_turn()
        self._messages.append(message)

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._turn.end()
            self._turn = None


def _content(content: str | list[InputPart] | None, where: str) -> str | list[ContentPart]:
    if content is None:
        raise missing(where)
    return content if isinstance(content, str) else content_of(_parts(content, where))


def _parts(parts: Sequence[InputPart], where: str) -> list[str | ContentPart]:
    """Texts and images."""
    found: list[str | ContentPart] = []
    for index, part in enumerate(parts):
        if part.type == "input_image":
            place = f"{where}[{index}].image_url"
            found.append(image_part(required(part.image_url, place), place))
        else:
            found.append(_part_text(part, f"{where}[{index}]", "use text and 'input_image'"))
    return found


def _texts(parts: Sequence[InputPart], where: str) -> list[str]:
    instead = "only text is understood"
    return [_part_text(part, f"{where}[{index}]", instead) for index, part in enumerate(parts)]


def _part_text(part: InputPart, where: str, instead: str) -> str:
    if part.type == "refusal":
        return required(part.refusal, f"{where}.refusal")
    if part.type in _TEXTS:
        return required(part.text, f"{where}.text")
    raise unsupported(f"{where}.type", part.type, instead)


# ---------------------------------------------------------------- output


def _response_format(request: ResponsesRequest) -> ResponseFormat | None:
    wanted = None if request.text is None else request.text.format
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return ResponseFormat(type=wanted.type)
    if wanted.schema is None:
        raise missing("text.format.schema")
    named = JsonSchemaFormat(
        name=required(wanted.name, "text.format.name"),
        schema=wanted.schema,
        description=wanted.description,
        strict=wanted.strict,
    )
    return ResponseFormat(type="json_schema", json_schema=named)
