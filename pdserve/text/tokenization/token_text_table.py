"""Holds the text of each token id, in tables filled when ids are first used.

`tokenizer.json` describes one of three kinds of decoders:

    bytes    ByteLevel: a token is a run of bytes; the text is the UTF-8 decoding of all of them
    pieces   a token is a piece of text that depends only on being the first one, or a single byte
             of a run (ByteFallback); leading characters may be stripped from the whole
    window   anything else: a token's text is known only from decoding it with its neighbours

All sequences of a model share the tables; `detokenizer.py` has the state of a sequence. Filling an
entry is idempotent, so threads may share a table without a lock.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import tokenizers

DecoderKind = Literal["bytes", "pieces", "window"]

_ANCHOR = "a"
"""A token put before another one, so that the other one is not the first."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PER_TOKEN = {"Replace", "Metaspace", "WordPiece", "Strip"}


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What the detokenizers need to know about a decoder."""

    kind: DecoderKind
    byte_fallback: bool = False
    """Whether tokens `<0x00>` to `<0xFF>` stand for single bytes."""
    strip: str = ""
    """Character removed from the start of the whole text."""
    strip_count: int = 0
    """Maximum number of `strip` characters removed."""


class _File(msgspec.Struct):
    """The parts of `tokenizer.json` that are needed here."""

    decoder: dict[str, Any] | None = None


def decoder_shape(tokenizer_json: bytes) -> DecoderShape:
    """Read the decoder's description. Raises `msgspec.MsgspecError` for malformed JSON."""
    decoder = msgspec.json.decode(tokenizer_json, type=_File).decoder
    return _shape(_flatten(decoder))


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for child in decoder.get("decoders", ()) for step in _flatten(child)]


def _shape(steps: list[dict[str, Any]]) -> DecoderShape:
    types = [step.get("type") for step in steps]
    if types in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return DecoderShape("bytes")
    window = DecoderShape("window", byte_fallback="ByteFallback" in types)
    head, tail = _split(steps, types)
    byte_fallback = bool(tail) and tail[0].get("type") == "ByteFallback"
    if byte_fallback:
        tail = tail[1:]
    if not all(_is_per_token(step) for step in head):
        return window
    if byte_fallback and any(step.get("type") == "WordPiece" for step in head):
        # WordPiece puts a space before a token, so ByteFallback would not know a byte token.
        return window
    if not tail:
        return DecoderShape("pieces", byte_fallback)
    if tail[0].get("type") != "Fuse" or len(tail) > 2:
        return window
    if len(tail) == 1:
        return DecoderShape("pieces", byte_fallback)
    return _stripping(tail[1], byte_fallback) or window


def _split(
    steps: list[dict[str, Any]], types: Sequence[object]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split the decoder's steps into those that see single tokens and those from the first that
    sees several."""
    joints = [index for index, kind in enumerate(types) if kind in ("ByteFallback", "Fuse")]
    first = joints[0] if joints else len(steps)
    return steps[:first], steps[first:]


def _is_per_token(step: dict[str, Any]) -> bool:
    if step.get("type") == "Replace":
        return "String" in (step.get("pattern") or {})
    return step.get("type") in _PER_TOKEN


def _stripping(step: dict[str, Any], byte_fallback: bool) -> DecoderShape | None:
    content = step.get("content")
    left_only = step.get("type") == "Strip" and not step.get("stop")
    if not left_only or not isinstance(content, str) or len(content) != 1:
        return None
    return DecoderShape("pieces", byte_fallback, content, int(step.get("start") or 0))


def json_escape(text: str) -> bytes:
    """Encode `text` as UTF-8 inside a JSON string, without the quotes."""
    return msgspec.json.encode(text)[1:-1]


class TokenTextView:
    """Texts of a tokenizer's ids; hidden ids have the empty text.

    An entry of `texts` or `jsons` is None until it is first asked for. It stays None if the id has
    no text of its own: its bytes need their neighbours.
    """

    __slots__ = ("_pieces", "hidden", "jsons", "texts")

    def __init__(self, pieces: TokenTextTable, hidden: frozenset[int]) -> None:
        self._pieces = pieces
        self.hidden = hidden
        self.texts: list[str | None] = [None] * pieces.size
        self.jsons: list[bytes | None] = [None] * pieces.size

    def text(self, token_id: int) -> str | None:
        """The id's text when it is not the first one; None: it has none of its own."""
        if token_id >= self._pieces.size:
            return ""
        known = self.texts[token_id]
        return known if known is not None else self._fill(token_id)

    def json(self, token_id: int) -> bytes | None:
        """`text`, escaped for the inside of a JSON string."""
        text = self.text(token_id)
        if text is None:
            return None
        escaped = json_escape(text)
        if token_id < self._pieces.size:
            self.jsons[token_id] = escaped
        return escaped

    def _fill(self, token_id: int) -> str | None:
        text = "" if token_id in self.hidden else self._pieces.own_text(token_id)
        self.texts[token_id] = text
        return text


class TokenTextTable:
    """Text, bytes and escaped text of every id of one tokenizer.

    Ids at or above `size` have no text. Ids are never negative.
    """

    def __init__(
        self,
        raw: tokenizers.Tokenizer,
        shape: DecoderShape,
        size: int,
        special: frozenset[int],
    ) -> None:
        self.raw = raw
        self.size = size
        self.special = special
        self.shape = shape if _anchor_holds(raw) else replace(shape, kind="window")
        self.all = TokenTextView(self, frozenset())
        """View that shows all ids."""
        self.ordinary = TokenTextView(self, special)
        """View that hides special ids."""
        self._others: dict[frozenset[int], TokenTextView] = {}

    def table(self, skip_special: bool, keep: frozenset[int] = frozenset()) -> TokenTextView:
        """The view that hides special ids except `keep`, or none. A model needs few such sets; each
        one costs a table."""
        if not skip_special:
            return self.all
        if not keep:
            return self.ordinary
        table = self._others.get(keep)
        if table is None:
            table = self._others.setdefault(keep, TokenTextView(self, self.special - keep))
        return table

    def first_text(self, token_id: int) -> str:
        """The id's text when it is the first one; only for kind `pieces`, never for a byte."""
        token = self.raw.id_to_token(token_id)
        if token is None:
            return ""
        # The start of the whole text is stripped later, so a first token is like any other.
        if self.shape.strip_count:
            return self._later(token)
        return self._join([token])

    def raw_bytes(self, token_id: int) -> bytes:
        """The bytes of an id by itself; also of special ones."""
        token = self.raw.id_to_token(token_id) if token_id < self.size else None
        if token is None:
            return b""
        if self.shape.kind == "bytes":
            return byte_level_bytes(token)
        byte = self.byte_of(token)
        if byte is not None:
            return bytes((byte,))
        return self._later(token).encode("utf-8", "replace")

    def byte_of(self, token: str) -> int | None:
        """The byte that a byte-fallback token stands for."""
        match = _BYTE_TOKEN.fullmatch(token) if self.shape.byte_fallback else None
        return int(match[1], 16) if match else None

    def decode(self, token_ids: list[int]) -> str:
        """The library's decode of the ids, none hidden; empty where the library itself fails."""
        try:
            return self.raw.decode(token_ids, skip_special_tokens=False)
        except BaseException as error:
            if not is_panic(error):
                raise
            # One cause is a decoder that strips the end of an empty text.
            return ""

    def exists(self, token_id: int) -> bool:
        """Return whether the vocabulary has the id."""
        return token_id < self.size and self.raw.id_to_token(token_id) is not None

    def content(self, token_id: int) -> str:
        """The token as written in the vocabulary; empty for an unknown id."""
        return (self.raw.id_to_token(token_id) or "") if token_id < self.size else ""

    def own_text(self, token_id: int) -> str | None:
        """The id's text when it is not the first one; None: it has none of its own."""
        token = self.raw.id_to_token(token_id)
        if token is None:
            return ""
        if self.shape.kind == "bytes":
            try:
                return byte_level_bytes(token).decode()
            except UnicodeDecodeError:
                return None
        return None if self.byte_of(token) is not None else self._later(token)

    def _later(self, token: str) -> str:
        return self._join([_ANCHOR, token])[len(_ANCHOR) :]

    def _join(self, tokens: list[str]) -> str:
        decoder = self.raw.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(tokens)


def _anchor_holds(raw: tokenizers.Tokenizer) -> bool:
    """Whether the decoder leaves the anchor unchanged; otherwise this file does not understand
    it."""
    return raw.decoder is None or raw.decoder.decode([_ANCHOR]) == _ANCHOR


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of the library's Rust code, which is no `Exception`."""
    return type(error).__name__ == "PanicException"


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's mapping of printable characters to bytes; printable bytes stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_LEVEL_ALPHABET = _byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; a token in another form stands for its own UTF-8."""
    try:
        return bytes(map(BYTE_LEVEL_ALPHABET.__getitem__, token))
    except KeyError:
        return token.encode("utf-8", "replace")
