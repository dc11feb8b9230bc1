"""Anthropic's `/v1/messages` as typed records: the request, the message that answers it, errors.

Content blocks are of so many types that each is one record with the fields of those which are
understood; the translation (`pdserve.frontend.dialects.messages`) refuses the others by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pdserve.openai.decode import RequestDecoder
from pdserve.openai.extensions import Extensions
from pdserve.openai.fields import Refusal
from pdserve.openai.responses import Served
from pdserve.openai.schema import (
    MAX_STOPS,
    MaxTokens,
    StopString,
    Temperature,
    TokenCount,
    TopP,
    says,
)

if TYPE_CHECKING:
    from pdserve.errors import PdserveError

ToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]


class Block(msgspec.Struct, kw_only=True):
    """One block of content: `text`, `thinking`, `tool_use` or `tool_result`. `cache_control` may
    stand on any, without effect: prefixes are cached in any case."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    """Not looked at."""
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    """Without effect: what went wrong has to stand in `content`."""
    cache_control: Any = None
    citations: Any = None
    """Without effect."""


class InputMessage(msgspec.Struct, kw_only=True):
    """One turn. Neighbours of one role are one turn."""

    role: str
    content: str | list[Block]


class MessagesTool(msgspec.Struct, kw_only=True):
    """A tool that the client runs; those that a server would run are refused."""

    name: ToolName
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = None


class MessagesToolChoice(msgspec.Struct, kw_only=True):
    """`auto`, `any`, `none`, or `tool` with its name."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, kw_only=True):
    """`enabled` with `budget_tokens`, `adaptive`, or `disabled`."""

    type: str
    budget_tokens: TokenCount | None = None
    display: str | None = None
    """`omitted`: thinking is not shown. Any other word: it is, and never summarised."""


class OutputFormat(msgspec.Struct, kw_only=True):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Extensions, kw_only=True):
    """The body of `POST /v1/messages/count_tokens`: any body of `/v1/messages`, or that without
    `max_tokens`."""

    messages: Annotated[
        Annotated[list[InputMessage], Meta(min_length=1)],
        says(
            "The conversation; contents are texts or blocks. A last one of the assistant goes on."
        ),
    ]
    model: str | None = None
    system: Annotated[
        str | list[Block] | None, says("Stands before the conversation, as the system's message.")
    ] = None
    max_tokens: Annotated[MaxTokens | None, says("Output tokens at most.")] = None
    stop_sequences: Annotated[
        Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None,
        says("Strings that end the answer, wherever they lie between tokens."),
    ] = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    tools: Annotated[list[MessagesTool], Meta(max_length=128)] | None = None
    tool_choice: Annotated[
        MessagesToolChoice | None, says("`auto`, `any`, `none`, or `tool` with its name.")
    ] = None
    thinking: Annotated[
        ThinkingConfig | None,
        says(
            "`enabled` with `budget_tokens`, `adaptive` or `disabled`; else the template decides."
        ),
    ] = None
    output_config: Annotated[
        OutputConfig | None, says("`effort`, for the template, and `format`, a JSON schema.")
    ] = None
    output_format: Annotated[
        OutputFormat | None, says("An older place of `output_config.format`.")
    ] = None
    stream: bool | None = None
    cache_control: Annotated[
        dict[str, Any] | None, says("Without effect: prefixes are cached in any case.")
    ] = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of `POST /v1/messages`."""

    max_tokens: Annotated[MaxTokens, says("Output tokens at most.")]


_NO_EDITS: tuple[object, ...] = (
    {"edits": []},
    {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
)

REFUSED_BY_MESSAGES: dict[str, Refusal] = {
    "container": Refusal("no code is run here; leave it out"),
    "context_management": Refusal("shorten `messages` yourself", _NO_EDITS),
    "inference_geo": Refusal("where a model runs is its operator's choice; leave it out"),
    "mcp_servers": Refusal("call tools yourself and send `tool_result` blocks", ([],)),
    "response_format": Refusal("use `output_config.format`"),
    "speed": Refusal("there is one speed", ("standard",)),
    "stop": Refusal("use `stop_sequences`"),
}


MESSAGES = RequestDecoder(MessagesRequest, REFUSED_BY_MESSAGES)
COUNT_TOKENS = RequestDecoder(CountTokensRequest, REFUSED_BY_MESSAGES)


# ---------------------------------------------------------------- the answer


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str
    """Proves nothing here, and is not looked at when the block comes back."""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call that the client is to make; its result is a block `tool_result`."""

    id: str
    name: str
    input: dict[str, Any]
    """Empty if the answer was cut off before it was whole."""


OutputBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesOutputDetails(msgspec.Struct, kw_only=True):
    thinking_tokens: int = 0


class MessagesUsage(msgspec.Struct, kw_only=True):
    """The prompt's tokens are `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int
    output_tokens_details: MessagesOutputDetails
    pdserve: Served | msgspec.UnsetType = msgspec.UNSET
    """As in a chat's usage."""


class MessageObject(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenTotal(msgspec.Struct, kw_only=True):
    """What a prompt comes to, cached or not."""

    input_tokens: int


# ---------------------------------------------------------------- errors


class MessagesErrorCause(msgspec.Struct, kw_only=True):
    error_code: str | None
    """As `code` in OpenAI's errors."""
    param: str | None


class MessagesErrorDetail(msgspec.Struct, kw_only=True):
    type: str
    message: str
    details: MessagesErrorCause


class MessagesErrorBody(msgspec.Struct, kw_only=True):
    """The body of every answer of `/v1/messages` with a status of 400 or more, and of an error
    event in a stream."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_encode = msgspec.json.Encoder().encode


def messages_error_body(error: PdserveError, request_id: str) -> bytes:
    """The error as JSON, in Anthropic's shape; its type follows from the status."""
    status = error.http_status
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return _encode(
        MessagesErrorBody(
            error=MessagesErrorDetail(
                type=kind,
                message=error.message,
                details=MessagesErrorCause(error_code=error.code, param=error.param),
            ),
            request_id=request_id,
        )
    )
