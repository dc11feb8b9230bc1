"""Keeps text that takes long to encode off a thread that must not wait, as the event loop's.

Whether the extension encodes a text or leaves it to `tokenizers`, which takes up to fifty times as
long, is known only when it has seen the text. So work in place begins under a bound; what passes it
fails with `SlowText`, and the caller begins again in another thread. Encodes nothing.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["SlowText", "check_slow_texts", "run_in_place", "text_size"]

T = TypeVar("T")


class SlowText(Exception):
    """More text is left to `tokenizers` than this thread may encode."""


class _Bound(threading.local):
    """What each thread may encode."""

    chars: int | None = None
    """None: anything."""


_bound = _Bound()


def text_size(text: str) -> int:
    """Characters of a text; each counts three times where the text is not ASCII, since it takes
    about three times as long to encode."""
    return len(text) if text.isascii() else 3 * len(text)


def run_in_place(chars: int, function: Callable[[], T]) -> T:
    """Call a function, which may leave text of this size to `tokenizers`. Errors: `SlowText` if it
    has to leave more, and what `function` raises."""
    _bound.chars = chars
    try:
        return function()
    finally:
        _bound.chars = None


def check_slow_texts(texts: Iterable[str]) -> None:
    """Errors: `SlowText` if this thread may not encode so much by `tokenizers`."""
    chars = _bound.chars
    if chars is not None and sum(map(text_size, texts)) > chars:
        raise SlowText
