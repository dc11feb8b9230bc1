"""Remembers how parts of prompts were tokenised, so that a conversation is tokenised once.

Special tokens cut a text before anything else looks at it, and what stands between two of them is
tokenised by itself. So the turns of a chat, which templates set apart by such tokens, can be taken
from memory one by one: a second request with the same system prompt, document or history encodes
only what is new.

`plan_cuts` says where a tokenizer may be cut without changing an id, and gives up (None) wherever
that is not certain: tokens that eat the whitespace beside them or only match whole words, and
pre-tokenizers that treat the very first word of a text in another way.

The memory is bounded by tokens and forgets what was used longest ago. Threads may share it.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import tokenizers

__all__ = ["SegmentCache", "plan_cuts"]

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
"""Pre-tokenizers that see nothing beyond the piece they are given."""
_WORTH: Final = 64
"""Characters from which on a piece is remembered: a shorter one is encoded as fast as found."""


def plan_cuts(raw: tokenizers.Tokenizer) -> dict[str, int] | None:
    """Content -> id of the tokens at which a text may be cut; None: nowhere."""
    added = raw.get_added_tokens_decoder()
    if any(token.lstrip or token.rstrip or token.single_word for token in added.values()):
        return None
    described: dict[str, Any] = json.loads(raw.to_str())
    if described["model"].get("dropout") or not _sees_only_its_piece(described["pre_tokenizer"]):
        return None
    cuts = {token.content: id for id, token in added.items() if not token.normalized}
    return cuts or None


def _sees_only_its_piece(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return True
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return all(map(_sees_only_its_piece, pre_tokenizer["pretokenizers"]))
    if kind == "Metaspace":
        return pre_tokenizer.get("prepend_scheme") in ("always", "never")
    return kind in _SAFE


class SegmentCache:
    """Ids of pieces between special tokens."""

    def __init__(self, cuts: dict[str, int], max_tokens: int = 512 * 1024) -> None:
        """`max_tokens` takes about 40 bytes each."""
        # The library takes the leftmost match and of those the longest, as this does.
        longest_first = sorted(cuts, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._ids = cuts
        self._max_tokens = max_tokens
        self._known: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._tokens = 0
        self._lock = Lock()
        self.hits = 0
        """Characters that were not tokenised again."""

    def __len__(self) -> int:
        """Tokens in memory."""
        return self._tokens

    def encode(self, text: str, encode: Callable[[Sequence[str]], list[list[int]]]) -> list[int]:
        """Ids of `text`, as `encode` would give them for the whole; it is asked for new pieces."""
        pieces = self._cut.split(text)  # pieces at even places, special tokens at odd ones
        found: dict[str, Sequence[int]] = {}
        with self._lock:
            for piece in pieces[::2]:
                known = self._known.get(piece) if len(piece) >= _WORTH else None
                if known is not None:
                    self._known.move_to_end(piece)
                    found[piece] = known
                    self.hits += len(piece)
        missing = [piece for piece in dict.fromkeys(pieces[::2]) if piece and piece not in found]
        if missing:
            found.update(zip(missing, encode(missing), strict=True))
            self._remember(missing, found)
        ids: list[int] = []
        for place, piece in enumerate(pieces):
            if place % 2:
                ids.append(self._ids[piece])
            elif piece:
                ids.extend(found[piece])
        return ids

    def _remember(self, pieces: Sequence[str], found: dict[str, Sequence[int]]) -> None:
        with self._lock:
            for piece in pieces:
                ids = tuple(found[piece])
                if len(piece) < _WORTH or len(ids) > self._max_tokens or piece in self._known:
                    continue
                self._known[piece] = ids
                self._tokens += len(ids)
            while self._tokens > self._max_tokens:
                _, oldest = self._known.popitem(last=False)
                self._tokens -= len(oldest)
