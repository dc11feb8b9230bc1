"""Defines the responses of the OpenAI API as typed records: whole answers, chunks, small endpoints.

The frontend encodes them; pdserve's own clients decode them, also from other servers. Other servers
send `null`, leave fields out or use finish reasons of their own, so decoding accepts more than is
ever encoded. The hot path of a stream builds no records: `stream_chunks.py` writes the same JSON
from prepared bytes, and a test compares the two.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

FinishReason = Literal["stop", "length", "abort", "error", "tool_calls", "repetition"]
"""Finish reasons that pdserve sends."""
_Finished = Annotated[str, Meta(extra_json_schema={"enum": list(get_args(FinishReason))})]
"""Finish reason of pdserve or of another server."""


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int = 0
    """Leading prompt tokens whose KV was reused instead of computed."""


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int = 0
    """Reasoning tokens of all choices, markers included."""


class Served(msgspec.Struct, kw_only=True):
    """Where a request was served and how fast; an extension of OpenAI's usage.

    For several prompts: distinct names joined by commas, sums of tokens, maxima of attempts and
    times. Null: not known.
    """

    worker: str
    router: str
    policy: str
    """Routing policy that chose the worker."""
    attempts: int
    """Number of workers that were asked to take the request."""
    overlap_tokens: int | None = None
    """Leading prompt tokens that the router expected in the worker's cache."""
    cached_tokens: int | None = None
    """Leading prompt tokens that were in the worker's cache."""
    cached: str | None = None
    """Those tokens by where they were: `device=…; host=…; disk=…; peer=…; node=…`. Null: on the
    device."""
    predicted_ttft_ms: float | None = None
    ttft_ms: float | None = None
    """Time from the request's arrival to its first token."""
    held_ms: float | None = None
    """Time in the router's queue until a worker had room."""
    queue_ms: float | None = None
    """Time in the worker's own queue."""
    prefill_ms: float | None = None
    prefill: str | None = None
    """Where the prompt was computed and why there: `remote; node=…; reason=…`. Null: on the
    decode worker, without a choice."""
    migrations: int | None = None
    """Number of moves to another worker. Null: none."""


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of the whole request: prompts once, completions of all choices."""

    prompt_tokens: int
    completion_tokens: int = 0
    """Output tokens; other servers omit it for embeddings."""
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType | None = msgspec.UNSET
    """Details for a model with a reasoning parser."""
    pdserve: Served | msgspec.UnsetType = msgspec.UNSET
    """Routing details, only in the last usage of an answer."""


# ---------------------------------------------------------------- route explanation


class RouteCandidate(msgspec.Struct, kw_only=True):
    """One worker as the policy saw it."""

    worker: str
    standing: str
    """`sound`, `doubtful`, `draining`, `unready`, or the filter of the request that excludes it."""
    chosen: bool
    overlap_tokens: int
    terms: dict[str, float]
    """Cost terms of the policy by name; `cost` is the compared sum, if the policy has one."""
    reused_tokens: dict[str, int] = {}
    """Leading prompt tokens that it would not compute, by where it would take their KV from:
    `device`, `host`, `disk`, `peer`. A source without any is left out."""


class RouteSource(msgspec.Struct, kw_only=True):
    """A worker from which the chosen one may fetch KV of the prompt."""

    worker: str
    tokens: int
    """Leading prompt tokens that it has."""
    device_tokens: int
    """Those of them that are on its device."""
    kept: bool = True
    """False: enough workers have them, so the chosen one lets go of them after the request."""


class RouteExplanation(msgspec.Struct, kw_only=True):
    """What a router would do with a request now; no request is sent or counted."""

    object: Literal["route"] = "route"
    model: str
    router: str
    policy: str
    worker: str | None
    """Chosen worker; null: the request would be queued or refused."""
    refusal: str | None
    held: int
    """Number of the model's requests in the router's queue."""
    predicted_ttft_ms: float | None
    prompt_tokens: int
    candidates: list[RouteCandidate]
    kv_sources: list[RouteSource] = []
    """Best first; empty: no other worker has more of the prompt."""


# ---------------------------------------------------------------- logprobs


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None = None


class ChatLogprob(msgspec.Struct, kw_only=True):
    """One output token. `bytes` are exact; `token` has U+FFFD where they are not whole UTF-8."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[ChatLogprob] | None = None
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Parallel lists, one entry per token; a token without a logprob (a first one) has `null`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Offset of each token in characters from the start of the choice's `text`."""


class PromptLogprob(msgspec.Struct, kw_only=True):
    """Logprob of the actual or a likely token at a position of the prompt."""

    logprob: float
    rank: int
    """Rank of the token; 1 is the most likely."""
    decoded_token: str


ScoredToken = dict[str, PromptLogprob] | None
"""Logprobs by token id: the prompt's token and the most likely ones. Null for the first token."""


# ---------------------------------------------------------------- chat


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str
    """Arguments as JSON text, as far as generated."""


class CalledTool(msgspec.Struct, kw_only=True):
    """A tool call by the model."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    """Text of the answer; null if the model only called tools."""
    refusal: str | None = None
    """Refusal text; only other servers send it."""
    reasoning: str | msgspec.UnsetType | None = msgspec.UNSET
    """Reasoning before the answer; null if none, absent without a reasoning parser."""
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    """Same value as `reasoning`, under the name that other clients read."""
    tool_calls: list[CalledTool] | msgspec.UnsetType | None = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: _Finished
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; null for the model's own end token."""
    token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Annotated[str, Meta(extra_json_schema={"enum": ["chat.completion"]})] = (
        "chat.completion"
    )
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChoice]
    usage: Usage | None = None
    """Token counts; null only from other servers."""
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[ScoredToken] | None = None


class FunctionDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None
    """Next piece of the arguments."""


class ToolCallDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Next piece of one tool call; the first has its id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: _Finished | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Annotated[str, Meta(extra_json_schema={"enum": ["chat.completion.chunk"]})] = (
        "chat.completion.chunk"
    )
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET


# ---------------------------------------------------------------- completions


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    """Prompt index times `n`, plus the choice's number."""
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: _Finished | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[ScoredToken] | None = None


class Completion(msgspec.Struct, kw_only=True):
    """A whole answer, or one chunk of a stream: OpenAI gives both the same shape."""

    id: str
    object: Annotated[str, Meta(extra_json_schema={"enum": ["text_completion"]})] = (
        "text_completion"
    )
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: Usage | None = None


# ---------------------------------------------------------------- models, tokenizer, health


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pdserve"
    root: str
    """Name of the served model, which differs from `id` for an alias; name and revision of an
    adapter."""
    parent: str | None = None
    """Name of an adapter's base model; null: this is none."""
    max_model_len: int
    tool_parser: str | None = None
    """Name of the tool parser; null: tool calls are not parsed."""
    reasoning_parser: str | None = None
    """Name of the reasoning parser; null: reasoning is not separated."""


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class Tokenized(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, kw_only=True):
    prompt: str


class Version(msgspec.Struct, kw_only=True):
    version: str


class Health(msgspec.Struct, kw_only=True):
    """`status` is `ok` (HTTP 200), or `loading`, `draining`, `unavailable` (HTTP 503)."""

    status: Literal["ok", "loading", "draining", "unavailable"]
    reason: str | None
    version: str
    uptime_seconds: float
    active_requests: int
    memory_bytes: int
    """Resident memory of this process, without the engine process."""
    degraded: dict[str, str]
    """Degradations of this process: name, and reason with remedy."""
