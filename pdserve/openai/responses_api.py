"""OpenAI's `/v1/responses` as typed records: the request, and the object that answers it.

Input items and their parts are of so many types that each is one record with the fields of those
which are understood; a translation (`pdserve.frontend.dialects.responses`) refuses the others by
name. Nothing is stored, so whatever refers to something stored is refused, too.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pdserve.openai.decode import RequestDecoder
from pdserve.openai.extensions import Extensions
from pdserve.openai.fields import Refusal
from pdserve.openai.responses import ChatLogprob, Served
from pdserve.openai.schema import (
    MaxTokens,
    ReasoningEffort,
    Stop,
    StreamOptions,
    Temperature,
    TokenCount,
    TopLogprobs,
    TopP,
    says,
)

ToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
Status = Literal["in_progress", "completed", "incomplete", "failed"]


class InputPart(msgspec.Struct, kw_only=True):
    """One part of an item's content: `input_text`, `output_text`, `refusal`, `reasoning_text` or
    `summary_text`."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    """Parts of earlier answers come with these; without effect, as is what follows."""
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None


class InputItem(msgspec.Struct, kw_only=True):
    """A message (with or without `type`), `reasoning`, `function_call` or
    `function_call_output`."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    """JSON in a string."""
    output: str | list[InputPart] | None = None
    status: str | None = None
    """Of an earlier answer's item; without effect, as is `phase`."""
    phase: str | None = None


class ResponsesTool(msgspec.Struct, kw_only=True):
    """A function that the model may call; tools of other types are refused."""

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesToolChoice(msgspec.Struct, kw_only=True):
    """The function that has to be called: `{"type": "function", "name": …}`."""

    type: str
    name: str | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """What the text has to look like; `json_schema` needs `name` and `schema`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None
    """Only `medium`, which asks for nothing."""


class ReasoningConfig(msgspec.Struct, kw_only=True):
    effort: ReasoningEffort | None = None
    summary: str | None = None
    """Without effect: reasoning is told as it is, in the items' `content`."""
    generate_summary: str | None = None


class ResponsesRequest(Extensions, kw_only=True):
    """The body of `POST /v1/responses`."""

    input: Annotated[str | list[InputItem], says("A text, or the conversation as items.")]
    model: str | None = None
    instructions: Annotated[
        str | None, says("Stands before the conversation, as the system's message.")
    ] = None
    max_output_tokens: Annotated[
        MaxTokens | None,
        says("Output tokens at most; the model's recommendation, else what fits the context."),
    ] = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, says("Without effect.")] = None
    tools: Annotated[list[ResponsesTool], Meta(max_length=128)] | None = None
    tool_choice: str | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: Annotated[TextConfig | None, says("What the text has to look like, as `format`.")] = None
    reasoning: Annotated[
        ReasoningConfig | None, says("`effort` is handed to the template; the rest has no effect.")
    ] = None
    top_logprobs: Annotated[
        TopLogprobs | None, says("Alternatives at each place; asks for logprobs by itself.")
    ] = None
    include: Annotated[
        Annotated[list[str], Meta(max_length=32)] | None,
        says(
            "`message.output_text.logprobs` asks for logprobs; other known words for nothing that "
            "there is."
        ),
    ] = None
    metadata: Annotated[
        Annotated[dict[str, str], Meta(max_length=16)] | None, says("Told again in the answer.")
    ] = None
    user: str | None = None
    truncation: Annotated[str | None, says("Only `disabled`.")] = None
    max_tool_calls: Annotated[
        int | None, says("Without effect: it limits tools that a server would call itself.")
    ] = None
    background: Annotated[bool | None, says("Only false.")] = None
    stop: Stop | None = None
    thinking_token_budget: TokenCount | None = None


_STATELESS = "nothing is stored here; send the whole conversation as `input`"

REFUSED_BY_RESPONSES: dict[str, Refusal] = {
    "access_programs": Refusal("leave it out"),
    "context_management": Refusal("shorten `input` yourself", ([],)),
    "conversation": Refusal(_STATELESS),
    "image": Refusal("only text is understood; leave it out"),
    "max_completion_tokens": Refusal("use `max_output_tokens`"),
    "max_tokens": Refusal("use `max_output_tokens`"),
    "messages": Refusal("use `input`"),
    "moderation": Refusal("leave it out"),
    "n": Refusal("one answer is given", (1,)),
    "previous_response_id": Refusal(_STATELESS),
    "prompt": Refusal("nothing is stored here; send `instructions` and `input`"),
    "reasoning_effort": Refusal("use `reasoning.effort`"),
    "response_format": Refusal("use `text.format`"),
}


RESPONSES = RequestDecoder(ResponsesRequest, REFUSED_BY_RESPONSES)


# ---------------------------------------------------------------- the answer


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[ChatLogprob] = []


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought; can be sent again as an item of `input`."""

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
    """A call that the client is to make; its result is an item `function_call_output`."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = ReasoningItem | MessageItem | FunctionCallItem


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
    """As in a chat's usage."""


class ResponseFailure(msgspec.Struct, kw_only=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    reason: Literal["max_output_tokens"]


class ResponseObject(msgspec.Struct, kw_only=True):
    """A whole answer, and what events of a stream say about the answer as a whole."""

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
    """What a prompt comes to, cached or not."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
