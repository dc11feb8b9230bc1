"""What a node says about itself to the whole cluster: small, replaced whole, pulled by version.

Everything large (a tokenizer, a template) is named by its content's hash and fetched by those who
need it. Values that change by the second (load) are topics, not part of the card.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdserve.messages.card import GenerationDefaults, ModelCard
from pdserve.messages.request import Pooling

PART_HASH_BYTES = 16
"""Parts are named by the BLAKE2b-128 of their bytes."""

PartHash = Annotated[bytes, Meta(min_length=PART_HASH_BYTES, max_length=PART_HASH_BYTES)]


class ModelOffer(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
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

    @property
    def parts(self) -> tuple[bytes, ...]:
        """Hashes of everything that a `ModelCard` needs besides."""
        optional = () if self.chat_template is None else (self.chat_template,)
        return (self.tokenizer, self.tokenizer_config, *optional)


class NodeCard(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One node. At most 8 KiB when encoded."""

    version: str = ""
    """Of pdserve."""
    role: str = ""
    started: int = 0
    """Unix seconds."""
    host: str = ""
    pid: int = 0
    topics: tuple[str, ...] = ()
    """What the node publishes."""
    models: tuple[ModelOffer, ...] = ()
    """What a worker serves; empty while it loads, and again while its engine restarts."""
    draining: bool = False
    """It finishes what it has and takes nothing new."""
    http: str = ""
    """Where a frontend answers users, `host:port`."""
    metrics: str = ""
    """Where the node answers probes and scrapes, `host:port`."""
    group: str = ""
    """Frontends that share one listening port name the same group."""
    max_sequences: int = 0
    """A worker's engine runs this many at once."""
    degraded: tuple[str, ...] = ()
    """Names of what runs poorer than it could."""
    reason: str = ""
    """Why a worker serves no model, in words."""
    names_id: bytes = b""
    """Which hash secret the node holds (`blocks.hashing.names_id`); empty: none yet."""
    names_birth: int = 0
    """How that secret came to be: see `runtime.secret.Claim`."""
    mode: Literal["", "aggregated", "prefill", "decode"] = ""
    """What a worker does; empty: whatever it is asked to."""
    transfers: tuple[str, ...] = ()
    """Back ends by which a worker can move KV."""


def part_hash(data: bytes) -> bytes:
    """The name of a part."""
    return hashlib.blake2b(data, digest_size=PART_HASH_BYTES).digest()


def offer(card: ModelCard) -> tuple[ModelOffer, dict[bytes, bytes]]:
    """A model's card as it travels: the small record, and its large parts by hash."""
    parts: dict[bytes, bytes] = {}

    def part(data: bytes) -> bytes:
        name = part_hash(data)
        parts[name] = data
        return name

    template = card.chat_template
    small = ModelOffer(
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
    )
    return small, parts


def model_card(offer: ModelOffer, parts: dict[bytes, bytes]) -> ModelCard:
    """The whole card again. Raises `KeyError` if a part is missing."""
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
    )
