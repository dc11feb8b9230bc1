"""Defines the request bodies of the OpenAI API as typed records, with the range of each field.

Decoding a record validates each field alone. It does not know fields that are only refused
(`unsupported_fields.py`), what fields mean together or for a model (the frontend), or responses
(`completion_responses.py`). An absent field and `null` mean the same everywhere, as in OpenAI's
API.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

INT64_MAX = 2**63 - 1
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20


def field_doc(text: str) -> Meta:
    """Attach a description to a field; `/openapi.json` and docs/fields.md show it."""
    return Meta(description=text)


MessageRole = Literal["system", "developer", "user", "assistant", "tool", "function"]

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
ThinkingBudget = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Verbosity = Literal["low", "medium", "high"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Words = Annotated[list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(max_length=1024)]
_TTL_NOTE = (
    "Seconds for which the prompt's KV should stay in host memory or on disk after the request, a "
    "day at most. A wish: a worker fulfils it for a bounded part of its memory."
)
_SCOPE_NOTE = (
    "`never`: the prompt's KV stays on the device, and is not stored in host memory or on disk; "
    "`shared`, the default: it may be."
)
CacheTtl = Annotated[float, Meta(ge=0, le=86400, description=_TTL_NOTE)]
CacheScopeName = Annotated[Literal["shared", "never"], Meta(description=_SCOPE_NOTE)]
Priority = Annotated[
    int, Meta(ge=-(2**31), le=2**31 - 1, description="Requests of higher priority start sooner.")
]


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a stream."""

    include_usage: bool | None = None
    """One more chunk, with `usage` and no choices, before `[DONE]`."""
    continuous_usage_stats: bool | None = None
    """`usage` so far on every chunk."""


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """A named JSON schema that the answer must match."""

    name: str
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class TaggedStructure(msgspec.Struct, kw_only=True):
    """Between `begin` and `end` the output matches `schema`."""

    begin: str
    schema: dict[str, Any] | bool
    end: str


class ResponseFormat(msgspec.Struct, kw_only=True):
    """Format of the answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | bool | None = None
    """A schema without a name, with either type of JSON; llama.cpp's form."""
    structures: Annotated[list[TaggedStructure], Meta(max_length=128)] | None = None
    triggers: Annotated[list[str], Meta(max_length=128)] | None = None
    """For `structural_tag`: text is free until a trigger, then one of `structures` follows."""


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """Structured output with vLLM's field names; exactly one of the first six."""

    json: str | dict[str, Any] | bool | None = None
    regex: Annotated[str, Meta(min_length=1, max_length=65536)] | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=4096)] | None = None
    grammar: Annotated[str, Meta(min_length=1, max_length=262144)] | None = None
    """Grammar in Lark or GBNF."""
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
    """JSON schema of the arguments; absent: no known arguments."""
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool; only type `function` is supported."""

    type: Literal["function"] = "function"
    function: FunctionSpec


class NamedFunction(msgspec.Struct, kw_only=True):
    name: str


class AllowedTool(msgspec.Struct, kw_only=True):
    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedTools(msgspec.Struct, kw_only=True):
    """Tools that may be called; the others are ignored."""

    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class NamedTool(msgspec.Struct, kw_only=True):
    """Tool choice by name: the tool to call, or the tools that may be called."""

    type: Literal["function", "allowed_tools"] = "function"
    named: NamedFunction | msgspec.UnsetType | None = msgspec.field(
        default=msgspec.UNSET, name="function"
    )
    allowed_tools: AllowedTools | msgspec.UnsetType | None = msgspec.UNSET

    def __post_init__(self) -> None:
        """Check required fields. Raises `ValueError` with msgspec's message for a missing field."""
        if self.type == "function" and not self.named:
            raise ValueError("Object missing required field `function`")
        if self.type == "allowed_tools" and not self.allowed_tools:
            raise ValueError("Object missing required field `allowed_tools`")

    @property
    def function(self) -> NamedFunction:
        """Function that must be called."""
        # The frontend replaces `allowed_tools` before it reads this.
        assert isinstance(self.named, NamedFunction)
        return self.named


class RepetitionDetection(msgspec.Struct, kw_only=True):
    """Ends an output that repeats the same tokens."""

    max_pattern_size: Annotated[int, Meta(ge=1, le=1024)]
    min_count: Annotated[int, Meta(ge=2, le=65536)]
    min_pattern_size: Annotated[int, Meta(ge=1, le=1024)] | None = None


class ThinkingSwitch(msgspec.Struct, kw_only=True):
    """Switches thinking on or off, in the form of DeepSeek, GLM and Kimi."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    """`adaptive` and `auto` leave it to the template."""


class ImageUrl(msgspec.Struct, kw_only=True):
    """Where an image is: a `data:` URL that holds it, or a URL of a host that the operator
    allows."""

    url: str | None = None
    detail: str | None = None
    """Without effect: the model's own processor scales images."""


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message's content: `text`, `image_url`, and the assistant's `refusal`."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | ImageUrl | None = None


class PlacedPart(ContentPart, kw_only=True):
    """A part that was made of another API's field. Clients cannot send it."""

    where: str
    """Name of that field."""


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

    role: MessageRole
    content: str | list[ContentPart] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """Reasoning of an earlier answer, handed to the template under both names."""
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    """An older form of one call; role `function` is one of the role `tool`."""


class GenerationRequest(msgspec.Struct, kw_only=True):
    """The fields that chat and plain completions share."""

    model: Annotated[
        str | None,
        field_doc(
            "The name or an alias of the model; may be left out if only one model is served."
        ),
    ] = None
    stream: Annotated[
        bool | None, field_doc("Streams server-sent events while tokens are generated.")
    ] = None
    stream_options: Annotated[
        StreamOptions | None, field_doc("What a stream carries beyond its text; needs `stream`.")
    ] = None
    n: Annotated[
        Choices | None, field_doc("Number of choices; --max-choices limits prompts times `n`.")
    ] = None
    temperature: Annotated[
        Temperature | None,
        field_doc("0 is greedy. Default: the model's recommendation, else 1."),
    ] = None
    top_p: Annotated[
        TopP | None,
        field_doc("Nucleus sampling; 1 is off. Default: the model's recommendation, else off."),
    ] = None
    top_k: Annotated[
        TopK | None,
        field_doc(
            "Samples from this many likeliest tokens; 0 and -1 are off. Default: the "
            "model's recommendation, else off."
        ),
    ] = None
    min_p: Annotated[
        MinP | None, field_doc("Least probability, relative to the likeliest token; 0 is off.")
    ] = None
    frequency_penalty: Annotated[
        Penalty | None, field_doc("Penalty per occurrence of a token in the output.")
    ] = None
    presence_penalty: Annotated[
        Penalty | None, field_doc("Penalty for each token that occurs in the output, once.")
    ] = None
    repetition_penalty: Annotated[
        RepetitionPenalty | None, field_doc("Penalty for tokens of prompt and output; 1 is off.")
    ] = None
    logit_bias: Annotated[LogitBias | None, field_doc("Added to the logits, by token id.")] = None
    seed: Annotated[
        Seed | None,
        field_doc(
            "Seed of the sampling. If absent, one is drawn; the header `x-pdserve-seed` has it."
        ),
    ] = None
    stop: Annotated[
        Stop | None,
        field_doc("Strings that end a choice; they need not begin or end with a token."),
    ] = None
    stop_token_ids: Annotated[StopTokens | None, field_doc("Tokens that end a choice.")] = None
    include_stop_str_in_output: Annotated[
        bool | None, field_doc("If true, the text includes the stop string.")
    ] = None
    ignore_eos: Annotated[
        bool | None, field_doc("If true, the model's own end tokens do not end a choice.")
    ] = None
    min_tokens: Annotated[
        TokenCount | None,
        field_doc("Before this many output tokens only `max_tokens` ends a choice."),
    ] = None
    skip_special_tokens: Annotated[
        bool | None, field_doc("If true (the default), special tokens are left out of the text.")
    ] = None
    spaces_between_special_tokens: Annotated[
        bool | None, field_doc("If true (the default), special tokens are separated by spaces.")
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        field_doc(
            "If true, adds the tokenizer's first and last tokens. Default: true for "
            "completions; false for chat, whose templates write them."
        ),
    ] = None
    return_token_ids: Annotated[
        bool | None,
        field_doc(
            "If true, each choice or chunk has `token_ids`, and the answer has `prompt_token_ids`."
        ),
    ] = None
    priority: Annotated[Priority | None, field_doc("Requests of higher priority start sooner.")] = (
        None
    )
    request_id: Annotated[
        str | None,
        field_doc(
            "Id of the request, instead of the header `x-request-id`: 1 to 128 "
            "printable ASCII characters."
        ),
    ] = None
    cache_salt: Annotated[
        Annotated[str, Meta(min_length=1, max_length=256)] | None,
        field_doc("Requests share the KV of equal prompts only if their salts are equal."),
    ] = None
    cache_ttl: Annotated[CacheTtl | None, field_doc(_TTL_NOTE)] = None
    cache_scope: Annotated[CacheScopeName | None, field_doc(_SCOPE_NOTE)] = None
    prompt_cache_retention: Annotated[
        str | None,
        field_doc("`24h` is `cache_ttl` 86400; other values have no effect. `cache_ttl` wins."),
    ] = None
    session_id: Annotated[
        Annotated[str, Meta(max_length=256)] | None,
        field_doc(
            "Id of a conversation or agent. Some routing policies send its requests to one worker."
        ),
    ] = None
    user: Annotated[str | None, field_doc("Id of the user.")] = None
    response_format: Annotated[
        ResponseFormat | None,
        field_doc("Format of the answer: JSON, or JSON that fits a schema."),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        field_doc(
            "Format of the answer, as in vLLM: `json`, `regex`, `choice`, `grammar`, "
            "`json_object` or `structural_tag`."
        ),
    ] = None
    prompt_logprobs: Annotated[
        TopLogprobs | None,
        field_doc(
            "Returns logprobs of the prompt's tokens, by token id, with this many "
            "alternatives; not for streams. Limit: prompt tokens x choices x (1 + "
            "this number) <= 524,288."
        ),
    ] = None
    logprob_token_ids: Annotated[
        Annotated[list[Token], Meta(max_length=128)] | None,
        field_doc(
            "Tokens whose logprobs are reported at every position, with the sampled one's and "
            "instead of the likeliest; needs `logprobs`."
        ),
    ] = None
    allowed_token_ids: Annotated[
        Annotated[list[Token], Meta(max_length=65536)] | None,
        field_doc("The only tokens that may be sampled; not together with structured output."),
    ] = None
    bad_words: Annotated[
        Words | None,
        field_doc(
            "Words that are not generated, neither at the beginning of the text nor "
            "after a space; not together with structured output."
        ),
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None,
        field_doc(
            "Number of prompt tokens to keep; -1: as many as leave room for "
            "`max_tokens`, or for 16 tokens."
        ),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None,
        field_doc("The end that is cut off. `left` (the default) keeps the last tokens."),
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, field_doc("If true, logprobs name tokens as `token_id:N`.")
    ] = None
    stream_interval: Annotated[
        Annotated[int, Meta(ge=1, le=65536)] | None,
        field_doc("Number of tokens per chunk, after the first chunk."),
    ] = None
    repetition_detection: Annotated[
        RepetitionDetection | None,
        field_doc("Ends a choice that repeats the same tokens, with `finish_reason` `repetition`."),
    ] = None


class ChatRequest(GenerationRequest, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[
        Annotated[list[Message], Meta(min_length=1)],
        field_doc("The conversation; contents are strings or parts of type `text` or `image_url`."),
    ]
    max_tokens: Annotated[
        MaxTokens | None,
        field_doc("Most output tokens; the older name of `max_completion_tokens`."),
    ] = None
    max_completion_tokens: Annotated[
        MaxTokens | None,
        field_doc(
            "Most output tokens. Default: the model's recommendation, else as many as"
            " fit the context."
        ),
    ] = None
    logprobs: Annotated[
        bool | None, field_doc("If true, returns logprobs of the output tokens.")
    ] = None
    top_logprobs: Annotated[
        TopLogprobs | None, field_doc("Number of alternatives at each position; needs `logprobs`.")
    ] = None
    echo: Annotated[
        bool | None,
        field_doc(
            "If true, the answer begins with the last message if it is the "
            "assistant's; see `continue_final_message`."
        ),
    ] = None
    tools: Annotated[Tools | None, field_doc("Functions that the model may call.")] = None
    tool_choice: Annotated[
        ToolChoice | NamedTool | None,
        field_doc(
            "The tools that the model calls: `none`, `auto`, `required`, one by its "
            "name, or `allowed_tools`."
        ),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, field_doc("If false, the model makes one call at most.")
    ] = None
    reasoning_effort: Annotated[
        ReasoningEffort | None,
        field_doc("Passed to the chat template; `none` asks for no reasoning."),
    ] = None
    enable_thinking: Annotated[
        bool | None, field_doc("If true, the model reasons first; for templates that support it.")
    ] = None
    thinking: Annotated[
        ThinkingSwitch | None,
        field_doc("The same as `enable_thinking`, as an object: `enabled` or `disabled`."),
    ] = None
    include_reasoning: Annotated[
        bool | None, field_doc("If false, the answer has no reasoning.")
    ] = None
    thinking_token_budget: Annotated[
        ThinkingBudget | None, field_doc("Most tokens of reasoning, which then ends; -1: no limit.")
    ] = None
    verbosity: Annotated[
        Verbosity | None,
        field_doc("Passed to the chat template; most templates ignore it."),
    ] = None
    documents: Annotated[
        Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None,
        field_doc("Passed to the chat template."),
    ] = None
    chat_template: Annotated[
        str | None,
        field_doc(
            "The name of one of the model's templates; source only with "
            "--trust-request-chat-template."
        ),
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, field_doc("Variables for the template.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None,
        field_doc(
            "If true, the template opens the model's turn. Default: true unless the "
            "last message is continued."
        ),
    ] = None
    continue_final_message: Annotated[
        bool | None, field_doc("If true, the model continues the last message.")
    ] = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """The body of `POST /v1/completions`.

    `prompt` is a string, a list of strings, one list of token ids, or a list of such lists.
    """

    prompt: Annotated[
        str | list[str | Token | list[Token]],
        field_doc("A string, a list of strings, one list of token ids, or a list of such lists."),
    ]
    max_tokens: Annotated[
        TokenCount | None,
        field_doc(
            "Most output tokens; default 16. 0 with `echo` scores the prompt and generates nothing."
        ),
    ] = None
    echo: Annotated[bool | None, field_doc("If true, the text begins with the prompt.")] = None
    logprobs: Annotated[
        TopLogprobs | None,
        field_doc(
            "Returns logprobs of the output tokens with this many alternatives; with "
            "`echo` also those of the prompt."
        ),
    ] = None
    best_of: Annotated[Choices | None, field_doc("Must equal `n`.")] = None
    suffix: Annotated[
        str | None,
        field_doc(
            "The text after the output; for models whose tokenizer has tokens to fill in the "
            "middle, with `prompt` as text."
        ),
    ] = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /tokenize`: exactly one of `prompt` and `messages`."""

    model: Annotated[
        str | None,
        field_doc(
            "The name or an alias of the model; may be left out if only one model is served."
        ),
    ] = None
    prompt: Annotated[str | None, field_doc("A text; use this or `messages`.")] = None
    messages: Annotated[
        Annotated[list[Message], Meta(min_length=1)] | None,
        field_doc("A conversation; use this or `prompt`."),
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        field_doc(
            "If true, adds the tokenizer's first and last tokens. Default: true for "
            "text, false for chat."
        ),
    ] = None
    return_token_strs: Annotated[
        bool | None, field_doc("If true, also returns each token as in the tokenizer's vocabulary.")
    ] = None
    tools: Annotated[Tools | None, field_doc("Passed to the chat template.")] = None
    documents: Annotated[
        Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None,
        field_doc("Passed to the chat template."),
    ] = None
    chat_template: Annotated[str | None, field_doc("As in chat completions.")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, field_doc("Variables for the template.")
    ] = None
    enable_thinking: Annotated[
        bool | None, field_doc("If true, the model reasons first; for templates that support it.")
    ] = None
    thinking: Annotated[
        ThinkingSwitch | None,
        field_doc("The same as `enable_thinking`, as an object: `enabled` or `disabled`."),
    ] = None
    add_generation_prompt: Annotated[
        bool | None, field_doc("If true, the template opens the model's turn.")
    ] = None
    continue_final_message: Annotated[
        bool | None, field_doc("If true, the last message is left open.")
    ] = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /detokenize`."""

    model: Annotated[
        str | None,
        field_doc(
            "The name or an alias of the model; may be left out if only one model is served."
        ),
    ] = None
    tokens: Annotated[list[Token], field_doc("Token ids.")]
