"""The request bodies of the OpenAI API as typed records: what can be asked, and in which range.

Decoding one of these is the validation of everything that can be said about a field alone. It does
not know which fields exist only to be refused (`fields.py`), what fields mean together or for a
given model (the frontend), or how answers look (`responses.py`).

An absent field and `null` mean the same everywhere, as in OpenAI's API.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

INT64_MAX = 2**63 - 1
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20

Role = Literal["system", "developer", "user", "assistant", "tool"]

Temperature = Annotated[float, Meta(ge=0, le=2, description="0 is greedy.")]
TopP = Annotated[float, Meta(gt=0, le=1, description="Nucleus sampling; 1 is off.")]
MinP = Annotated[float, Meta(ge=0, le=1, description="Relative to the likeliest; 0 is off.")]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1, description="0 and -1 are off.")]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=100, description="1 is off.")]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Choices = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenCount = Annotated[int, Meta(ge=0, le=2**31 - 1)]
MaxTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=INT64_MAX)]
Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
StopTokens = Annotated[list[Token], Meta(max_length=128)]
LogitBias = Annotated[dict[Token, Bias], Meta(max_length=1024)]
Tools = Annotated[list["Tool"], Meta(max_length=128)]
ToolChoice = Literal["none", "auto", "required"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Words = Annotated[list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(max_length=1024)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1, description="Higher is sooner.")]


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries beyond its text."""

    include_usage: bool | None = None
    """One more chunk, with `usage` and no choices, before `[DONE]`."""
    continuous_usage_stats: bool | None = None
    """`usage` so far on every chunk."""


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """A named schema that the answer has to fit."""

    name: str
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class TaggedStructure(msgspec.Struct, kw_only=True):
    """Between `begin` and `end` the output fits `schema`."""

    begin: str
    schema: dict[str, Any] | bool
    end: str


class ResponseFormat(msgspec.Struct, kw_only=True):
    """What the answer has to look like."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: Annotated[list[TaggedStructure], Meta(max_length=128)] | None = None
    triggers: Annotated[list[str], Meta(max_length=128)] | None = None
    """`structural_tag`: text is free until one of these; then one of `structures` follows."""


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """The same in the words of other servers; exactly one of the first six."""

    json: str | dict[str, Any] | bool | None = None
    regex: Annotated[str, Meta(min_length=1, max_length=65536)] | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=4096)] | None = None
    grammar: Annotated[str, Meta(min_length=1, max_length=262144)] | None = None
    """Lark; GBNF is understood, too."""
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class FunctionSpec(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of its arguments; absent: none are known."""
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """Only tools of type `function` are known."""

    type: Literal["function"] = "function"
    function: FunctionSpec


class NamedFunction(msgspec.Struct, kw_only=True):
    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """The one tool that has to be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class RepetitionDetection(msgspec.Struct, kw_only=True):
    """An output that ends in the same tokens over and over is ended."""

    max_pattern_size: Annotated[int, Meta(ge=1, le=1024)]
    min_count: Annotated[int, Meta(ge=2, le=65536)]
    min_pattern_size: Annotated[int, Meta(ge=1, le=1024)] | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message's content; only parts of type `text` are accepted."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """A function that an earlier answer called; `arguments` is JSON in a string."""

    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call of an earlier answer, handed to the chat template."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """One turn of the conversation."""

    role: Role
    content: str | list[ContentPart] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """Reasoning of an earlier answer, handed to the template under both names."""
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """The fields that chat and plain completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    stop_token_ids: StopTokens | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: TokenCount | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: Priority | None = None
    request_id: str | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    session_id: Annotated[str, Meta(max_length=256)] | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: TopLogprobs | None = None
    logprob_token_ids: Annotated[list[Token], Meta(max_length=128)] | None = None
    allowed_token_ids: Annotated[list[Token], Meta(max_length=65536)] | None = None
    bad_words: Words | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    return_tokens_as_token_ids: bool | None = None
    stream_interval: Annotated[int, Meta(ge=1, le=65536)] | None = None
    repetition_detection: RepetitionDetection | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    echo: bool | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: TokenCount | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """The body of `POST /v1/completions`.

    `prompt` is a string, a list of strings, one list of token ids, or a list of such lists.
    """

    prompt: str | list[str | Token | list[Token]]
    max_tokens: TokenCount | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: Choices | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /tokenize`: exactly one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[Token]
