"""Types the request fields as keywords for type checkers, as in `completion_requests`.

Records of that module and plain dictionaries work too. A test compares the names with the records;
docs/api.md describes what the server does with each field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from pdserve.protocols import completion_requests

Plain = Mapping[str, Any]
Messages = str | Sequence[completion_requests.Message | Plain]
"""A conversation; a string is one user message."""
Tools = Sequence[completion_requests.Tool | Plain]


class GenerationFields(TypedDict, total=False):
    """Fields of chat and plain completions."""

    stream_options: completion_requests.StreamOptions | Plain
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float] | Mapping[str, float]
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    min_tokens: int
    max_tokens: int
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    add_special_tokens: bool
    return_token_ids: bool
    priority: int
    request_id: str
    cache_salt: str
    cache_ttl: float
    cache_scope: Literal["shared", "never"]
    prompt_cache_retention: str
    session_id: str
    user: str
    echo: bool
    response_format: completion_requests.ResponseFormat | Plain
    structured_outputs: completion_requests.StructuredOutputs | Plain
    prompt_logprobs: int
    logprob_token_ids: Sequence[int]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    truncate_prompt_tokens: int
    truncation_side: Literal["left", "right"]
    return_tokens_as_token_ids: bool
    stream_interval: int
    repetition_detection: completion_requests.RepetitionDetection | Plain


class ChatFields(GenerationFields, total=False):
    """Fields of `chat` and `chat_stream`."""

    max_completion_tokens: int
    logprobs: bool
    top_logprobs: int
    tools: Tools
    tool_choice: completion_requests.ToolChoice | completion_requests.NamedTool | Plain
    parallel_tool_calls: bool
    reasoning_effort: completion_requests.ReasoningEffort
    enable_thinking: bool
    thinking: completion_requests.ThinkingSwitch | Plain
    include_reasoning: bool
    thinking_token_budget: int
    verbosity: completion_requests.Verbosity
    documents: Sequence[Plain]
    chat_template: str
    chat_template_kwargs: Plain
    add_generation_prompt: bool
    continue_final_message: bool


class CompletionFields(GenerationFields, total=False):
    """Fields of `complete` and `complete_stream`."""

    logprobs: int
    best_of: int
    suffix: str


class EmbedFields(TypedDict, total=False):
    """Fields of `embed`."""

    encoding_format: Literal["float", "base64"]
    dimensions: int
    add_special_tokens: bool
    chat_template: str
    chat_template_kwargs: Plain
    add_generation_prompt: bool
    continue_final_message: bool
    truncate_prompt_tokens: int
    priority: int
    cache_salt: str
    session_id: str
    request_id: str
    user: str


class ScoreFields(TypedDict, total=False):
    """Fields of `score`."""

    instruction: str
    chat_template_kwargs: Plain
    truncate_prompt_tokens: int
    max_tokens_per_query: int
    max_tokens_per_doc: int
    use_activation: bool
    priority: int
    cache_salt: str
    session_id: str
    request_id: str
    user: str


class RerankFields(ScoreFields, total=False):
    """Fields of `rerank`."""

    top_n: int
    return_documents: bool


class TokenizeFields(TypedDict, total=False):
    """Fields of `tokenize`."""

    add_special_tokens: bool
    return_token_strs: bool
    tools: Tools
    documents: Sequence[Plain]
    chat_template: str
    chat_template_kwargs: Plain
    enable_thinking: bool
    thinking: completion_requests.ThinkingSwitch | Plain
    add_generation_prompt: bool
    continue_final_message: bool
