"""Caches the token ids of prompt segments, so that a conversation is tokenised only once.

Special tokens split a text first, and each segment between them is tokenised alone. So the turns of
a chat can come from the cache, and a request with a known system prompt, document or history
encodes only new text. `plan_cuts` finds the safe special tokens; it returns None where cuts could
change an id. Bounded by tokens, entries and characters (LRU). A segment is found only under its own
salt: otherwise response times would tell one tenant what another has sent. Thread-safe.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from pdserve.token_ids import TokenIds, token_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import tokenizers

__all__ = ["WORTH", "WORTH_FAST", "TokenizationCache", "plan_cuts"]

_SAFE: Final = {
    "BertPreTokenizer",
    "ByteLevel",
    "Digits",
    "Punctuation",
    "Split",
    "UnicodeScripts",
    "Whitespace",
    "WhitespaceSplit",
}
"""Pre-tokenizers that look only at the segment they get."""
_CHARS_PER_TOKEN: Final = 16
"""Most characters per cached token, on average; four are usual."""
WORTH: Final = 64
"""Shortest segment, in characters, that is cached; `tokenizers` encodes a shorter one as fast as it
is found."""
WORTH_FAST: Final = 16 * 1024
"""The same where the extension encodes (bench/results/encode_text.md)."""


def plan_cuts(raw: tokenizers.Tokenizer) -> dict[str, int] | None:
    """Content -> id of the special tokens at which a text may be cut; None if cuts are not safe."""
    added = raw.get_added_tokens_decoder()
    if any(token.lstrip or token.rstrip or token.single_word for token in added.values()):
        return None
    if getattr(raw.model, "dropout", None) or not _sees_only_its_piece(_pre_tokenizer(raw)):
        return None
    cuts = {token.content: id for id, token in added.items() if not token.normalized}
    return cuts or None


def _pre_tokenizer(raw: tokenizers.Tokenizer) -> dict[str, Any] | None:
    """The description of the pre-tokenizer alone; that of the tokenizer has the vocabulary."""
    if raw.pre_tokenizer is None:
        return None
    described: dict[str, Any] = json.loads(raw.pre_tokenizer.__getstate__())
    return described


def _sees_only_its_piece(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return True
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return all(map(_sees_only_its_piece, pre_tokenizer["pretokenizers"]))
    if kind == "Metaspace":
        return pre_tokenizer.get("prepend_scheme") in ("always", "never")
    return kind in _SAFE


class TokenizationCache:
    """LRU cache of the token ids of segments between special tokens."""

    def __init__(
        self,
        cuts: dict[str, int],
        max_tokens: int = 512 * 1024,
        max_entries: int = 16 * 1024,
        shortest: int = WORTH,
    ) -> None:
        """A token takes 4 bytes; an entry takes 300 and its text, at most `_CHARS_PER_TOKEN`
        characters for each of `max_tokens` in all."""
        self.shortest = shortest
        """Fewest characters of a segment that is cached."""
        # Like the library, this takes the leftmost match, and of those the longest.
        longest_first = sorted(cuts, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._ids = cuts
        self._max_tokens = max_tokens
        self._max_entries = max_entries
        self._max_chars = _CHARS_PER_TOKEN * max_tokens
        self._known: OrderedDict[tuple[str, str], TokenIds] = OrderedDict()
        """Token ids by salt and text."""
        self._tokens = 0
        self._chars = 0
        self._lock = Lock()
        self.hits = 0
        """Number of characters found in the cache."""

    def __len__(self) -> int:
        """Return the number of cached tokens."""
        return self._tokens

    @property
    def entries(self) -> int:
        """Return the number of cached segments."""
        return len(self._known)

    def encode(
        self, text: str, encode: Callable[[Sequence[str]], list[TokenIds]], salt: str = ""
    ) -> TokenIds:
        """Return the ids of `text`, the same as `encode` returns for the whole; `encode` is called
        only for segments not cached under this salt."""
        # Even indices are segments, odd ones special tokens.
        pieces = self._cut.split(text)
        found: dict[str, TokenIds] = {}
        with self._lock:
            for piece in pieces[::2]:
                known = self._known.get((salt, piece)) if len(piece) >= self.shortest else None
                if known is not None:
                    self._known.move_to_end((salt, piece))
                    found[piece] = known
                    self.hits += len(piece)
        missing = [piece for piece in dict.fromkeys(pieces[::2]) if piece and piece not in found]
        if missing:
            found.update(zip(missing, encode(missing), strict=True))
            self._remember(missing, found, salt)
        ids = token_ids()
        for place, piece in enumerate(pieces):
            if place % 2:
                ids.append(self._ids[piece])
            elif piece:
                ids.extend(found[piece])
        return ids

    def _remember(self, pieces: Sequence[str], found: dict[str, TokenIds], salt: str) -> None:
        with self._lock:
            for piece in pieces:
                ids = found[piece]
                too_large = len(ids) > self._max_tokens or len(piece) > self._max_chars
                if len(piece) < self.shortest or too_large or (salt, piece) in self._known:
                    continue
                self._known[salt, piece] = ids
                self._tokens += len(ids)
                self._chars += len(piece)
            while self._is_full():
                (_, text), oldest = self._known.popitem(last=False)
                self._tokens -= len(oldest)
                self._chars -= len(text)

    def _is_full(self) -> bool:
        return (
            self._tokens > self._max_tokens
            or self._chars > self._max_chars
            or len(self._known) > self._max_entries
        )
