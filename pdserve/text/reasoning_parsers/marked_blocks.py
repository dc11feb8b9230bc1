"""Formats whose reasoning stands in one block at the beginning, between two markers."""

from __future__ import annotations

from typing import Final

from pdserve.text.reasoning_parsers.base import MarkedReasoning

THINK: Final = MarkedReasoning("<think>", "</think>")
"""DeepSeek-R1 and its likes, Qwen 3, QwQ, GLM, Kimi, MiniMax M2, Nemotron, OLMo 3."""
MISTRAL: Final = MarkedReasoning("[THINK]", "[/THINK]")
"""Magistral."""
