"""Keeps the text that people have written at the end of a result page."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["kept", "replaced"]


def kept(file: Path, heading: str) -> str:
    """Returns the page's text from this heading on, after an empty line; empty if it has none."""
    text = file.read_text() if file.exists() else ""
    _, found, after = text.partition(f"\n{heading}\n")
    return f"\n{heading}\n{after}" if found else ""


def replaced(file: Path, heading: str, section: str) -> str:
    """Returns the page with another text from this heading on; `section` begins with it."""
    text = file.read_text() if file.exists() else ""
    before = text.partition(f"\n{heading}\n")[0].rstrip("\n")
    return f"{before}\n\n{section}" if before else section
