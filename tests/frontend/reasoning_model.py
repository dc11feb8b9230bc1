"""A model that reasons and calls tools, for tests: its card, tokens of what it writes, and what a
client puts together from a stream."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as RawTokenizer

from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.frontend import support
from tests.text import builders
from tests.text.templates import QWEN

if TYPE_CHECKING:
    import random

    from pdserve.messages.card import ModelCard

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
END = 1


def _raw() -> RawTokenizer:
    raw = RawTokenizer.from_str(builders.byte_level().to_str())
    raw.add_special_tokens(list(MARKERS))
    return raw


_JSON = _raw().to_str().encode()
TOKENIZER = Tokenizer.from_bytes(_JSON)


def card(**changes: Any) -> ModelCard:
    """As Qwen's: markers are special tokens, the template knows of tools and thoughts."""
    fields: dict[str, Any] = {
        "tokenizer_json": _JSON,
        "vocab_size": TOKENIZER.vocab_size,
        "chat_template": QWEN,
        "tool_parser": "hermes",
        "reasoning_parser": "think",
    }
    return support.card(**fields | changes)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A function with these properties."""
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


WEATHER = tool("weather", city={"type": "string"})
CLOCK = tool("clock", zone={"type": "string"}, at={"type": "object"})


def call(name: str, **arguments: Any) -> str:
    """A call as the model writes it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def tokens(text: str, cuts: random.Random | None = None) -> list[int]:
    """The ids of `text`; with `cuts`, of its pieces, which makes other borders between tokens."""
    if cuts is None:
        return TOKENIZER.encode(text, add_special_tokens=False).tolist()
    places = sorted(cuts.sample(range(1, len(text)), min(len(text) - 1, cuts.randint(0, 40))))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    return [id for piece in pieces for id in TOKENIZER.encode(piece, add_special_tokens=False)]


def message_of(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """What a client makes of a stream: deltas added up field by field, calls by their index."""
    message: dict[str, Any] = {"content": None}
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                _add(message, calls, choice["delta"])
    if calls:
        message["tool_calls"] = [calls[number] for number in sorted(calls)]
    return message


def _add(message: dict[str, Any], calls: dict[int, dict[str, Any]], delta: dict[str, Any]) -> None:
    for name in ("role", "content", "reasoning", "reasoning_content"):
        if delta.get(name) is not None:
            message[name] = (message.get(name) or "") + delta[name]
    for part in delta.get("tool_calls", ()):
        number, function = part["index"], part["function"]
        if number not in calls:
            calls[number] = {
                "id": part["id"],
                "type": part["type"],
                "function": {"name": function["name"], "arguments": ""},
            }
        calls[number]["function"]["arguments"] += function.get("arguments", "")


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The same for two answers to one question, and without reasoning that there is none of."""
    plain = {name: value for name, value in message.items() if name != "refusal"}
    for name in ("reasoning", "reasoning_content"):
        if plain.get(name) is None:
            plain.pop(name, None)
    if "tool_calls" in plain:
        plain["tool_calls"] = [
            {name: value for name, value in one.items() if name != "id"}
            for one in plain["tool_calls"]
        ]
    return plain
