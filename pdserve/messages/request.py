"""Defines a generation request to an engine and its output: `GenerateRequest`, `TokenDelta`.

Carries no text: the frontend tokenizes prompts and detokenizes outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from pdserve.ids import MAX_CHOICES
from pdserve.messages.tiers import CachedSource, CacheScope, KvSource
from pdserve.token_ids import TokenIds, token_ids, unpacked_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    PromptIds: TypeAlias = TokenIds
else:
    # What a decoder finds: a node of an earlier release sends a list. `__post_init__` packs it.
    PromptIds: TypeAlias = bytes | list[int]

Deadline = Annotated[float, Meta(ge=-1e9, le=1e9)]
"""Seconds, bounded because the queue is sorted by it."""

FinishReason = Literal["stop", "length", "abort", "error"]


Pooling = Literal["", "mean", "last"]
"""How a text becomes one vector: the mean of all its tokens' hidden states or the last one's."""


class Thinking(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Where a model's reasoning begins and ends in its output, and how long it may be."""

    start: tuple[int, ...]
    """Tokens that open the reasoning."""
    end: tuple[int, ...]
    """Tokens that close the reasoning; the answer follows them."""
    begun: bool = False
    """The prompt has opened the reasoning: the output begins inside."""
    budget: int | None = None
    """Most reasoning tokens; then `end` is forced; None: no limit."""
    call: tuple[int, ...] = ()
    """Tokens that begin a tool call. A tool call also ends the reasoning and is the first part of
    the answer. Empty: there are no tools.
    """


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How output tokens are chosen. Values were validated by the frontend; engines trust them.

    Order of application: raw logprobs are taken first; then `allowed_token_ids`, `grammar`,
    the end of `thinking`, `bad_words`, `logit_bias` and the `min_tokens` mask; repetition,
    frequency and presence penalties; then greedy if `temperature` is 0, else temperature, min_p,
    top_k, top_p, and one draw.
    """

    max_tokens: int
    """Output tokens at most, per choice, tokens of earlier attempts included; >= 1."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    """Nucleus sampling, in (0, 1]; 1 is off."""
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """Least probability relative to the likeliest token, in [0, 1]; 0 is off."""
    presence_penalty: float = 0.0
    """Subtracted once from each token already in the output; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides (multiplies, if negative) logits of tokens in prompt or output; > 0, 1 is off."""
    logit_bias: dict[int, float] = {}
    """Token id -> bias in [-100, 100]."""
    logprobs: int | None = None
    """None: none. k >= 0: the sampled token's logprob and those of the k most likely tokens."""
    prompt_logprobs: int | None = None
    """Like `logprobs`, for each prompt token but the first; such a request reads no prefix
    cache."""
    min_tokens: int = 0
    """Number of output tokens before which stop and end-of-sequence ids cannot be sampled."""
    stop_token_ids: tuple[int, ...] = ()
    """The choice ends with reason `stop` after any of these; the id is its `stop_reason`."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's own end tokens; ends with reason `stop` and no `stop_reason`."""
    ignore_eos: bool = False
    """Treat `eos_token_ids` as ordinary tokens."""
    seed: int = 0
    """Noise is keyed by (seed, prompt index, choice index, output position). Always drawn."""
    grammar: str = ""
    """Grammar that the output must match: Lark text or JSON as llguidance reads it. With
    `thinking`, it applies after the reasoning. Empty: no grammar.
    """
    thinking: Thinking | None = None
    """Reasoning markers and budget; None: the engine need not track reasoning."""
    allowed_token_ids: tuple[int, ...] = ()
    """No others are sampled; empty: all may be. Never together with `grammar`."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that do not occur in the output. Never together with `grammar`."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens whose logprobs are returned at every position, besides the likeliest; needs
    `logprobs`.
    """

    @property
    def steered(self) -> bool:
        """True if the next token depends on more than the model's logits and the fields before
        these."""
        thinking = self.thinking
        return bool(
            self.grammar
            or self.allowed_token_ids
            or self.bad_words
            or (thinking is not None and thinking.budget is not None)
        )


class GenerateRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Everything an engine needs to serve one prompt with `n` choices."""

    request_id: str
    model: str
    prompt: PromptIds
    """Token ids; never empty. They travel as packed bytes, and as a list to nodes of earlier
    releases (`wire.codec.encoder_for`)."""
    sampling: SamplingParams
    n: Annotated[int, Meta(le=MAX_CHOICES)] = 1
    """Choices; they share the prompt's blocks."""
    prompt_index: int = 0
    """Which prompt of a batched completion this is; part of the noise key."""
    output: list[list[int]] = []
    """Per choice, tokens already generated by an earlier attempt; empty for a fresh request."""
    cache_salt: str = ""
    """Prefix blocks are shared only between requests of equal salt."""
    priority: int = 0
    """Higher is sooner."""
    deadline: Deadline | None = None
    """Seconds remaining at the moment of sending; None: no deadline."""
    block_names: bytes = b""
    """Hashes of the prompt's full blocks, 16 bytes each, made by the frontend; empty: the engine
    makes them.
    """
    names_id: bytes = b""
    """Id of the secret for `block_names`; an engine with another secret makes its own hashes."""
    ended: tuple[int, ...] = ()
    """Choices that have ended already: nothing is computed for them. At least one choice is not
    listed.
    """
    source: str = ""
    """A worker that has this sequence's KV and keeps it for a while, so that it can be fetched
    instead of computed. Empty: none. Only a hint: without it the output is the same.
    """
    source_epoch: int = 0
    """The life of the `source` worker that is meant."""
    suspect: bool = False
    """Workers may have crashed because of this request; a worker starts only one suspect request at
    a time. A worker of an older release ignores the flag.
    """
    pooling: Pooling = ""
    """How the prompt becomes an embedding, which the one delta's `finish` carries; `n` and
    `max_tokens` are 1 then. Empty: generate text.
    """
    lora: str = ""
    """Id of the LoRA adapter (`LoraAdapter.id`) that computes prompt and output; empty: the model
    itself.
    """
    classify: bool = False
    """With `pooling` `last`: the vector is what the model's classification head makes of the pooled
    one, its logits.
    """
    images: tuple[bytes, ...] = ()
    """Image files, in the order of their placeholder tokens in `prompt`, one token for each. The
    engine expands each token to as many as the image takes.
    """
    image_tokens: tuple[int, ...] = ()
    """Tokens that the frontend expects each of `images` to take; 0: it does not know."""
    trace: bool = False
    """The worker reports `WorkerPhase`s with the first token and with the end. An older one ignores
    the flag."""
    trace_id: bytes = b""
    """Id of the request's trace, 16 bytes, for lines in the log; empty: it is not traced."""
    kv_sources: tuple[KvSource, ...] = ()
    """Other workers that have leading blocks of the prompt, longest first. Only hints."""
    cache_ttl: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds for which the prompt's blocks should stay in some tier after it; 0: no wish."""
    cache_scope: CacheScope = ""

    def __post_init__(self) -> None:
        """Packs a prompt as it was decoded. Raises `ValueError` and `TypeError` as `token_ids` and
        `unpacked_ids` do; a decoder reports them."""
        given: object = self.prompt
        if type(given) is bytes:
            force_setattr(self, "prompt", unpacked_ids(given))
        elif type(given) is list:
            force_setattr(self, "prompt", token_ids(given))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, with those that its images are expected to take."""
        if not self.image_tokens:
            return len(self.prompt)
        return len(self.prompt) + sum(each - 1 for each in self.image_tokens if each)

    @property
    def needs(self) -> tuple[str, ...]:
        """The entries of `ModelCard.features` that a worker must have to serve this request. A
        worker that lacks one would ignore the field and answer wrongly."""
        sampling, thinking = self.sampling, self.sampling.thinking
        lists = sampling.allowed_token_ids, sampling.bad_words, sampling.logprob_token_ids
        wanted = (
            ("grammar", sampling.grammar),
            ("thinking", thinking is not None and thinking.budget is not None),
            ("bans", any(lists)),
            ("embeddings", self.pooling and not self.classify),
            ("classify", self.classify),
            ("lora", self.lora),
            ("images", self.images),
        )
        return tuple([name for name, needed in wanted if needed])

    @property
    def live(self) -> Sequence[int]:
        """Choices that have not ended, in order."""
        if not self.ended:
            return range(self.n)
        ended = frozenset(self.ended)
        return [choice for choice in range(self.n) if choice not in ended]

    @property
    def given(self) -> list[int]:
        """Tokens already generated for the first live choice, which computes the prompt."""
        return self._output(next(iter(self.live), self.n))

    @property
    def diverged(self) -> bool:
        """True if several choices go on, and not all from the prompt's end."""
        return bool(self.output) and len(self.live) > 1 and any(map(self._output, self.live))

    def _output(self, choice: int) -> list[int]:
        return self.output[choice] if choice < len(self.output) else []


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The logprob of one token and of the most likely alternatives at its place."""

    token: int
    logprob: float
    """Natural logarithm, before temperature, penalties and bias."""
    rank: int
    """1 for the most likely token."""
    top: list[tuple[int, float]]
    """(token id, logprob), most likely first."""


MAX_WORKER_PHASES: Final = 16
"""Most phases in one report; later ones are left out."""


class WorkerPhase(msgspec.Struct, frozen=True, array_like=True):
    """A part of a request's time at a worker, told if the request asks for it."""

    name: str
    """`chunk`: a step computed a part of the prompt; `preempted`: without KV blocks;
    `handoff_queue`, `handoff_open`, `handoff_fill`, `handoff_activate`: the prompt was prefilled by
    another worker."""
    start: float
    """Seconds since the request arrived at the worker."""
    end: float
    tokens: int = 0
    node: str = ""
    """The other worker."""
    backend: str = ""
    """What moved the KV."""
    attempt: int = 0


class Finish(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How one choice ended, and what it cost."""

    reason: FinishReason
    stop_reason: int | None = None
    """The stop token id that ended it, if one did."""
    message: str = ""
    """For `error`: what happened, in words for the client."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Leading prompt tokens whose KV was reused from the pool instead of computed."""
    preemptions: int = 0
    queue_seconds: float = 0.0
    """Seconds from submission to the first step that computed something for it."""
    prefill_seconds: float = 0.0
    """Seconds from that step to the first output token."""
    embedding: bytes = b""
    """With `pooling`: the embedding, little-endian float32; its delta has no tokens."""
    phases: tuple[WorkerPhase, ...] = ()
    """Those since the first token."""


class FirstTokenStats(msgspec.Struct, frozen=True, array_like=True):
    """Statistics of how a sequence came to its first token."""

    cached_tokens: int
    """Leading prompt tokens whose KV was reused from the pool instead of computed."""
    queue_seconds: float
    """Seconds from submission to the first step that computed something for it."""
    prefill_seconds: float
    """Seconds from the beginning of that step to the first token."""
    work_seconds: float
    """Seconds of its share of the steps in between, by its part of each step's tokens."""
    received_tokens: int = 0
    """Tokens whose KV another worker computed and sent, of the prompt and of earlier output. 0: all
    were computed here.
    """
    prefill: str = ""
    """Where the prompt was prefilled and why, as in the header `x-pdserve-prefill`; empty: the
    worker has no choice.
    """
    image_tokens: tuple[int, ...] = ()
    """Tokens that each image of the prompt took."""
    phases: tuple[WorkerPhase, ...] = ()
    """Those up to the first token."""
    sources: tuple[CachedSource, ...] = ()
    """Those of `cached_tokens` that were not on the device, by source."""
    prefill_cached: int = 0
    """Leading prompt tokens that the prefill worker, if it is another one, did not compute."""
    prefill_sources: tuple[CachedSource, ...] = ()
    """Those of them that were not on its device, by source."""


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """What one step added to one sequence. The last one of a sequence carries `finish`."""

    handle: int
    """The submission's number at the engine port."""
    choice: int
    tokens: list[int]
    """Output tokens in order, including the stop or end-of-sequence token that ended the choice."""
    finish: Finish | None = None
    logprobs: list[TokenLogprob] | None = None
    """One per token of `tokens`, if asked for."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """On a choice's first delta, if asked for: one per prompt token but the first."""
    started: FirstTokenStats | None = None
    """On a choice's first delta that has a token or a vector."""
