"""Bounds the work to parse Python literals, which some models write instead of JSON.

Python's own parser takes 5 us for each number, bracket or comma, forty times the cost of JSON, and
tool calls are parsed on the event loop. Strings cost next to nothing.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["MAX_STRUCTURE", "structure_size"]

MAX_STRUCTURE: Final = 8192
"""Most characters outside of strings that Python's parser gets at once."""
_STRINGS: Final = re.compile(
    r"""'[^'\\]*+(?:\\.[^'\\]*+)*+'?|"[^"\\]*+(?:\\.[^"\\]*+)*+"?""", re.DOTALL
)
"""An unclosed string extends to the end of the text, so that each string is looked at once."""


def structure_size(text: str) -> int:
    """Number of characters outside of strings; for a short text, the number of all."""
    return len(_STRINGS.sub("", text)) if len(text) > MAX_STRUCTURE else len(text)
