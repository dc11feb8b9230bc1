"""Fuzz target: schemas, expressions and grammars that answers are to fit.

    python -m tests.fuzz structures -max_total_time=60

Building a grammar of whatever a request holds ends with one of bounded length or in an
`InvalidRequest`; compiling it ends with one that an engine may have, or in another, and takes no
longer than it may.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import InvalidRequest
from pdserve.messages.grammar_limits import MAX_GRAMMAR
from pdserve.text.grammar import grammar_source
from pdserve.text.grammar.grammar_compiler import GrammarCompiler
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.fuzz.input import look_at_refusal
from tests.text import builders

if TYPE_CHECKING:
    from pdserve.text.grammar.grammar_source import GrammarSource

__all__ = ["close", "fuzz", "seeds"]

_KINDS: Final = ("schema", "regex", "grammar", "choice")


@functools.cache
def _process() -> GrammarCompiler:
    return GrammarCompiler()


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_bytes(builders.byte_level().to_str().encode())


def close() -> None:
    """End the process that compiles; the next input starts another."""
    if _process.cache_info().currsize:
        _process().close()
        _process.cache_clear()


def fuzz(data: bytes) -> None:
    """One input: a kind, and its text."""
    if not data:
        return
    try:
        source = _source(_KINDS[data[0] % len(_KINDS)], data[1:].decode(errors="replace"))
        if source is None:
            return
        assert len(source.text) <= MAX_GRAMMAR
        found = _process().compile(_tokenizer(), _tokenizer().vocab_size, source)
    except InvalidRequest as error:
        look_at_refusal(error)
        return
    assert found


def _source(kind: str, text: str) -> GrammarSource | None:
    if kind == "schema":
        try:
            schema: Any = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(schema, dict | bool):
            return None
        return grammar_source.from_schema(schema, "schema")
    if kind == "regex":
        return grammar_source.from_regex(text, "regex")
    if kind == "grammar":
        return grammar_source.from_grammar(text, "grammar")
    return grammar_source.from_choice(text.split("|"), "choice")


def seeds() -> list[bytes]:
    """Some that are good, and the ways in which others have made compilers suffer."""
    schemas: list[object] = [
        True,
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"anyOf": [{"type": "string", "pattern": "^a+$"}, {"enum": [1, None, "x"]}]},
        {"type": "integer", "multipleOf": 99999999},
        {"type": "string", "maxLength": 100000},
        {"type": "string", "pattern": "(a*)*(b|a)+"},
    ]
    texts = [
        (1, "[a-z]{2,5}(x|y)*"),
        (1, "(.*a){30}"),
        (2, 'start: "a" b\nb: /[0-9]+/'),
        (2, 'root ::= "a" root | ""'),
        (3, "yes|no|"),
    ]
    return [b"\0" + json.dumps(schema).encode() for schema in schemas] + [
        bytes([kind]) + text.encode() for kind, text in texts
    ]
