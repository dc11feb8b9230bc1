"""Bounds of what a chat template may take. They are known without the template language."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TemplateLimits"]


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Limits of one rendering. Real templates use less than a hundredth of them."""

    source_chars: int = 512 * 1024
    """Most characters of the template itself; compiling is linear in it."""
    output_chars: int = 64 * 2**20
    """Most characters of the rendered prompt."""
    work_chars: int = 256 * 2**20
    """Most characters made while rendering, intermediate strings included: the bound on memory."""
    steps: int = 5_000_000
    """Most loop iterations, calls and operators."""
    seconds: float = 5.0
    """Longest wall-clock time, checked at every step."""
