"""Bounds the work to parse Python literals, which some models write instead of JSON.

Python's own parser takes 5 us for each number, bracket or comma, forty times the cost of JSON, and
tool calls are parsed on the event loop. Strings cost next to nothing.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["MAX_STRUCTURE", "structure_size"]

MAX_STRUCTURE: Final = 8192
"""Characters outside of strings that are read as Python at once."""
_STRINGS: Final = re.compile(
    r"""'[^'\\]*+(?:\\.[^'\\]*+)*+'?|"[^"\\]*+(?:\\.[^"\\]*+)*+"?""", re.DOTALL
)
"""A string that never ends reaches to the end of the text, so that each is looked at once."""


def structure_size(text: str) -> int:
    """Characters outside of strings; of a text that is short anyway, all of them."""
    return len(_STRINGS.sub("", text)) if len(text) > MAX_STRUCTURE else len(text)
