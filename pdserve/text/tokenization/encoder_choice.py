"""Which of two encoders a tokenizer uses, and why. `fast_encoder.py` makes the choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["SLOW", "EncoderChoice"]


@dataclass(frozen=True, slots=True)
class EncoderChoice:
    """Says if the extension encodes the texts of a tokenizer, and if not, the reason."""

    fast: bool
    uncovered: str = ""
    """What the extension does not cover; empty if it covers everything."""
    difference: str = ""
    """A text to which it gives other ids, or its error; empty if there is none."""


SLOW: Final = EncoderChoice(fast=False)
"""The choice of a tokenizer before `choose_encoder`."""
