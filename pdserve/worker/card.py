"""Builds the model card that frontends serve by, from a checkpoint and the loaded engine.

Reads only small JSON files, never weights. Reading blocks for some milliseconds, or for seconds
where a `tekken.json` has to be converted: call it in a thread. It does not interpret the chat
template or the tokenizer; frontends do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pdserve.errors import ConfigError
from pdserve.messages.card import GenerationDefaults, ModelCard
from pdserve.text.reasoning_parsers import detect_reasoning_format as detect_reasoning
from pdserve.text.tokenization.tekken import from_tekken
from pdserve.text.tokenization.tokenizer_config import (
    parse_tokenizer_config,
    with_chat_templates,
    with_special_tokens,
)
from pdserve.text.tool_parsers import detect_tool_format as detect_tools
from pdserve.worker.pooling import (
    PoolerConfig,
    PoolingOption,
    read_pooler_config,
    read_score_activation,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.messages.engine import EngineCapabilities


N = TypeVar("N", int, float)

_INT32_MAX = 2**31 - 1
_LONGEST_TEMPLATE = 1 << 20
"""Characters of an operator's chat template, so that a wrong file does not fill memory."""
_MAX_TEMPLATES = 32
"""Most named chat templates beside the usual one; checkpoints have one to three."""


class _Added(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    """The part of `tokenizer.json` that is read here; the rest is skipped."""

    added_tokens: list[_Added] = []


class _TemplateFile(msgspec.Struct):
    """`chat_template.json`: a file that holds only the chat template."""

    chat_template: str


class _Recommended(msgspec.Struct):
    """The part of `generation_config.json` that pdserve follows, with the keys of that file."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_token_id: int | list[int] | None = None


def read_card(
    path: Path,
    names: tuple[str, ...],
    capabilities: EngineCapabilities,
    created: int | None = None,
    *,
    tool_parser: str = "auto",
    reasoning_parser: str = "auto",
    pooling: PoolingOption = "auto",
    chat_template: str = "",
) -> ModelCard:
    """Returns the card of the checkpoint in `path`, served under `names` (the name, then aliases).

    Args: the parsers are names from `text.tool_parsers` and `text.reasoning_parsers`, `none`, or
    `auto` to detect them in the chat template; `pooling` is one of the options of `worker.pooling`;
    `chat_template` is a file whose template replaces the default one.
    Errors: `ConfigError` names the file that is missing or broken.
    """
    vectors = _vectors(path, pooling, capabilities)
    tokenizer, config = _tokenizer_files(path)
    recommended = _recommended(path / "generation_config.json")
    template = read_template(chat_template) if chat_template else _chat_template(path, config)
    return ModelCard(
        name=names[0],
        aliases=names[1:],
        max_model_len=capabilities.max_model_len,
        vocab_size=capabilities.vocab_size,
        block_size=capabilities.block_size,
        eos_token_ids=_eos_ids(path, tokenizer, config, recommended, capabilities),
        tokenizer_json=tokenizer,
        tokenizer_config_json=config,
        chat_template=template,
        defaults=_defaults(recommended),
        engine=capabilities.engine,
        dtype=capabilities.dtype,
        compat_hash=capabilities.compat_hash,
        features=tuple(
            name for name in capabilities.features if name != "embeddings" or vectors.pooling
        ),
        pooling=vectors.pooling,
        normalize=vectors.normalize,
        dimensions=vectors.dimensions,
        image=capabilities.image,
        embedding_size=capabilities.embedding_size if vectors.pooling else 0,
        num_labels=capabilities.num_labels,
        score_activation=read_score_activation(path) if capabilities.num_labels == 1 else "",
        created=int(time.time()) if created is None else created,
        tool_parser=_chosen(tool_parser, detect_tools, _tool_template(config) or template),
        reasoning_parser=_chosen(reasoning_parser, detect_reasoning, template),
    )


def shows_tools(card: ModelCard) -> bool:
    """Whether the chat template tells the model of a request's tools, as far as its text shows."""
    other = _tool_template(card.tokenizer_config_json)
    return "tools" in (other or card.chat_template or "")


def read_template(file: str) -> str:
    """The chat template in a file of the operator's. Errors: `ConfigError`."""
    try:
        with Path(file).open(encoding="utf-8") as opened:
            text = opened.read(_LONGEST_TEMPLATE + 1)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--chat-template={file}: the file cannot be read: {error}") from None
    if not text.strip():
        raise ConfigError(f"--chat-template={file}: the file is empty")
    if len(text) > _LONGEST_TEMPLATE:
        raise ConfigError(
            f"--chat-template={file}: the file has more than {_LONGEST_TEMPLATE} characters: name "
            "a chat template in Jinja"
        )
    return text


def _chosen(name: str, detect: Callable[[str | None], str], template: str | None) -> str:
    if name == "auto":
        return detect(template)
    return "" if name == "none" else name


def _tool_template(tokenizer_config: bytes) -> str | None:
    """The separate chat template that some models have for requests with tools."""
    return parse_tokenizer_config(tokenizer_config).chat_templates.get("tool_use")


def _vectors(path: Path, asked: PoolingOption, capabilities: EngineCapabilities) -> PoolerConfig:
    """Errors: `ConfigError` if embeddings are configured but the engine cannot compute them."""
    if capabilities.num_labels and asked == "auto":
        # Its sentence-transformers files are those of a classifier.
        return PoolerConfig()
    if "embeddings" in capabilities.features:
        return read_pooler_config(path, asked)
    if asked in ("auto", "none"):
        return PoolerConfig()
    raise ConfigError(
        f"--pooling={asked}: engine {capabilities.engine!r} cannot compute embeddings"
    )


def _tokenizer_files(path: Path) -> tuple[bytes, bytes]:
    """Contents of `tokenizer.json` and its configuration, converted from `tekken.json` if
    needed."""
    config = _optional(path / "tokenizer_config.json")
    tekken = _optional(path / "tekken.json")
    if tekken is None or (path / "tokenizer.json").is_file():
        return _required(path / "tokenizer.json"), _with_other_files(path, config or b"{}")
    tokenizer, made = from_tekken(tekken)
    return tokenizer, _with_other_files(path, config or made)


def _with_other_files(path: Path, config: bytes) -> bytes:
    """The tokenizer's configuration with what other files say in its place."""
    special_tokens = _optional(path / "special_tokens_map.json")
    if special_tokens is not None:
        config = with_special_tokens(config, special_tokens)
    files = sorted((path / "additional_chat_templates").glob("*.jinja"))
    if len(files) > _MAX_TEMPLATES:
        raise ConfigError(f"additional_chat_templates holds more than {_MAX_TEMPLATES} templates")
    if files or (path / "chat_template.jinja").exists():
        config = with_chat_templates(config, {file.stem: _text(file) for file in files})
    return config


def _chat_template(path: Path, tokenizer_config: bytes) -> str | None:
    """The chat template. A file of its own wins over the entry in the tokenizer's configuration."""
    if (path / "chat_template.jinja").exists():
        return _text(path / "chat_template.jinja")
    older = _optional(path / "chat_template.json")
    if older is not None:
        try:
            return msgspec.json.decode(older, type=_TemplateFile).chat_template
        except msgspec.MsgspecError as error:
            raise ConfigError(f"chat_template.json is not valid: {error}") from None
    templates = parse_tokenizer_config(tokenizer_config).chat_templates
    return templates.get("default")


def _defaults(recommended: _Recommended) -> GenerationDefaults:
    """Recommended sampling defaults; drops values that a request could not use either."""
    return GenerationDefaults(
        temperature=_within(recommended.temperature, 0.0, 2.0),
        top_p=_within(recommended.top_p or None, 0.0, 1.0),
        top_k=_within(recommended.top_k, 0, _INT32_MAX),
        min_p=_within(recommended.min_p, 0.0, 1.0),
        repetition_penalty=_within(recommended.repetition_penalty or None, 0.0, 100.0),
        max_tokens=_within(recommended.max_new_tokens, 1, _INT32_MAX),
    )


def _within(value: N | None, least: N, most: N) -> N | None:
    return value if value is not None and least <= value <= most else None


def _eos_ids(
    path: Path,
    tokenizer: bytes,
    tokenizer_config: bytes,
    recommended: _Recommended,
    capabilities: EngineCapabilities,
) -> tuple[int, ...]:
    """Every token id that any file names as end of sequence: the files of a checkpoint often
    differ.
    """
    ids = [*_as_list(recommended.eos_token_id), *capabilities.eos_token_ids]
    ids += _as_list(_config_eos(path))
    end = parse_tokenizer_config(tokenizer_config).special_tokens.get("eos_token")
    ids += [token.id for token in _added_tokens(tokenizer) if token.content == end]
    return tuple(dict.fromkeys(id for id in ids if 0 <= id < capabilities.vocab_size))


def _config_eos(path: Path) -> Any:
    """End-of-sequence ids in `config.json`, also where multimodal models nest them."""
    try:
        config = json.loads(_required(path / "config.json"))
    except ValueError as error:
        raise ConfigError(f"{path / 'config.json'} is not valid JSON: {error}") from None
    if not isinstance(config, Mapping):
        raise ConfigError(f"{path / 'config.json'} does not hold a JSON object")
    inner = config.get("text_config") or {}
    return config.get("eos_token_id", inner.get("eos_token_id"))


def _added_tokens(tokenizer: bytes) -> list[_Added]:
    try:
        return msgspec.json.decode(tokenizer, type=_TokenizerFile).added_tokens
    except msgspec.MsgspecError as error:
        raise ConfigError(f"tokenizer.json is not valid: {error}") from None


def _recommended(path: Path) -> _Recommended:
    content = _optional(path)
    if content is None:
        return _Recommended()
    try:
        return msgspec.json.decode(content, type=_Recommended)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not valid: {error}") from None


def _as_list(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [id for id in values if isinstance(id, int)]


def _required(path: Path) -> bytes:
    content = _optional(path)
    if content is None:
        raise ConfigError(f"model directory {str(path.parent)!r} has no {path.name}")
    return content


def _text(path: Path) -> str:
    try:
        return _required(path).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None


def _optional(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
