"""Defines Anthropic's `/v1/messages` as typed records: request, response and errors.

There are many types of content blocks, so one record has the fields of all supported types; the
translation (`pdserve.frontend.api.adapters.anthropic_request`) refuses the other types by name.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pdserve.protocols.completion_requests import (
    MAX_STOPS,
    MaxTokens,
    StopString,
    Temperature,
    TokenCount,
    TopP,
    field_doc,
)
from pdserve.protocols.completion_responses import Served
from pdserve.protocols.extensions import Extensions
from pdserve.protocols.request_decoder import RequestDecoder
from pdserve.protocols.unsupported_fields import OF_OTHER_SERVERS, UnsupportedField

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.errors import PdserveError
    from pdserve.protocols.completion_responses import Model

ToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]


class ImageSource(msgspec.Struct, kw_only=True):
    """Where an image is: `base64`, with its `data`, or `url`."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class Block(msgspec.Struct, kw_only=True):
    """One block of content: `text`, `image`, `thinking`, `tool_use` or `tool_result`.
    `cache_control` on any of them keeps the whole prompt for its `ttl`."""

    type: str
    source: ImageSource | None = None
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    """Ignored."""
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    """Without effect: `content` must describe the error."""
    cache_control: Any = None
    citations: Any = None
    """Without effect."""


class InputMessage(msgspec.Struct, kw_only=True):
    """One message. Consecutive messages of one role are one turn."""

    role: str
    content: str | list[Block]


class MessagesTool(msgspec.Struct, kw_only=True):
    """A tool that the client runs; server-side tools are refused."""

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
    """`omitted`: thinking is not shown. Any other value: it is shown in full."""


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
        field_doc(
            "The conversation; contents are texts or blocks. If the last message is "
            "the assistant's, the model continues it."
        ),
    ]
    model: str | None = None
    system: Annotated[
        str | list[Block] | None,
        field_doc("A system message before the conversation."),
    ] = None
    max_tokens: Annotated[MaxTokens | None, field_doc("Most output tokens.")] = None
    stop_sequences: Annotated[
        Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None,
        field_doc("Strings that end the answer; they need not begin or end with a token."),
    ] = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    tools: Annotated[
        list[MessagesTool] | None, field_doc("Functions that the model may call, up to 1,024.")
    ] = None
    tool_choice: Annotated[
        MessagesToolChoice | None, field_doc("`auto`, `any`, `none`, or `tool` with its name.")
    ] = None
    thinking: Annotated[
        ThinkingConfig | None,
        field_doc(
            "`enabled` with `budget_tokens`, `adaptive` or `disabled`; else the template decides."
        ),
    ] = None
    output_config: Annotated[
        OutputConfig | None, field_doc("`effort`, for the template, and `format`, a JSON schema.")
    ] = None
    output_format: Annotated[
        OutputFormat | None, field_doc("The older name of `output_config.format`.")
    ] = None
    stream: bool | None = None
    cache_control: Annotated[
        dict[str, Any] | None,
        field_doc(
            "Prefixes are cached in any case; `ttl` (`5m`, the default, or `1h`) is a `cache_ttl` "
            "for the whole prompt."
        ),
    ] = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of `POST /v1/messages`."""

    max_tokens: Annotated[MaxTokens, field_doc("Most output tokens; fewer if fewer fit.")]


_NO_EDITS: tuple[object, ...] = (
    {"edits": []},
    {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
)

REFUSED_BY_MESSAGES: dict[str, UnsupportedField] = {
    **OF_OTHER_SERVERS,
    "container": UnsupportedField("no code is run here; leave it out"),
    "context_management": UnsupportedField("shorten `messages` yourself", _NO_EDITS),
    "enable_thinking": UnsupportedField("use `thinking`"),
    "inference_geo": UnsupportedField("where a model runs is its operator's choice; leave it out"),
    "mcp_servers": UnsupportedField("call tools yourself and send `tool_result` blocks", ([],)),
    "response_format": UnsupportedField("use `output_config.format`"),
    "speed": UnsupportedField("there is one speed", ("standard",)),
    "stop": UnsupportedField("use `stop_sequences`"),
}


MESSAGES = RequestDecoder(MessagesRequest, REFUSED_BY_MESSAGES)
COUNT_TOKENS = RequestDecoder(CountTokensRequest, REFUSED_BY_MESSAGES)


# ---------------------------------------------------------------- responses


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str
    """Placeholder; ignored when the client sends the block back."""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A tool call for the client to run; its result is a block `tool_result`."""

    id: str
    name: str
    input: dict[str, Any]
    """Arguments of the call; empty if the answer was cut off before they were complete."""


OutputBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class MessagesOutputDetails(msgspec.Struct, kw_only=True):
    thinking_tokens: int = 0


class MessagesUsage(msgspec.Struct, kw_only=True):
    """Token counts; the prompt's tokens are the sum of the first three."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    """Prompt tokens in full blocks that were computed and cached."""
    cache_read_input_tokens: int = 0
    output_tokens: int
    output_tokens_details: MessagesOutputDetails
    pdserve: Served | msgspec.UnsetType = msgspec.UNSET
    """Routing details, as in the usage of a chat completion."""


class MessageObject(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessagesModel(msgspec.Struct, kw_only=True, tag_field="type", tag="model"):
    """A model, for a request with the header `anthropic-version`."""

    id: str
    display_name: str
    created_at: str
    """Creation time in RFC 3339."""
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int
    """Maximum output tokens: the context length without the prompt."""


class MessagesModelList(msgspec.Struct, kw_only=True):
    """List of all models; `limit` is ignored."""

    data: list[MessagesModel]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None


def messages_model(model: Model) -> MessagesModel:
    """Convert a model to Anthropic's form."""
    return MessagesModel(
        id=model.id,
        display_name=model.id,
        created_at=datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=model.max_model_len,
        max_tokens=model.max_model_len,
    )


def messages_models(models: Sequence[Model]) -> MessagesModelList:
    """Convert a list of models to Anthropic's form."""
    told = [messages_model(model) for model in models]
    ends = (told[0].id, told[-1].id) if told else (None, None)
    return MessagesModelList(data=told, first_id=ends[0], last_id=ends[1])


class TokenTotal(msgspec.Struct, kw_only=True):
    """Number of prompt tokens, cached ones included."""

    input_tokens: int


# ---------------------------------------------------------------- errors


class MessagesErrorCause(msgspec.Struct, kw_only=True):
    error_code: str | None
    """Stable error code, equal to `code` in OpenAI's errors."""
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
