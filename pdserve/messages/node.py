"""Defines the node card: what a node tells the whole cluster about itself.

The card is small, replaced as a whole, and fetched by version. Large parts (a tokenizer, a
template) are named by hash and fetched on demand. Values that change by the second (load) are
topics.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdserve.messages.card import (
    GenerationDefaults,
    ImagePlaceholder,
    ModelCard,
    ScoreActivation,
)
from pdserve.messages.lora import LoraSummary
from pdserve.messages.request import Pooling

PART_HASH_BYTES = 16
"""Length of the BLAKE2b-128 hash that names a part."""

PartHash = Annotated[bytes, Meta(min_length=PART_HASH_BYTES, max_length=PART_HASH_BYTES)]


class ModelSummary(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A `ModelCard` whose large fields are named by hash."""

    name: str
    aliases: tuple[str, ...] = ()
    max_model_len: int
    vocab_size: int
    block_size: int
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: PartHash
    tokenizer_config: PartHash
    chat_template: PartHash | None = None
    defaults: GenerationDefaults = GenerationDefaults()
    engine: str = ""
    dtype: str = ""
    compat_hash: str = ""
    created: int = 0
    tool_parser: str = ""
    reasoning_parser: str = ""
    pooling: Pooling = ""
    normalize: bool = False
    embedding_size: int = 0
    features: tuple[str, ...] = ()
    dimensions: tuple[int, ...] = ()
    loras: tuple[LoraSummary, ...] = ()
    num_labels: int = 0
    score_activation: ScoreActivation = ""
    image: ImagePlaceholder | None = None

    @property
    def parts(self) -> tuple[bytes, ...]:
        """Hashes of all large parts that a `ModelCard` needs."""
        optional = () if self.chat_template is None else (self.chat_template,)
        return (self.tokenizer, self.tokenizer_config, *optional)


class NodeCard(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One node's card. At most 8 KiB when encoded."""

    version: str = ""
    """Version of pdserve."""
    role: str = ""
    started: int = 0
    """Start time in Unix seconds."""
    host: str = ""
    pid: int = 0
    topics: tuple[str, ...] = ()
    """Topics that the node publishes."""
    models: tuple[ModelSummary, ...] = ()
    """Models that a worker serves; empty while it loads or its engine restarts."""
    draining: bool = False
    """True: it finishes its work and takes nothing new."""
    http: str = ""
    """`host:port` where a frontend serves users."""
    metrics: str = ""
    """`host:port` where the node answers probes and scrapes."""
    group: str = ""
    """Frontends that share one listening port name the same group."""
    max_sequences: int = 0
    """Sequences that a worker's engine runs at once."""
    degraded: tuple[str, ...] = ()
    """Names of degraded functions."""
    reason: str = ""
    """Why a worker serves no model."""
    names_id: bytes = b""
    """Id of the hash secret that the node holds (`blocks.hashing.hash_secret_id`); empty: none
    yet."""
    names_birth: int = 0
    """Origin of that secret, see `runtime.hash_secret.SecretClaim`."""
    mode: Literal["", "aggregated", "prefill", "decode"] = ""
    """A worker's mode; empty: it has no fixed mode."""
    transfers: tuple[str, ...] = ()
    """Backends by which a worker can move KV."""
    kv_block_bytes: int = 0
    """Bytes of a worker's KV block; 0: unknown."""
    fetches: tuple[str, ...] = ()
    """Backends by which a worker exchanges cached blocks, while it moves no other KV; empty:
    `transfers`."""
    kv_layers: int = 0
    """Layers of a worker's model, if its engine loads KV from host memory in groups of them; 0: its
    blocks come whole."""
    leaving: bool = False
    """True while a worker changes its mode: until it serves again it takes no prompts of other
    workers and, if it gives a `reason`, no requests."""
    mode_generation: int = 0
    """Number of a worker's present mode in this life, from 1; 0: not said."""
    prompt_share: float = 0.0
    """Share of a step's tokens that a worker which takes requests spends on other workers' prompts;
    0: it takes none."""
    change: str = ""
    """Id of the planner's change that started the process; empty: someone else did."""
    disagg: str = ""
    """How a worker decides where the prompts that it decodes are computed; empty: not said. See
    `messages.handoff.Disagg`."""

    @property
    def going(self) -> bool:
        """True if it takes no requests, for good or while it changes its mode."""
        return self.draining or (self.leaving and bool(self.reason))

    def has_lora(self, lora: str) -> bool:
        """True if the worker has the LoRA adapter with this id."""
        return any(one.id == lora for model in self.models for one in model.loras)


def part_hash(data: bytes) -> bytes:
    """Returns the hash that names a part."""
    return hashlib.blake2b(data, digest_size=PART_HASH_BYTES).digest()


def summarize_card(card: ModelCard) -> tuple[ModelSummary, dict[bytes, bytes]]:
    """Splits a model's card into a small record and its large parts by hash."""
    parts: dict[bytes, bytes] = {}

    def part(data: bytes) -> bytes:
        name = part_hash(data)
        parts[name] = data
        return name

    template = card.chat_template
    small = ModelSummary(
        name=card.name,
        aliases=card.aliases,
        max_model_len=card.max_model_len,
        vocab_size=card.vocab_size,
        block_size=card.block_size,
        eos_token_ids=card.eos_token_ids,
        tokenizer=part(card.tokenizer_json),
        tokenizer_config=part(card.tokenizer_config_json),
        chat_template=None if template is None else part(template.encode()),
        defaults=card.defaults,
        engine=card.engine,
        dtype=card.dtype,
        compat_hash=card.compat_hash,
        created=card.created,
        tool_parser=card.tool_parser,
        reasoning_parser=card.reasoning_parser,
        pooling=card.pooling,
        normalize=card.normalize,
        embedding_size=card.embedding_size,
        features=card.features,
        dimensions=card.dimensions,
        image=card.image,
        loras=card.loras,
        num_labels=card.num_labels,
        score_activation=card.score_activation,
    )
    return small, parts


def model_card(offer: ModelSummary, parts: dict[bytes, bytes]) -> ModelCard:
    """Rebuilds the whole card. Raises `KeyError` if a part is missing."""
    template = offer.chat_template
    return ModelCard(
        name=offer.name,
        aliases=offer.aliases,
        max_model_len=offer.max_model_len,
        vocab_size=offer.vocab_size,
        block_size=offer.block_size,
        eos_token_ids=offer.eos_token_ids,
        tokenizer_json=parts[offer.tokenizer],
        tokenizer_config_json=parts[offer.tokenizer_config],
        chat_template=None if template is None else parts[template].decode(),
        defaults=offer.defaults,
        engine=offer.engine,
        dtype=offer.dtype,
        compat_hash=offer.compat_hash,
        created=offer.created,
        tool_parser=offer.tool_parser,
        reasoning_parser=offer.reasoning_parser,
        pooling=offer.pooling,
        normalize=offer.normalize,
        embedding_size=offer.embedding_size,
        features=offer.features,
        dimensions=offer.dimensions,
        image=offer.image,
        loras=offer.loras,
        num_labels=offer.num_labels,
        score_activation=offer.score_activation,
    )
