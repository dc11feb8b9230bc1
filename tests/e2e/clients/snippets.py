"""Reads the lines of configuration of docs/clients.md, which the tests run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "clients.md"
MODEL = "my-model"
PORT = 8000
"""What the page calls the model, and where its server listens."""

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_EXPORT = re.compile(r"^export (\w+)=(\S+)$", re.MULTILINE)


def sections() -> dict[str, str]:
    """The page's sections by their headings."""
    _, *parts = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    return {part.partition("\n")[0]: part for part in parts}


def snippet(section: str, language: str) -> str:
    """The block of a section in a language."""
    (found,) = [text for kind, text in _BLOCK.findall(sections()[section]) if kind == language]
    return found


def environ(section: str) -> dict[str, str]:
    """The variables that a section exports."""
    return dict(_EXPORT.findall(snippet(section, "sh")))
