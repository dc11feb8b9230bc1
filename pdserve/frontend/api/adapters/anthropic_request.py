"""Translates `/v1/messages` to a chat: blocks become messages, and other fields get chat's names.

The blocks of a turn may be text, thinking, tool calls and tool results; each result becomes a
message of its own. Neighbouring turns of one role are merged, as that API promises, since many
templates accept no others. Content other than text and images, and tools that a server would run,
are refused with an error that names them.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

import msgspec
from msgspec.structs import replace

from pdserve.errors import ContextLengthExceeded, InvalidRequest
from pdserve.frontend.api.adapters.anthropic_output import AnthropicAdapter
from pdserve.frontend.api.adapters.common import content_of, image_part, required, unsupported
from pdserve.frontend.preprocess.error_fields import reword_errors
from pdserve.frontend.preprocess.input_processor import plan_chat
from pdserve.frontend.preprocess.text_cost import MIN_STRUCTURED_CHARS
from pdserve.protocols.completion_requests import (
    ChatRequest,
    ContentPart,
    FunctionCall,
    FunctionSpec,
    JsonSchemaFormat,
    Message,
    MessageRole,
    NamedFunction,
    NamedTool,
    ReasoningEffort,
    ResponseFormat,
    Tool,
    ToolCall,
    ToolChoice,
)
from pdserve.protocols.extensions import extensions_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdserve.errors import Overrun
    from pdserve.frontend.plan import RequestPlan
    from pdserve.frontend.preprocess.input_processor import PlanContext
    from pdserve.protocols.anthropic_messages import (
        Block,
        CountTokensRequest,
        InputMessage,
        OutputFormat,
    )

_NAMES = {
    r"messages(?:\[\d+\][\w.\[\]]*)?": "messages",
    r"stop": "stop_sequences",
    r"response_format\.json_schema": "output_config.format",
    r"response_format": "output_config.format",
    r"reasoning_effort": "output_config.effort",
    r"thinking_token_budget": "thinking.budget_tokens",
    r"tools(\[\d+\])\.function\.parameters": r"tools\1.input_schema",
    r"tools(\[\d+\])\.function": r"tools\1",
    r"tool_choice\.function": "tool_choice",
}
_encode = msgspec.json.Encoder().encode
_FEW = 16
"""Number of plain text messages up to which the translation runs on the event loop."""


async def plan_messages(request: CountTokensRequest, context: PlanContext) -> RequestPlan:
    """Makes the plan of a `/v1/messages` request. Errors: `InvalidRequest` and its subclasses,
    `Overloaded`."""
    chat = await context.pool.run(_work(request), chat_request, request)
    context = replace(context, any_output=True)
    with _own_sentences(), reword_errors(_names(request)):
        plan = await plan_chat(chat, context)
    plan = replace(plan, answer_id=f"msg_{context.request_id}")
    room = plan.requests[0].sampling.max_tokens
    cut = request.max_tokens is not None and request.max_tokens > room
    return replace(plan, adapter=AnthropicAdapter(plan, cut=cut))


def _work(request: CountTokensRequest) -> int:
    """Cost of `chat_request`, which takes 0.1 s for the most blocks that a body can have."""
    plain = isinstance(request.system, str | None) and not request.tools
    if plain and len(request.messages) <= _FEW:
        plain = all(isinstance(message.content, str) for message in request.messages)
        return 0 if plain else MIN_STRUCTURED_CHARS
    return MIN_STRUCTURED_CHARS


@contextlib.contextmanager
def _own_sentences() -> Iterator[None]:
    """Rewords context errors as Anthropic's sentences, by which Claude Code recognizes them: after
    the first it shortens the conversation, after the second it asks for less output."""
    try:
        yield
    except ContextLengthExceeded as error:
        if (overrun := error.overrun) is not None:
            error.message = _sentence(overrun)
            error.args = (error.message,)
        raise


def _sentence(overrun: Overrun) -> str:
    prompt, output, context = overrun
    if not output:
        return (
            f"prompt is too long: {prompt} tokens > {context - 1} maximum. The context has "
            f"{context} tokens, output included; shorten 'messages'"
        )
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {output} > {context}, "
        f"decrease input length or `max_tokens` and try again: {context - prompt} would fit"
    )


def _names(request: CountTokensRequest) -> dict[str, str]:
    """Names of fields in errors; the format of the answer may stand in two places."""
    config = request.output_config
    if request.output_format is None or (config is not None and config.format is not None):
        return _NAMES
    return {
        their: own.replace("output_config.format", "output_format") for their, own in _NAMES.items()
    }


def chat_request(request: CountTokensRequest) -> ChatRequest:
    """The request as a chat. Errors: `InvalidRequest` for what a chat cannot express."""
    conversation = _Conversation()
    if request.system:
        conversation.say("system", _texts(request.system, "system"))
    for index, message in enumerate(request.messages):
        conversation.take(message, f"messages[{index}]")
    fields = extensions_of(request) | _thinking(request) | _tool_choice(request)
    if request.cache_ttl is None and request.cache_scope != "never":
        fields["cache_ttl"] = _cache_ttl(request)
    return ChatRequest(
        messages=conversation.messages(),
        continue_final_message=conversation.continues() or None,
        model=request.model,
        stream=request.stream,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        stop=request.stop_sequences or None,
        tools=_tools(request),
        response_format=_response_format(request),
        reasoning_effort=_effort(request),
        **fields,
    )


# ---------------------------------------------------------------- turns


@dataclass
class _Turn:
    """A message that is being built."""

    role: MessageRole
    texts: list[str | ContentPart] = field(default_factory=list)
    """Texts and images."""
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    call_id: str | None = None

    def message(self) -> Message:
        thoughts = "\n".join(self.thoughts) or None
        return Message(
            role=self.role,
            content=content_of(self.texts) if self.texts or not self.calls else None,
            reasoning=thoughts,
            reasoning_content=thoughts,
            tool_calls=self.calls or None,
            tool_call_id=self.call_id,
        )


class _Conversation:
    """Builds messages from blocks."""

    def __init__(self) -> None:
        self._turns: list[_Turn] = []

    def messages(self) -> list[Message]:
        """The messages of the chat."""
        return [turn.message() for turn in self._turns]

    def continues(self) -> bool:
        """True if the model is to continue the last turn.

        Errors: `InvalidRequest` if that turn cannot be continued.
        """
        last = self._turns[-1]
        if last.role != "assistant":
            return False
        if last.calls or not any(last.texts):
            raise InvalidRequest(
                "'messages' end with an assistant's turn that cannot go on: send the 'tool_result' "
                "blocks of its calls, or text to be continued",
                param="messages",
            )
        return True

    def say(self, role: MessageRole, texts: Sequence[str | ContentPart]) -> None:
        """Adds texts and images of a role."""
        self._turn(role).texts += texts

    def take(self, message: InputMessage, where: str) -> None:
        """Adds a message. Errors: `InvalidRequest` for unsupported or incomplete content."""
        content = message.content
        if message.role not in ("user", "assistant", "system"):
            raise unsupported(f"{where}.role", message.role, "use user, assistant or system")
        if not content:
            raise InvalidRequest(f"'{where}.content' must not be empty", param=f"{where}.content")
        if isinstance(content, str) or message.role == "system":
            self.say(message.role, _texts(content, f"{where}.content"))  # type: ignore[arg-type]
            return
        take = self._user if message.role == "user" else self._assistant
        for index, block in enumerate(content):
            take(block, f"{where}.content[{index}]")

    def _user(self, block: Block, where: str) -> None:
        if block.type == "tool_result":
            call_id = required(block.tool_use_id, f"{where}.tool_use_id")
            texts = _parts(block.content or "", f"{where}.content")
            self._turns.append(_Turn("tool", texts, call_id=call_id))
        else:
            self.say("user", [_part(block, where, "text, image and tool_result")])

    def _assistant(self, block: Block, where: str) -> None:
        turn = self._turn("assistant")
        if block.type == "thinking":
            turn.thoughts.append(required(block.thinking, f"{where}.thinking"))
        elif block.type == "tool_use":
            function = FunctionCall(
                name=required(block.name, f"{where}.name"),
                arguments=_encode(required(block.input, f"{where}.input")).decode(),
            )
            call_id = required(block.id, f"{where}.id")
            turn.calls.append(ToolCall(id=call_id, type="function", function=function))
        else:
            turn.texts.append(_text(block, where, "text, thinking and tool_use"))

    def _turn(self, role: MessageRole) -> _Turn:
        if not self._turns or self._turns[-1].role != role:
            self._turns.append(_Turn(role))
        return self._turns[-1]


def _parts(content: str | list[Block], where: str) -> list[str | ContentPart]:
    """Texts and images."""
    if isinstance(content, str):
        return [content]
    return [
        _part(block, f"{where}[{index}]", "text and image") for index, block in enumerate(content)
    ]


def _part(block: Block, where: str, understood: str) -> str | ContentPart:
    if block.type != "image":
        return _text(block, where, understood)
    source, place = required(block.source, f"{where}.source"), f"{where}.source"
    if source.type == "base64":
        kind = required(source.media_type, f"{place}.media_type")
        data = required(source.data, f"{place}.data")
        return image_part(f"data:{kind};base64,{data}", f"{place}.data")
    if source.type == "url":
        return image_part(required(source.url, f"{place}.url"), f"{place}.url")
    raise unsupported(f"{place}.type", source.type, "use base64 or url")


def _texts(content: str | list[Block], where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_text(block, f"{where}[{index}]", "text") for index, block in enumerate(content)]


def _text(block: Block, where: str, understood: str) -> str:
    if block.type != "text":
        instead = f"blocks here may be {understood}"
        raise unsupported(f"{where}.type", block.type, instead)
    return required(block.text, f"{where}.text")


# ---------------------------------------------------------------- cache control


_USUAL_TTL = 300.0
_LONG_TTL = 3600.0


def _cache_ttl(request: CountTokensRequest) -> float | None:
    """The longest time for which a part of the request is to be kept; None: no part is marked. The
    whole prompt is kept for it: a mark keeps all that stands before it."""
    times = [
        _LONG_TTL if mark.get("ttl") == "1h" else _USUAL_TTL
        for mark in _marks(request)
        if isinstance(mark, dict) and mark.get("type") == "ephemeral"
    ]
    return max(times, default=None)


def _marks(request: CountTokensRequest) -> Iterator[Any]:
    """Every `cache_control`, also those that are absent."""
    yield request.cache_control
    for tool in request.tools or ():
        yield tool.cache_control
    contents = [request.system, *(message.content for message in request.messages)]
    while contents:
        content = contents.pop()
        for block in content if isinstance(content, list) else ():
            yield block.cache_control
            contents.append(block.content)


# ---------------------------------------------------------------- thinking and tools


def _thinking(request: CountTokensRequest) -> dict[str, Any]:
    """The thinking options in a chat's fields: how much, and whether it is shown."""
    wanted = request.thinking
    if wanted is None:
        return {}
    if wanted.type not in ("enabled", "adaptive", "disabled"):
        raise unsupported("thinking.type", wanted.type, "use enabled, adaptive or disabled")
    thinks = wanted.type != "disabled"
    fields: dict[str, Any] = {
        "chat_template_kwargs": {"enable_thinking": thinks} | (request.chat_template_kwargs or {})
    }
    if wanted.type == "enabled":
        budget = required(wanted.budget_tokens, "thinking.budget_tokens")
        fields["thinking_token_budget"] = budget
    if not thinks or wanted.display == "omitted":
        fields["include_reasoning"] = False
    return fields


def _effort(request: CountTokensRequest) -> ReasoningEffort | None:
    effort = None if request.output_config is None else request.output_config.effort
    if effort is not None and effort not in get_args(ReasoningEffort):
        words = ", ".join(get_args(ReasoningEffort))
        raise unsupported("output_config.effort", effort, f"use one of {words}")
    return effort  # type: ignore[return-value]  # checked above


def _tools(request: CountTokensRequest) -> list[Tool] | None:
    if request.tools is None:
        return None
    found = []
    for index, tool in enumerate(request.tools):
        if tool.type not in (None, "custom"):
            instead = "only tools that you run yourself can be used"
            raise unsupported(f"tools[{index}].type", tool.type, instead)
        function = FunctionSpec(
            name=tool.name,
            description=tool.description,
            parameters=required(tool.input_schema, f"tools[{index}].input_schema"),
            strict=tool.strict,
        )
        found.append(Tool(function=function))
    return found


_CHOICES: dict[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}


def _tool_choice(request: CountTokensRequest) -> dict[str, Any]:
    wanted = request.tool_choice
    if wanted is None:
        return {}
    choice: ToolChoice | NamedTool | None = _CHOICES.get(wanted.type)
    if wanted.type == "tool":
        name = required(wanted.name, "tool_choice.name")
        choice = NamedTool(named=NamedFunction(name=name))
    if choice is None:
        raise unsupported("tool_choice.type", wanted.type, "use auto, any, tool or none")
    one = wanted.disable_parallel_tool_use
    return {"tool_choice": choice, "parallel_tool_calls": None if one is None else not one}


def _response_format(request: CountTokensRequest) -> ResponseFormat | None:
    config = request.output_config
    if config is not None and config.format is not None:
        return _format(config.format, "output_config.format")
    if request.output_format is not None:
        return _format(request.output_format, "output_format")
    return None


def _format(wanted: OutputFormat, where: str) -> ResponseFormat:
    if wanted.type != "json_schema":
        raise unsupported(f"{where}.type", wanted.type, "use json_schema")
    schema = required(wanted.schema, f"{where}.schema")
    named = JsonSchemaFormat(name="output", schema=schema, strict=True)
    return ResponseFormat(type="json_schema", json_schema=named)
