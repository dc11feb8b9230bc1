"""Defines the model card: everything a frontend must know to serve a worker's model.

A frontend never opens the model's directory. Tokenizer, template, limits and defaults come in the
card, so a frontend can serve a model that its own machine has never seen.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pdserve.messages.lora import LoraSummary
from pdserve.messages.request import Pooling

EXACT_PREFIX = "exact:"
"""Prefix of an entry of `ModelCard.features`, before the name of the kernels. Workers with the same
kernels compute bit-identical tokens and logprobs for a request, whatever else is in the batch.
Without it, near ties between two candidate tokens may fall either way.
"""

CLOSE_PREFIX = "close:"
"""Prefix of an entry of `ModelCard.features`, before a data type. Workers with the same entry
compute logits that differ by at most 1e-4, so they choose the same token wherever the scores of the
two best candidates differ by more than 1e-3. A worker that is exact may have it, too.
"""

ScoreActivation = Literal["", "sigmoid", "identity"]

NEARLY = "nearly"
"""Entry of `ModelCard.features` of an engine that continues a migrated request only nearly as it
would have gone on, where the request draws tokens or has penalties. Greedy requests continue as
elsewhere.
"""


class ImagePlaceholder(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How a prompt says where its images are, and how many there may be."""

    token: int
    """The token in a prompt that stands for one image."""
    text: str
    """The text that stands for one image, for chat templates that take no parts."""
    most: int
    """Most images per prompt."""


class GenerationDefaults(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What `generation_config.json` recommends; a request's own fields win. None: no opinion."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


class ModelCard(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One served model."""

    name: str
    """The id in `/v1/models`."""
    aliases: tuple[str, ...] = ()
    max_model_len: int
    """Prompt and output tokens together, at most."""
    vocab_size: int
    """Rows of the output layer; ids at or above it do not exist."""
    block_size: int
    eos_token_ids: tuple[int, ...] = ()
    tokenizer_json: bytes
    """Content of `tokenizer.json`."""
    tokenizer_config_json: bytes = b"{}"
    """Content of `tokenizer_config.json`."""
    chat_template: str | None = None
    """None: the model has none, chat requests are refused."""
    defaults: GenerationDefaults = GenerationDefaults()
    engine: str = ""
    dtype: str = ""
    compat_hash: str = ""
    created: int = 0
    """Unix seconds, for `/v1/models`."""
    tool_parser: str = ""
    """Name in `text.tool_parsers` of the parser for the model's tool calls; empty: it makes
    none."""
    reasoning_parser: str = ""
    """Name in `text.reasoning_parsers` of the parser for its reasoning; empty: it marks none."""
    pooling: Pooling = ""
    """How a text becomes an embedding; empty: the model makes none."""
    normalize: bool = False
    """Embeddings have length 1."""
    embedding_size: int = 0
    """Dimensions of an embedding."""
    features: tuple[str, ...] = ()
    """What its engine can beyond plain text: `grammar`, `thinking`, `bans`, `embeddings`, `lora`,
    `images`, `classify`; and what it promises for tokens: `EXACT_PREFIX` with the name of its
    kernels, `CLOSE_PREFIX` with its data type."""
    dimensions: tuple[int, ...] = ()
    """Sizes that embeddings may be cut to; 0 stands for every size below `embedding_size`. Empty: a
    shortened embedding is not meaningful.
    """
    loras: tuple[LoraSummary, ...] = ()
    """LoRA adapters of the model. Each is requested by its name, and served by this card."""
    num_labels: int = 0
    """Outputs of its classification head; 0: it has none. One output scores pairs of texts."""
    score_activation: ScoreActivation = ""
    """What turns a score's logit into the score."""
    image: ImagePlaceholder | None = None
    """Set with the feature `images`."""

    def lora(self, name: str) -> LoraSummary | None:
        """The adapter that `name` asks for; None: `name` is the model or an alias."""
        return next((one for one in self.loras if one.name == name), None)
