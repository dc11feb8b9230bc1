"""Reads special tokens and chat templates from `tokenizer_config.json`.

A checkpoint may have both in files of their own; as in transformers, they replace the entries here.
What serving needs is kept; the rest differs between releases of the library that writes the file.
`add_bos_token` and similar keys have no effect next to a tokenizer.json. This file does not know
the vocabulary; `tokenizer.py` does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAMES_OF_OWN = ("extra_special_tokens", "model_specific_special_tokens")
_LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """The part of `tokenizer_config.json` that pdserve reads."""

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """`bos_token`, `eos_token` ... -> content, under the names that chat templates use."""
    extra_special_tokens: tuple[str, ...] = ()
    """Contents of further special tokens, unless tokenizer.json defines them otherwise."""
    added_tokens: tuple[Mapping[str, Any], ...] = ()
    """Entries of `added_tokens_decoder` by id, each with its `id`."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """Template sources by name; a single one is called `default`."""


def parse_tokenizer_config(content: bytes) -> TokenizerConfig:
    """Parse the file's content. Raises `ConfigError` if it is malformed."""
    raw = _object(content or b"{}", "tokenizer_config.json")
    return TokenizerConfig(
        special_tokens=_named_tokens(raw),
        extra_special_tokens=_extra_tokens(raw),
        added_tokens=_added_tokens(raw),
        chat_templates=_templates(raw.get("chat_template")),
    )


def with_special_tokens(content: bytes, special_tokens_map: bytes) -> bytes:
    """Return the file with the entries of `special_tokens_map.json`, which older checkpoints have.

    A file that lists its added tokens is newer, and returned as it is. Raises `ConfigError`.
    """
    raw = _object(content, "tokenizer_config.json")
    if "added_tokens_decoder" in raw:
        return content
    return msgspec.json.encode(raw | _object(special_tokens_map, "special_tokens_map.json"))


def with_chat_templates(content: bytes, templates: Mapping[str, str]) -> bytes:
    """Return the file with these templates, by name, and of its own only the default one."""
    raw = _object(content, "tokenizer_config.json")
    kept = _templates(raw.get("chat_template"))
    named = {name: source for name, source in kept.items() if name == "default"} | {**templates}
    entries = [{"name": name, "template": source} for name, source in named.items()]
    return msgspec.json.encode(raw | {"chat_template": entries})


def _object(content: bytes, file: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{file} is not a JSON object: {error}") from None


def _content(token: object) -> str | None:
    """Content of a token, which is written as a string or as an object with matching flags."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _named_tokens(raw: Mapping[str, Any]) -> dict[str, str]:
    named = {name: _content(raw[name]) for name in raw if name.endswith("_token")}
    # Models have names of their own, such as `image_token`, here or beside `bos_token`.
    for key in _NAMES_OF_OWN:
        if isinstance(extra := raw.get(key), dict):
            named |= {str(name): _content(token) for name, token in extra.items()}
    return {name: content for name, content in named.items() if content is not None}


def _extra_tokens(raw: Mapping[str, Any]) -> tuple[str, ...]:
    lists = [raw[name] for name in _LISTS if isinstance(raw.get(name), list)]
    contents = [_content(token) for tokens in lists for token in tokens]
    return tuple(dict.fromkeys(content for content in contents if content is not None))


def _added_tokens(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    entries = raw.get("added_tokens_decoder") or {}
    try:
        tokens = [{**entry, "id": int(token_id)} for token_id, entry in entries.items()]
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(
            "tokenizer_config.json: added_tokens_decoder must map ids to objects"
        ) from None
    return tuple(sorted(tokens, key=lambda token: token["id"]))


def _templates(value: object) -> dict[str, str]:
    """Parse one template as a string, or several as a list of `{"name": ..., "template": ...}`."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        templates = {entry["name"]: entry["template"] for entry in value}  # type: ignore[attr-defined]
    except (TypeError, KeyError):
        raise ConfigError("tokenizer_config.json: chat_template has an unknown form") from None
    if not all(isinstance(part, str) for pair in templates.items() for part in pair):
        raise ConfigError("tokenizer_config.json: chat_template names and sources must be strings")
    return templates
