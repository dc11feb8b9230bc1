"""The table of all request fields, made from the records that decode them.

    python -m pdserve.protocols.fields_page [FILE]

prints the page, or writes it to FILE. The page cannot differ from the server: type and range come
from the schema, the note is the field's description, and the refused fields and those without
effect come from the tables that the decoder uses.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.protocols.anthropic_messages import COUNT_TOKENS, MESSAGES
from pdserve.protocols.completion_requests import ChatRequest
from pdserve.protocols.embeddings import EMBEDDING
from pdserve.protocols.ollama.requests import (
    OLLAMA_CHAT,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    OLLAMA_GENERATE,
    OLLAMA_SHOW,
)
from pdserve.protocols.request_decoder import CHAT, COMPLETION, DETOKENIZE, TOKENIZE, RequestDecoder
from pdserve.protocols.responses_api import RESPONSES
from pdserve.protocols.scoring import RERANK, SCORE
from pdserve.protocols.unsupported_fields import WITHOUT_EFFECT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["ENDPOINTS", "render_page"]

ENDPOINTS: Mapping[str, RequestDecoder[Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
    "/v1/embeddings": EMBEDDING,
    "/v1/rerank": RERANK,
    "/v1/score": SCORE,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
    "/api/chat": OLLAMA_CHAT,
    "/api/generate": OLLAMA_GENERATE,
    "/api/embed": OLLAMA_EMBED,
    "/api/embeddings": OLLAMA_EMBEDDINGS,
    "/api/show": OLLAMA_SHOW,
}
"""Decoders by path. `/route` takes the fields of the first two, `/v1/responses/input_tokens` those
of `/v1/responses`. `/v2/rerank` and `/rerank` are `/v1/rerank`, `/score` is `/v1/score`."""

_HEAD = """\
# Request fields

Every field of every request: what it takes, whether it is supported, refused or without effect,
and what it is for. Made from the schema by `python -m pdserve.protocols.fields_page`.

A *refused* field gives a 400 that says what to use instead. It is accepted with the values that ask
for nothing: `null`, and those listed here. A field with *no effect* is accepted and does not change
the answer. A field that is in no table is ignored, logged once and counted, or gives a 400 with
`--strict-api`; this is also true for fields of objects. `null` means the same as leaving a field
out.
"""
_IDLE = frozenset({"user"})
"""Fields of records that change nothing."""
_LONGEST = 60
_NAMES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false"}


def render_page() -> str:
    """The whole page in Markdown."""
    endpoints = [line for path in ENDPOINTS for line in _endpoint(path)]
    return "\n".join([_HEAD, *endpoints, *_objects()])


def _endpoint(path: str) -> Iterator[str]:
    decoder = ENDPOINTS[path]
    yield f"## `POST {path}`\n"
    yield "| field | takes | | |"
    yield "|---|---|---|---|"
    for name, described in _properties(decoder.record).items():
        status = "no effect" if name in _IDLE else "supported"
        yield f"| `{name}` | {_takes(described)} | {status} | {_note(name, described)} |"
    for name, refusal in sorted(decoder.refused.items()):
        neutral = ", ".join(f"`{_json(value)}`" for value in refusal.neutral)
        yield f"| `{name}` | {neutral} | refused | {refusal.remedy} |"
    for name in sorted(WITHOUT_EFFECT - set(_properties(decoder.record)) - set(decoder.refused)):
        yield f"| `{name}` | anything | no effect | |"
    yield ""


def _objects() -> Iterator[str]:
    """The section on records inside requests."""
    requests = [decoder.record for decoder in ENDPOINTS.values()]
    _, components = msgspec.json.schema_components(requests, ref_template="{name}")
    yield "## Objects\n"
    yield "Fields of the objects in requests; all of them are supported.\n"
    for record in sorted(components.keys() - {request.__name__ for request in requests}):
        described = components[record]
        fields = described.get("properties", {})
        if fields:
            yield f"**`{record}`**: {' '.join(described.get('description', '').split())}\n"
            yield "| field | takes | |"
            yield "|---|---|---|"
            for name, field in fields.items():
                yield f"| `{name}` | {_takes(field)} | {field.get('description', '')} |"
            yield ""


def _properties(record: type[msgspec.Struct]) -> dict[str, dict[str, Any]]:
    """A record's fields as JSON schema has them."""
    (schema,), components = msgspec.json.schema_components([record], ref_template="{name}")
    described: dict[str, dict[str, Any]] = components[schema["$ref"]]["properties"]
    return described


def _note(name: str, described: dict[str, Any]) -> str:
    """The field's description. Fields of the same name have the same meaning at all endpoints, so
    the description in `ChatRequest` serves for all."""
    own = described.get("description")
    if own is None and name in ChatRequest.__struct_fields__:
        own = _properties(ChatRequest)[name].get("description", "")
    return str(own or "").replace("|", "\\|")


def _takes(schema: dict[str, Any]) -> str:
    options = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    return " or ".join(dict.fromkeys(map(_one, options)))


def _one(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return f"`{schema['$ref']}`"
    if "enum" in schema:
        values = [f"`{value}`" for value in schema["enum"] if value is not None]
        return ", ".join(values) if len(", ".join(values)) <= _LONGEST * 2 else "a word"
    kind = schema.get("type")
    if kind == "array":
        inner = _takes(schema["items"]) if schema.get("items") else "anything"
        return f"list{_size(schema, 'Items')} of {inner}"
    if kind == "object":
        return f"object{_size(schema, 'Properties')}"
    if kind == "string":
        return f"text{_size(schema, 'Length')}"
    return _NAMES.get(str(kind), "anything") + _range(schema)


def _range(schema: dict[str, Any]) -> str:
    least = _bound(schema, "minimum", "≥", "exclusiveMinimum", ">")
    most = _bound(schema, "maximum", "≤", "exclusiveMaximum", "<")
    return " " + ", ".join(filter(None, (least, most))) if least or most else ""


def _bound(schema: dict[str, Any], key: str, sign: str, other: str, strict: str) -> str:
    for name, mark in ((key, sign), (other, strict)):
        value = schema.get(name)
        if value is not None and abs(value) < 2**31 - 1:
            return f"{mark} {value:g}"
    return ""


def _size(schema: dict[str, Any], what: str) -> str:
    least, most = schema.get(f"min{what}"), schema.get(f"max{what}")
    words = [f"≥ {least}" if least else "", f"≤ {most}" if most else ""]
    return f" ({', '.join(filter(None, words))})" if least or most else ""


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(render_page())
    else:
        sys.stdout.write(render_page())
