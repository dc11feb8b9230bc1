"""`/v1/responses` as a chat: items become messages, and the rest is named differently.

An assistant's turn is several items there (reasoning, a message, calls of functions) and one
message here. Refused by name: whatever is not text, and whatever refers to something stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from msgspec.structs import replace

from pdserve.errors import InvalidRequest
from pdserve.frontend.dialects.common import content_of, missing, own_names, required, unsupported
from pdserve.frontend.dialects.responses_answer import ResponsesDialect
from pdserve.frontend.prompts import plan_chat
from pdserve.openai.extensions import extensions_of
from pdserve.openai.schema import (
    ChatRequest,
    ContentPart,
    FunctionCall,
    FunctionSpec,
    JsonSchemaFormat,
    Message,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Role,
    Tool,
    ToolCall,
    ToolChoice,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.frontend.plan import Plan
    from pdserve.frontend.prompts import Context
    from pdserve.openai.responses_api import InputItem, InputPart, ResponsesRequest

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


async def plan_responses(request: ResponsesRequest, context: Context) -> Plan:
    """Errors: `InvalidRequest` and its kin, `Overloaded`."""
    chat = chat_request(request)
    with own_names(_NAMES):
        plan = await plan_chat(chat, context)
    plan = replace(plan, answer_id=f"resp_{context.request_id}")
    return replace(plan, dialect=ResponsesDialect(request, plan))


def chat_request(request: ResponsesRequest) -> ChatRequest:
    """The same as a chat. Errors: `InvalidRequest` for what a chat cannot say."""
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
        tools=_tools(request),
        tool_choice=_tool_choice(request),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request),
        reasoning_effort=None if reasoning is None else reasoning.effort,
        thinking_token_budget=request.thinking_token_budget,
        **extensions_of(request),
    )


def _check(request: ResponsesRequest) -> None:
    """Fields that may only say what holds in any case."""
    if request.background:
        raise InvalidRequest(
            "'background' is not supported: nothing is stored here; use 'stream' for long answers",
            param="background",
        )
    if request.truncation not in (None, "disabled"):
        instead = "leave it out, and shorten 'input' yourself"
        raise unsupported("truncation", request.truncation, instead)
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        raise unsupported("text.verbosity", request.text.verbosity, "say it in 'instructions'")
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
    return conversation.messages


class _Conversation:
    """Messages, put together from items."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._turn: Message | None = None
        """The assistant's message that the next item may still belong to."""

    def take(self, item: InputItem, where: str) -> None:
        """Errors: `InvalidRequest` for an item that is not understood, or not whole."""
        kind = item.type or ("message" if item.role is not None else "item_reference")
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reason(item, where)
        elif kind == "function_call":
            self._call(item, where)
        elif kind == "function_call_output":
            content = _content(item.output, f"{where}.output")
            call_id = required(item.call_id, f"{where}.call_id")
            self._add(Message(role="tool", content=content, tool_call_id=call_id))
        elif kind == "item_reference":
            instead = "nothing is stored here: send the item itself"
            raise unsupported(f"{where}.type", kind, instead)
        else:
            instead = "use messages, reasoning, function_call and function_call_output"
            raise unsupported(f"{where}.type", kind, instead)

    def say(self, role: Role, content: str) -> None:
        """A message of no particular form."""
        self._add(Message(role=role, content=content))

    def _message(self, item: InputItem, where: str) -> None:
        role = required(item.role, f"{where}.role")
        content = _content(item.content, f"{where}.content")
        if role in ("user", "system", "developer"):
            self._add(Message(role=role, content=content))  # type: ignore[arg-type]  # just looked
        elif role == "assistant":
            turn = self._turn
            if turn is None or turn.content or turn.tool_calls:
                turn = self._begin()
            turn.content = content
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
        turn = self._turn
        if turn is None or turn.content or turn.tool_calls:
            turn = self._begin()
        reasoning = "\n".join([*([turn.reasoning] if turn.reasoning else []), *texts])
        turn.reasoning = turn.reasoning_content = reasoning or None

    def _call(self, item: InputItem, where: str) -> None:
        function = FunctionCall(
            name=required(item.name, f"{where}.name"),
            arguments=required(item.arguments, f"{where}.arguments"),
        )
        call_id = required(item.call_id, f"{where}.call_id")
        turn = self._turn or self._begin()
        call = ToolCall(id=call_id, type="function", function=function)
        turn.tool_calls = [*(turn.tool_calls or ()), call]

    def _begin(self) -> Message:
        turn = Message(role="assistant", content="")
        self._add(turn)
        self._turn = turn
        return turn

    def _add(self, message: Message) -> None:
        self.messages.append(message)
        self._turn = None


def _content(content: str | list[InputPart] | None, where: str) -> str | list[ContentPart]:
    if content is None:
        raise missing(where)
    return content if isinstance(content, str) else content_of(_texts(content, where))


def _texts(parts: Sequence[InputPart], where: str) -> list[str]:
    found = []
    for index, part in enumerate(parts):
        if part.type == "refusal":
            found.append(required(part.refusal, f"{where}[{index}].refusal"))
        elif part.type in _TEXTS:
            found.append(required(part.text, f"{where}[{index}].text"))
        else:
            raise unsupported(f"{where}[{index}].type", part.type, "only text is understood")
    return found


# ---------------------------------------------------------------- output


def _tools(request: ResponsesRequest) -> list[Tool] | None:
    if request.tools is None:
        return None
    found = []
    for index, tool in enumerate(request.tools):
        if tool.type != "function":
            instead = "only functions, which you call yourself, can be used"
            raise unsupported(f"tools[{index}].type", tool.type, instead)
        function = FunctionSpec(
            name=required(tool.name, f"tools[{index}].name"),
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
        found.append(Tool(function=function))
    return found


def _tool_choice(request: ResponsesRequest) -> ToolChoice | NamedTool | None:
    choice = request.tool_choice
    if choice is None:
        return None
    if isinstance(choice, str):
        if choice not in get_args(ToolChoice):
            raise unsupported("tool_choice", choice, "use none, auto, required or a function")
        return choice  # type: ignore[return-value]  # just looked
    if choice.type != "function":
        instead = "use none, auto, required or a function"
        raise unsupported("tool_choice.type", choice.type, instead)
    return NamedTool(function=NamedFunction(name=required(choice.name, "tool_choice.name")))


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
