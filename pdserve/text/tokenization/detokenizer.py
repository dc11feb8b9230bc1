"""Converts token ids to text for one sequence, and shows only text that no later token can change.

For every tokenizer the increments and the final `flush` add up to the decode of all ids at once. A
character whose bytes are spread over several tokens appears with its last byte. Bytes that cannot
become a character turn into U+FFFD where a decode of the whole shows it. It knows neither stop
strings nor requests. One object belongs to one choice and is used by one thread at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from codecs import utf_8_decode
from typing import TYPE_CHECKING

from pdserve.text.tokenization.token_text_table import TokenTextTable, json_escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_BYTE_RUN = 64
"""Most bytes of a byte-fallback run that are held back. A run is shown when it ends, since one bad
byte spoils all of it. Past this length its complete characters are shown at once, so that a stream
in a script without spaces does not stall. Only then can the text differ from a decode of all ids,
which would lose those characters."""
_CONTEXT = 8
"""Ids that a window keeps when it is trimmed."""
_MAX_WINDOW = 32
"""Window length in ids above which it is trimmed."""
_MAX_RUN_WINDOW = 1024
"""Window length for trimming if it ends in a run of byte tokens, which cannot be cut."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(ABC):
    """Text of one sequence. Ids are >= 0; ids that the vocabulary lacks have no text."""

    __slots__ = ()

    @abstractmethod
    def feed(self, token_id: int) -> str:
        """Add an id; return the text that is final now, empty while text is held back."""

    @abstractmethod
    def flush(self) -> str:
        """End the sequence; return the text held back. Do not call `feed` afterwards."""

    def feed_many(self, token_ids: Iterable[int]) -> str:
        """Add several ids; return the joined text of `feed` for each."""
        feed = self.feed
        return "".join([feed(token_id) for token_id in token_ids])

    def feed_json(self, token_ids: Sequence[int]) -> bytes:
        """Like `feed_many`, but as UTF-8 escaped for the inside of a JSON string, without the
        quotes.

        The fast call for streams without stop strings: an ordinary id costs one look-up.
        """
        return json_escape(self.feed_many(token_ids))


def _is_half_surrogate(held: bytes) -> bool:
    """Whether no byte can make these a character. Codecs hold the first two bytes of a surrogate
    back for a mode in which it may pass."""
    return len(held) == 2 and held[0] == 0xED and held[1] >= 0xA0


class ByteLevelDetokenizer(Detokenizer):
    """Detokenizer for kind `bytes`. Holds back at most three bytes, of an unfinished character."""

    __slots__ = ("_held", "_jsons", "_pieces", "_table", "_texts")

    def __init__(
        self, pieces: TokenTextTable, skip_special_tokens: bool, keep: frozenset[int] = frozenset()
    ) -> None:
        self._pieces = pieces
        self._table = pieces.table(skip_special_tokens, keep)
        self._texts = self._table.texts
        self._jsons = self._table.jsons
        self._held = b""

    def feed(self, token_id: int) -> str:
        try:
            text = self._texts[token_id]
        except IndexError:
            return ""
        if text is None or self._held:
            return self._feed_slowly(token_id)
        return text

    def feed_json(self, token_ids: Sequence[int]) -> bytes:
        if not self._held:
            jsons = self._jsons
            try:
                if len(token_ids) == 1 and (escaped := jsons[token_ids[0]]) is not None:
                    return escaped
                return b"".join([jsons[token_id] for token_id in token_ids])  # type: ignore[misc]
            except (TypeError, IndexError):
                # An entry is not filled yet, or an id has no text of its own.
                for token_id in token_ids:
                    self._table.json(token_id)
        return json_escape(self.feed_many(token_ids))

    def flush(self) -> str:
        text, self._held = self._held.decode("utf-8", "replace"), b""
        return text

    def _feed_slowly(self, token_id: int) -> str:
        text = self._table.text(token_id)
        if text is not None and not self._held:
            return text
        if text == "":
            return ""
        data = self._held + self._pieces.raw_bytes(token_id)
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        if _is_half_surrogate(self._held):
            return text + self.flush()
        return text


class PieceDetokenizer(Detokenizer):
    """Detokenizer for kind `pieces`: a text per token, runs of byte tokens, a start to be
    stripped."""

    __slots__ = (
        "_after_special",
        "_first",
        "_glue",
        "_pieces",
        "_plain",
        "_run",
        "_strip_left",
        "_table",
        "_texts",
    )

    def __init__(
        self,
        pieces: TokenTextTable,
        skip_special_tokens: bool,
        glue_special_tokens: bool = False,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        self._pieces = pieces
        self._glue = glue_special_tokens and not skip_special_tokens
        self._table = pieces.table(skip_special_tokens, keep)
        self._texts = self._table.texts
        self._strip_left = pieces.shape.strip_count
        self._run = _ByteRun()
        self._first = True
        self._after_special = False
        self._plain = False

    def start_after(self, token_ids: Iterable[int]) -> None:
        """Continue the text of these ids. What follows is treated as the start of the text only if
        these ids have not passed it."""
        for token_id in token_ids:
            self._feed_slowly(token_id)
            if not (self._first or self._strip_left):
                break
        self._run = _ByteRun()
        self._after_special = False
        self._settle()

    def feed(self, token_id: int) -> str:
        if self._plain:
            try:
                text = self._texts[token_id]
            except IndexError:
                return ""
            if text is not None:
                return text
        return self._feed_slowly(token_id)

    def flush(self) -> str:
        return self._strip(self._run.end())

    def _feed_slowly(self, token_id: int) -> str:
        pieces = self._pieces
        special = token_id in pieces.special
        if token_id in self._table.hidden or not pieces.exists(token_id):
            return ""
        text = self._table.text(token_id)
        if text is None:
            out = self._run.extend(pieces.raw_bytes(token_id))
        else:
            out = self._run.end() + self._in_place(token_id, text, special)
        self._first = False
        self._after_special = special
        out = self._strip(out)
        self._settle()
        return out

    def _in_place(self, token_id: int, text: str, special: bool) -> str:
        if self._first:
            return self._pieces.first_text(token_id)
        if self._glue and special and self._after_special:
            return self._pieces.content(token_id)
        return text

    def _strip(self, text: str) -> str:
        strip = self._pieces.shape.strip
        while self._strip_left and text:
            if not text.startswith(strip):
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text

    def _settle(self) -> None:
        """Decide whether the next ordinary token's text can be taken from the table unchanged."""
        self._plain = not (self._first or self._strip_left or self._glue or self._run.open)


class _ByteRun:
    """Adjacent byte tokens: their text if together they are UTF-8, else one U+FFFD for each."""

    __slots__ = ("_broken", "_held", "_overlong", "open")

    def __init__(self) -> None:
        self.open = False
        self._held = b""
        self._broken = False
        self._overlong = False

    def extend(self, byte: bytes) -> str:
        self.open = True
        if self._broken:
            return _REPLACEMENT
        self._held += byte
        try:
            text, used = utf_8_decode(self._held, "strict", False)
        except UnicodeDecodeError:
            self._broken = True
            return self._all_replaced()
        self._overlong = self._overlong or len(self._held) >= MAX_BYTE_RUN
        if not self._overlong:
            return ""
        self._held = self._held[used:]
        return text

    def end(self) -> str:
        if not self.open:
            return ""
        self.open = self._broken = self._overlong = False
        try:
            text = self._held.decode()
        except UnicodeDecodeError:
            return self._all_replaced()
        self._held = b""
        return text

    def _all_replaced(self) -> str:
        count, self._held = len(self._held), b""
        return _REPLACEMENT * count


class WindowDetokenizer(Detokenizer):
    """Detokenizer for kind `window`: decodes the last few ids again with each new one and shows the
    added text.

    Correct for every decoder that only adds to the text and looks a few tokens back.
    """

    __slots__ = ("_glue", "_hidden", "_pieces", "_run", "_shown", "_window")

    def __init__(
        self,
        pieces: TokenTextTable,
        skip_special_tokens: bool,
        glue_special_tokens: bool = False,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        self._pieces = pieces
        self._hidden = pieces.table(skip_special_tokens, keep).hidden
        self._glue = glue_special_tokens and not skip_special_tokens
        self._window: list[int] = []
        self._shown = 0
        """Number of characters of the window's text that have been shown."""
        self._run = b""
        """Bytes of the byte tokens at the window's end, since text was last shown."""

    def start_after(self, token_ids: Sequence[int]) -> None:
        """Continue the text of these ids."""
        count = _CONTEXT
        self._window = self._shown_of(token_ids[-count:])
        while not self._decode() and count < len(token_ids):
            count *= 2
            self._window = self._shown_of(token_ids[-count:])
        self._shown = len(self._decode())

    def feed(self, token_id: int) -> str:
        if token_id in self._hidden or not self._pieces.exists(token_id):
            return ""
        content = self._pieces.content(token_id)
        glued = self._is_glued(token_id)
        byte = self._pieces.byte_of(content)
        self._run = b"" if byte is None else self._run + bytes((byte,))
        self._window.append(token_id)
        text = self._decode()
        if glued:
            self._shown = len(text)
            return content
        return "" if self._may_change(text) else self._show(text)

    def flush(self) -> str:
        return self._show(self._decode())

    def _shown_of(self, token_ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in token_ids if token_id not in self._hidden]

    def _decode(self) -> str:
        return self._pieces.decode(self._window)

    def _is_glued(self, token_id: int) -> bool:
        special = self._pieces.special
        before = self._window[-1] if self._glue and self._window else None
        return before in special and token_id in special

    def _may_change(self, text: str) -> bool:
        """Whether bytes at the end may still become a character, or spoil those before them."""
        if not self._run:
            unresolved = len(text) - len(text.rstrip(_REPLACEMENT))
            return 0 < unresolved < MAX_BYTE_RUN
        try:
            _, complete = utf_8_decode(self._run, "strict", False)
        except UnicodeDecodeError:
            return False
        return complete < len(self._run) or complete < MAX_BYTE_RUN

    def _show(self, text: str) -> str:
        out = text[self._shown :]
        self._shown = max(self._shown, len(text))
        if len(self._window) > (_MAX_RUN_WINDOW if self._run else _MAX_WINDOW):
            self._trim()
        self._run = b""
        return out

    def _trim(self) -> None:
        """Drop the ids at the start of the window, if the rest has text before the end."""
        kept = [] if self._run else self._window[-_CONTEXT:]
        text = self._pieces.decode(kept)
        if self._run or text.strip(_REPLACEMENT + " "):
            self._window = kept
            self._shown = len(text)


def make_detokenizer(
    pieces: TokenTextTable,
    *,
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
    prompt: Sequence[int] = (),
    keep: frozenset[int] = frozenset(),
) -> Detokenizer:
    """Make the detokenizer for a tokenizer's kind; arguments as for `Tokenizer.detokenizer`."""
    # Byte-level text depends neither on the tokens before it nor on special tokens beside it.
    if pieces.shape.kind == "bytes":
        return ByteLevelDetokenizer(pieces, skip_special_tokens, keep)
    glue = not spaces_between_special_tokens
    if pieces.shape.kind == "pieces":
        one = PieceDetokenizer(pieces, skip_special_tokens, glue, keep)
        one.start_after(prompt)
        return one
    other = WindowDetokenizer(pieces, skip_special_tokens, glue, keep)
    other.start_after(prompt)
    return other
