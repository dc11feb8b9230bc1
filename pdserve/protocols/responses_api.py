"""Defines OpenAI's `/v1/responses` as typed records: the request and the response object.

There are many types of input items, so one record has the fields of all supported types; the
translation (`pdserve.frontend.api.adapters.responses_request`) refuses the other types by name.
Nothing is stored, so a reference to a stored object is refused too.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pdserve.protocols.completion_requests import (
    MaxTokens,
    ReasoningEffort,
    Stop,
    StreamOptions,
    Temperature,
    ThinkingBudget,
    TopLogprobs,
    TopP,
    Verbosity,
    field_doc,
)
from pdserve.protocols.completion_responses import ChatLogprob, Served
from pdserve.protocols.extensions import Extensions
from pdserve.protocols.request_decoder import RequestDecoder
from pdserve.protocols.unsupported_fields import OF_OTHER_SERVERS, UnsupportedField

ToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
Status = Literal["in_progress", "completed", "incomplete", "failed"]


class InputPart(msgspec.Struct, kw_only=True):
    """One part of an item's content: `input_text`, `input_image`, `output_text`, `refusal`,
    `reasoning_text` or `summary_text`."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None
    """Without effect: the model's own processor scales images."""
    annotations: Any = None
    """Accepted without effect; parts of earlier answers have it."""
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None


class InputItem(msgspec.Struct, kw_only=True):
    """A message (with or without `type`), `reasoning`, `function_call`, `custom_tool_call`, or the
    result of a call: `function_call_output`, `custom_tool_call_output`."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    """Arguments of a `function_call` as JSON text."""
    input: str | None = None
    """Text input of a `custom_tool_call`."""
    output: str | list[InputPart] | None = None
    status: str | None = None
    """Accepted without effect; items of earlier answers have it."""
    phase: str | None = None


class CustomFormat(msgspec.Struct, kw_only=True):
    """Format of a custom tool's input; a grammar is shown to the model, not enforced."""

    type: Literal["text", "grammar"] = "text"
    syntax: str | None = None
    definition: str | None = None


class NamespaceMember(msgspec.Struct, kw_only=True):
    """A tool that the client runs: a `function`, or a `custom` tool, whose input is one text."""

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None


class ResponsesTool(NamespaceMember, kw_only=True):
    """A client-side tool, or a `namespace` of several under one name. Server-side tools
    (`web_search`, `mcp` ...) are left out, unless `tool_choice` names one."""

    tools: list[NamespaceMember] | None = None
    """Tools of a `namespace`."""


class ResponsesToolChoice(msgspec.Struct, kw_only=True):
    """The tool that has to be called, `{"type": "function", "name": …}` or of type `custom`; or
    `allowed_tools`: those that may be called."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None
    """The tools of `allowed_tools`, by `type` and `name`."""


class TextFormat(msgspec.Struct, kw_only=True):
    """Format of the text; `json_schema` needs `name` and `schema`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Verbosity | None = None
    """A hint, as in a chat."""


class ReasoningConfig(msgspec.Struct, kw_only=True):
    effort: ReasoningEffort | None = None
    summary: str | None = None
    """Without effect: full reasoning is in the items' `content`."""
    generate_summary: str | None = None


class ResponsesRequest(Extensions, kw_only=True):
    """The body of `POST /v1/responses`."""

    input: Annotated[str | list[InputItem], field_doc("A text, or the conversation as items.")]
    model: str | None = None
    instructions: Annotated[str | None, field_doc("A system message before the conversation.")] = (
        None
    )
    max_output_tokens: Annotated[
        MaxTokens | None,
        field_doc(
            "Most output tokens. Default: the model's recommendation, else as many as"
            " fit the context."
        ),
    ] = None
    prompt_cache_retention: Annotated[
        str | None,
        field_doc("`24h` is `cache_ttl` 86400; other values have no effect. `cache_ttl` wins."),
    ] = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, field_doc("Without effect.")] = None
    tools: Annotated[
        list[ResponsesTool] | None,
        field_doc(
            "Tools that the model may call, up to 1,024; those that a server runs are left out."
        ),
    ] = None
    tool_choice: str | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: Annotated[TextConfig | None, field_doc("Format of the text, in `format`.")] = None
    reasoning: Annotated[
        ReasoningConfig | None,
        field_doc("`effort` is passed to the chat template; the rest has no effect."),
    ] = None
    top_logprobs: Annotated[
        TopLogprobs | None,
        field_doc("Number of alternatives at each position; also turns logprobs on."),
    ] = None
    include: Annotated[
        Annotated[list[str], Meta(max_length=32)] | None,
        field_doc(
            "`message.output_text.logprobs` returns logprobs; other known values have no effect."
        ),
    ] = None
    metadata: Annotated[
        Annotated[dict[str, str], Meta(max_length=16)] | None,
        field_doc("Returned in the answer."),
    ] = None
    user: str | None = None
    truncation: Annotated[str | None, field_doc("Must be `disabled`.")] = None
    max_tool_calls: Annotated[
        int | None, field_doc("Without effect: it limits tools that the server runs.")
    ] = None
    background: Annotated[bool | None, field_doc("Must be false.")] = None
    stop: Stop | None = None
    thinking_token_budget: ThinkingBudget | None = None


_STATELESS = "nothing is stored here; send the whole conversation as `input`"

_THINKING = "use `reasoning.effort`, or set the template's variable in `chat_template_kwargs`"
REFUSED_BY_RESPONSES: dict[str, UnsupportedField] = {
    **OF_OTHER_SERVERS,
    "access_programs": UnsupportedField("leave it out"),
    "context_management": UnsupportedField("shorten `input` yourself", ([],)),
    "conversation": UnsupportedField(_STATELESS),
    "enable_response_messages": UnsupportedField("use `/tokenize` to see a prompt", (False,)),
    "enable_thinking": UnsupportedField(_THINKING),
    "image": UnsupportedField("only text is understood; leave it out"),
    "max_completion_tokens": UnsupportedField("use `max_output_tokens`"),
    "max_tokens": UnsupportedField("use `max_output_tokens`"),
    "messages": UnsupportedField("use `input`"),
    "moderation": UnsupportedField("leave it out"),
    "n": UnsupportedField("one answer is given", (1,)),
    "previous_input_messages": UnsupportedField(_STATELESS),
    "previous_response": UnsupportedField(_STATELESS),
    "previous_response_id": UnsupportedField(_STATELESS),
    "prompt": UnsupportedField("nothing is stored here; send `instructions` and `input`"),
    "reasoning_effort": UnsupportedField("use `reasoning.effort`"),
    "response_format": UnsupportedField("use `text.format`"),
    "skip_special_tokens": UnsupportedField("they are never shown; leave it out", (True,)),
    "thinking": UnsupportedField(_THINKING),
    "vllm_xargs": UnsupportedField(
        "engines here take no arguments of extensions; leave it out", ({},)
    ),
}


RESPONSES = RequestDecoder(ResponsesRequest, REFUSED_BY_RESPONSES)


# ---------------------------------------------------------------- responses


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[ChatLogprob] = []


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning of the model; can be sent again as an item of `input`."""

    id: str
    status: Status
    summary: list[dict[str, str]] = []
    """Always empty."""
    content: list[ReasoningText]
    encrypted_content: None = None


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A function call for the client; its result is an item `function_call_output`."""

    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    """Namespace of the tool, if it has one."""
    arguments: str


class CustomToolCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A custom tool call for the client; its result is an item `custom_tool_call_output`."""

    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    input: str


OutputItem = ReasoningItem | MessageItem | FunctionCallItem | CustomToolCallItem


class InputTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    """Always 0: writing to the prefix cache is not accounted for."""


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int = 0


class ResponsesUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    pdserve: Served | msgspec.UnsetType = msgspec.UNSET
    """Routing details, as in the usage of a chat completion."""


class ResponseFailure(msgspec.Struct, kw_only=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    reason: Literal["max_output_tokens"]


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response; stream events about the whole response contain it too."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, str | None]
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None = None
    metadata: dict[str, str]


class InputTokens(msgspec.Struct, kw_only=True):
    """Number of prompt tokens, cached ones included."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
