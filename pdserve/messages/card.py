"""What a worker says about the model it serves: all that a frontend must know to serve it.

A frontend never opens the model's directory: tokenizer, template, limits and defaults come in the
card, so a frontend can serve a model that its own machine has never seen.
"""

from __future__ import annotations

import msgspec

from pdserve.messages.request import Pooling


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
    """How the model writes calls of tools, by the name in `text.tools`; empty: it does not."""
    reasoning_parser: str = ""
    """How it marks its reasoning, by the name in `text.reasoning`; empty: it does not."""
    pooling: Pooling = ""
    """How a text becomes a vector; empty: the model makes none."""
    normalize: bool = False
    """Vectors have length 1."""
    embedding_size: int = 0
    """Numbers of a vector."""
    features: tuple[str, ...] = ()
    """What its engine can beyond plain text: `grammar`, `thinking`, `bans`, `embeddings`."""
    dimensions: tuple[int, ...] = ()
    """Sizes that vectors may be cut to; 0 stands for every size below `embedding_size`. Empty: they
    are worth nothing in part."""
