"""Formats whose reasoning stands in one block at the beginning, between two markers."""

from __future__ import annotations

from typing import Final

from pdserve.text.reasoning_parsers.base import MarkedReasoning

THINK: Final = MarkedReasoning("<think>", "</think>", any_of=("</think>", "<think>"))
"""DeepSeek-R1 and its likes, Qwen 3, QwQ, GLM, Kimi, MiniMax M2, Nemotron, OLMo 3."""
MISTRAL: Final = MarkedReasoning("[THINK]", "[/THINK]")
"""Magistral."""
GRANITE: Final = MarkedReasoning(
    "Here is my thought process:",
    "Here is my response:",
    other_starts=("Here's my thought process:",),
    other_ends=("Here's my response:",),
)
"""Granite 3.2."""
ERNIE45: Final = MarkedReasoning(
    "<think>",
    "</think>",
    frame=("<response>", "</response>"),
    marks=("</think>", "<response>"),
    foreign=("minimax", "<mm:think>"),
)
"""ERNIE 4.5 and Granite 3.3: the answer has markers, too."""
HUNYUAN_A13B: Final = MarkedReasoning(
    "<think>",
    "</think>",
    frame=("<answer>", "</answer>"),
    marks=("</think>", "<answer>", "<tool_responses>"),
)
"""Hunyuan A13B and its smaller likes."""
APERTUS: Final = MarkedReasoning("<|inner_prefix|>", "<|inner_suffix|>")
APRIEL: Final = MarkedReasoning(
    "Here are my reasoning steps:",
    "[BEGIN FINAL RESPONSE]",
    other_starts=("<thinking>",),
    other_ends=("</thinking>",),
    frame=("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),
)
"""Apriel 1.5 and 1.6."""
SEED_OSS: Final = MarkedReasoning("<seed:think>", "</seed:think>")
"""Seed-OSS. Its remarks on the thinking budget are part of the reasoning."""
MINIMAX_M3: Final = MarkedReasoning("<mm:think>", "</mm:think>")
HY_V3: Final = MarkedReasoning(
    "<think:opensource>",
    "</think:opensource>",
    other_starts=("<think>",),
    other_ends=("</think>",),
    any_of=("think:opensource>", "<think{}>"),
)
"""Hunyuan 3, whose template puts a suffix into its tags."""
LONGCAT: Final = MarkedReasoning("<longcat_think>", "</longcat_think>")
