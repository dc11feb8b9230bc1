"""Separates a model's reasoning from its answer, in the format of each model family. No I/O."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final, cast

from pdserve.text.format_loader import load_format

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.text.reasoning_parsers.base import ReasoningFormat

__all__ = [
    "ALIASES",
    "REASONING_PARSERS",
    "REASONING_PARSER_GROUP",
    "detect_reasoning_format",
    "reasoning_format",
]

_MARKED: Final = "pdserve.text.reasoning_parsers.marked_blocks:"

_READ: Final[Mapping[str, str]] = {
    "harmony": "pdserve.text.reasoning_parsers.channels:HARMONY",
    "gemma4": "pdserve.text.reasoning_parsers.channels:GEMMA4",
    "kimi_k3": "pdserve.text.reasoning_parsers.channels:KIMI_K3",
    "mistral": f"{_MARKED}MISTRAL",
    "cohere_command3": "pdserve.text.reasoning_parsers.cohere:COHERE",
    "apertus": f"{_MARKED}APERTUS",
    "apriel": f"{_MARKED}APRIEL",
    "granite": f"{_MARKED}GRANITE",
    "ernie45": f"{_MARKED}ERNIE45",
    "hunyuan_a13b": f"{_MARKED}HUNYUAN_A13B",
    "seed_oss": f"{_MARKED}SEED_OSS",
    "minimax_m3": f"{_MARKED}MINIMAX_M3",
    "hy_v3": f"{_MARKED}HY_V3",
    "longcat": f"{_MARKED}LONGCAT",
    "think": f"{_MARKED}THINK",
}

ALIASES: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            *("deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek_v4", "qwen3", "glm45"),
            *("glm47", "kimi_k2", "ling3", "mimo", "minimax_m2", "nemotron_v3", "olmo3"),
            *("poolside_v1", "step3", "step3p5"),
        ),
        "think",
    ),
    "cohere_command4": "cohere_command3",
    **dict.fromkeys(("openai_gptoss", "gpt-oss"), "harmony"),
}
"""Names under which other servers know a format, and what it is called here."""

REASONING_PARSERS: Final[Mapping[str, str]] = {
    **_READ,
    **{name: _READ[same] for name, same in ALIASES.items()},
}
"""`module:attribute` of each format, in the order in which templates are tried."""
REASONING_PARSER_GROUP: Final = "pdserve.reasoning_parsers"
"""Group of entry points with which other packages add formats."""

_NEEDED: Final = ("start", "end", "markers", "detect", "opens", "before_answer", "parser")


@cache
def reasoning_format(name: str) -> ReasoningFormat:
    """The format called `name`: one of `REASONING_PARSERS`, an entry point, or `module:attribute`.

    Errors: `ConfigError` with the remedy.
    """
    found = load_format(
        "reasoning-parser", name, REASONING_PARSERS, REASONING_PARSER_GROUP, _NEEDED
    )
    return cast("ReasoningFormat", found)


def detect_reasoning_format(template: str | None) -> str:
    """Return the name of the format whose markers a chat template has; empty if none."""
    if template is None:
        return ""
    names = (name for name in _READ if reasoning_format(name).detect(template))
    return next(names, "")
