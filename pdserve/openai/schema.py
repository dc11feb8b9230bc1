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


def says(text: str) -> Meta:
    """What a field is for, for people: `/openapi.json` and the table of fields show it."""
    return Meta(description=text)


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

    model: Annotated[
        str | None, says("A name or an alias; may be left out where one model is served.")
    ] = None
    stream: Annotated[bool | None, says("Server-sent events, as tokens come.")] = None
    stream_options: Annotated[
        StreamOptions | None, says("What a stream carries beyond its text; needs `stream`.")
    ] = None
    n: Annotated[
        Choices | None, says("Choices; prompts times `n` are bounded by --max-choices.")
    ] = None
    temperature: Annotated[
        Temperature | None, says("0 is greedy; without a word the model's recommendation, else 1.")
    ] = None
    top_p: Annotated[
        TopP | None, says("Nucleus sampling; 1 is off. The model's recommendation, else off.")
    ] = None
    top_k: Annotated[
        TopK | None, says("0 and -1 are off. The model's recommendation, else off.")
    ] = None
    min_p: Annotated[MinP | None, says("Relative to the likeliest token; 0 is off.")] = None
    frequency_penalty: Annotated[Penalty | None, says("Per occurrence in the output.")] = None
    presence_penalty: Annotated[Penalty | None, says("Once for what is in the output.")] = None
    repetition_penalty: Annotated[
        RepetitionPenalty | None, says("Over prompt and output; 1 is off.")
    ] = None
    logit_bias: Annotated[LogitBias | None, says("By token id.")] = None
    seed: Annotated[
        Seed | None, says("Drawn if absent; the header `x-pdserve-seed` says which.")
    ] = None
    stop: Annotated[
        Stop | None, says("Strings that end a choice, wherever they lie between tokens.")
    ] = None
    stop_token_ids: Annotated[StopTokens | None, says("Tokens that end a choice.")] = None
    include_stop_str_in_output: Annotated[
        bool | None, says("The stop string is part of the text.")
    ] = None
    ignore_eos: Annotated[bool | None, says("The model's own end tokens are ordinary ones.")] = None
    min_tokens: Annotated[
        TokenCount | None, says("Until then nothing ends a choice but `max_tokens`.")
    ] = None
    skip_special_tokens: Annotated[
        bool | None, says("They are left out of the text; true unless said otherwise.")
    ] = None
    spaces_between_special_tokens: Annotated[bool | None, says("True unless said otherwise.")] = (
        None
    )
    add_special_tokens: Annotated[
        bool | None,
        says(
            "The tokenizer's first and last tokens; completions: true, chat: false, for templates "
            "write them."
        ),
    ] = None
    return_token_ids: Annotated[
        bool | None, says("`token_ids` of each choice or chunk, and `prompt_token_ids`.")
    ] = None
    priority: Annotated[Priority | None, says("Higher is sooner.")] = None
    request_id: Annotated[
        str | None,
        says("1 to 128 printable ASCII characters, instead of the header `x-request-id`."),
    ] = None
    cache_salt: Annotated[
        Annotated[str, Meta(min_length=1, max_length=256)] | None,
        says("KV of equal prompts is shared only under equal salts."),
    ] = None
    session_id: Annotated[
        Annotated[str, Meta(max_length=256)] | None,
        says("Requests of one conversation or agent; policies that keep one together go by it."),
    ] = None
    user: Annotated[str | None, says("Who asks; nothing depends on it.")] = None
    response_format: Annotated[
        ResponseFormat | None, says("What the answer has to look like: JSON, or JSON of a schema.")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        says(
            "The same in vLLM's words: `json`, `regex`, `choice`, `grammar`, `json_object` or "
            "`structural_tag`."
        ),
    ] = None
    prompt_logprobs: Annotated[
        TopLogprobs | None,
        says(
            "Of the prompt's tokens, by token id, with so many alternatives; not streamed. Prompt "
            "tokens x choices x (1 + it) may be 524,288."
        ),
    ] = None
    logprob_token_ids: Annotated[
        Annotated[list[Token], Meta(max_length=128)] | None,
        says("Tokens whose logprobs are told at every place; needs `logprobs`."),
    ] = None
    allowed_token_ids: Annotated[
        Annotated[list[Token], Meta(max_length=65536)] | None,
        says("No others are sampled; not together with structured output."),
    ] = None
    bad_words: Annotated[
        Words | None,
        says(
            "Are not said, neither at a text's begin nor after a space; not together with "
            "structured output."
        ),
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None,
        says(
            "Only the prompt's last tokens are used; -1: as many as leave room for `max_tokens`, "
            "or for 16."
        ),
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, says("Logprobs name tokens `token_id:N`.")
    ] = None
    stream_interval: Annotated[
        Annotated[int, Meta(ge=1, le=65536)] | None,
        says("A chunk per so many tokens, after the first one."),
    ] = None
    repetition_detection: Annotated[
        RepetitionDetection | None,
        says("Ends a choice that says the same over and over: `finish_reason` is `repetition`."),
    ] = None


class ChatRequest(GenerationRequest, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[
        Annotated[list[Message], Meta(min_length=1)],
        says("The conversation; contents are strings or parts of type `text`."),
    ]
    max_tokens: Annotated[
        MaxTokens | None, says("Output tokens at most; the older name of `max_completion_tokens`.")
    ] = None
    max_completion_tokens: Annotated[
        MaxTokens | None,
        says("Output tokens at most; the model's recommendation, else what fits the context."),
    ] = None
    logprobs: Annotated[bool | None, says("Of the output's tokens.")] = None
    top_logprobs: Annotated[
        TopLogprobs | None, says("Alternatives at each place; needs `logprobs`.")
    ] = None
    echo: Annotated[
        bool | None,
        says(
            "The answer begins with the last message, if the model is the one who said it; see "
            "`continue_final_message`."
        ),
    ] = None
    tools: Annotated[Tools | None, says("Functions that the model may call.")] = None
    tool_choice: Annotated[
        ToolChoice | NamedTool | None,
        says("Whether and what is called: `none`, `auto`, `required` or one by its name."),
    ] = None
    parallel_tool_calls: Annotated[bool | None, says("False: one call at most.")] = None
    reasoning_effort: Annotated[
        ReasoningEffort | None, says("Handed to the template; `none` asks it for no reasoning.")
    ] = None
    include_reasoning: Annotated[bool | None, says("False: reasoning is not told.")] = None
    thinking_token_budget: Annotated[
        TokenCount | None, says("Reasoning is ended after so many tokens.")
    ] = None
    documents: Annotated[
        Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None,
        says("Handed to the template."),
    ] = None
    chat_template: Annotated[
        str | None,
        says(
            "The name of one of the model's templates; source only with "
            "--trust-request-chat-template."
        ),
    ] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, says("Variables for the template.")] = (
        None
    )
    add_generation_prompt: Annotated[
        bool | None,
        says("The template opens the model's turn; true unless the last message is continued."),
    ] = None
    continue_final_message: Annotated[
        bool | None, says("The model goes on with the last message.")
    ] = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """The body of `POST /v1/completions`.

    `prompt` is a string, a list of strings, one list of token ids, or a list of such lists.
    """

    prompt: Annotated[
        str | list[str | Token | list[Token]],
        says("A string, a list of strings, one list of token ids, or a list of such lists."),
    ]
    max_tokens: Annotated[
        TokenCount | None,
        says(
            "16 unless said otherwise; 0 with `echo`: the prompt is scored, nothing is generated."
        ),
    ] = None
    echo: Annotated[bool | None, says("The text begins with the prompt.")] = None
    logprobs: Annotated[
        TopLogprobs | None,
        says(
            "Of the output's tokens, with so many alternatives; with `echo` of the prompt's, too."
        ),
    ] = None
    best_of: Annotated[Choices | None, says("Has to equal `n`.")] = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /tokenize`: exactly one of `prompt` and `messages`."""

    model: Annotated[
        str | None, says("A name or an alias; may be left out where one model is served.")
    ] = None
    prompt: Annotated[str | None, says("A text; or `messages`.")] = None
    messages: Annotated[
        Annotated[list[Message], Meta(min_length=1)] | None, says("A conversation; or `prompt`.")
    ] = None
    add_special_tokens: Annotated[
        bool | None, says("The tokenizer's first and last tokens; text: true, chat: false.")
    ] = None
    return_token_strs: Annotated[bool | None, says("Each token's text, too.")] = None
    tools: Annotated[Tools | None, says("Handed to the template.")] = None
    documents: Annotated[
        Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None,
        says("Handed to the template."),
    ] = None
    chat_template: Annotated[str | None, says("As in chat completions.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, says("Variables for the template.")] = (
        None
    )
    add_generation_prompt: Annotated[bool | None, says("The template opens the model's turn.")] = (
        None
    )
    continue_final_message: Annotated[bool | None, says("The last message is left open.")] = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /detokenize`."""

    model: Annotated[
        str | None, says("A name or an alias; may be left out where one model is served.")
    ] = None
    tokens: Annotated[list[Token], says("Token ids.")]
