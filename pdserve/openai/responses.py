"""What the API answers, as typed records: whole answers, chunks of streams, small endpoints.

Both directions use them: the frontend encodes, pdserve's own clients decode, and other servers'
answers as well. Those say `null` where this one leaves a field out, leave fields out, and end texts
for reasons of their own, so what is decoded is wider than what is ever encoded. The hot path of a
stream does not build records; `chunks.py` writes the same JSON from ready-made pieces, and a test
holds the two together.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

FinishReason = Literal["stop", "length", "abort", "error", "tool_calls", "repetition"]
"""All that pdserve says."""
_Finished = Annotated[str, Meta(extra_json_schema={"enum": list(get_args(FinishReason))})]
"""That, or another server's word."""


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int = 0
    """Leading prompt tokens whose KV was reused instead of computed."""


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int = 0
    """Output tokens of the model's reasoning, of all choices, its marks included."""


class Served(msgspec.Struct, kw_only=True):
    """By whom a request was served and how soon; an extension of OpenAI's usage.

    Of several prompts: names once each, joined by commas; tokens added up; attempts and times the
    largest. Null: not known.
    """

    worker: str
    router: str
    policy: str
    """That chose the worker."""
    attempts: int
    """Workers that were asked to take it."""
    overlap_tokens: int | None = None
    """Leading prompt tokens that the router believed to be cached at the worker."""
    cached_tokens: int | None = None
    """Those that were."""
    predicted_ttft_ms: float | None = None
    ttft_ms: float | None = None
    """From the request's arrival to its first token."""
    held_ms: float | None = None
    """Kept by the router until a worker had room."""
    queue_ms: float | None = None
    """In the worker's own queue."""
    prefill_ms: float | None = None
    prefill: str | None = None
    """Where the prompt was computed and why there: `remote; node=…; reason=…`. Null: where it was
    decoded, for want of a choice."""
    migrations: int | None = None
    """How often it went on at another worker than the one that had it. Null: never."""


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of the whole request: prompts once, completions of all choices."""

    prompt_tokens: int
    completion_tokens: int = 0
    """Other servers leave it out where there are none, as of vectors."""
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType | None = msgspec.UNSET
    """Of a model whose reasoning is told apart."""
    pdserve: Served | msgspec.UnsetType = msgspec.UNSET
    """With the answer's last usage."""


# ---------------------------------------------------------------- routing, explained


class RouteCandidate(msgspec.Struct, kw_only=True):
    """One worker as the policy saw it."""

    worker: str
    standing: str
    """`sound`, `doubtful`, `draining`, `unready`, or why the request's own filters leave it out."""
    chosen: bool
    overlap_tokens: int
    terms: dict[str, float]
    """What the policy weighed, by name; `cost` is the sum that was compared, where there is one."""


class RouteExplanation(msgspec.Struct, kw_only=True):
    """What a router would do with a request now; nothing was sent or counted."""

    object: Literal["route"] = "route"
    model: str
    router: str
    policy: str
    worker: str | None
    """Null: it would be held or refused."""
    refusal: str | None
    held: int
    """Requests of the model that wait in the router now."""
    predicted_ttft_ms: float | None
    prompt_tokens: int
    candidates: list[RouteCandidate]


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
    """In characters, from the start of the choice's `text`."""


class PromptLogprob(msgspec.Struct, kw_only=True):
    """One token that may have stood, or stands, at a place of the prompt."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str


ScoredToken = dict[str, PromptLogprob] | None
"""By token id: the prompt's own token and the likeliest ones. The first token has null."""


# ---------------------------------------------------------------- chat


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str
    """A JSON object, as far as the model has written it."""


class CalledTool(msgspec.Struct, kw_only=True):
    """A call that the model wants to be made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    """Null where the model said nothing but called tools."""
    refusal: str | None = None
    """Only of other servers."""
    reasoning: str | msgspec.UnsetType | None = msgspec.UNSET
    """What the model thought before it spoke; absent if nothing."""
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    """The same, by the name that other clients know."""
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
    """Null only of other servers."""
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    prompt_logprobs: list[ScoredToken] | msgspec.UnsetType | None = msgspec.UNSET


class FunctionDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None
    """More of them."""


class ToolCallDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """More of one call: with its first delta come id, type and name."""

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
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    prompt_logprobs: list[ScoredToken] | msgspec.UnsetType | None = msgspec.UNSET


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


# ---------------------------------------------------------------- the small endpoints


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pdserve"
    root: str
    """The name this one stands for; differs from `id` for an alias."""
    max_model_len: int
    tool_parser: str | None = None
    """How its calls of tools are read; null: they are not."""
    reasoning_parser: str | None = None
    """How its reasoning is told apart; null: it is not."""


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
    """Resident memory of this process."""
    degraded: dict[str, str]
    """What this process does worse than it could: reason, and what would help."""
