"""Parses and constrains tool calls in the format of each model family: one file per format, no I/O.

`docs/tools.md` says how each format is recognised and what happens to malformed markup. Formats lie
in folders by the shape of a call: JSON objects, objects behind a name, tags around each argument,
Python calls, channels.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final, cast

from pdserve.text.format_loader import load_format

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.text.tool_parsers.base import ToolFormat

__all__ = [
    "ALIASES",
    "TOOL_PARSERS",
    "TOOL_PARSER_GROUP",
    "detect_tool_format",
    "tool_format",
]

_HERE: Final = "pdserve.text.tool_parsers."
_OBJECTS: Final = f"{_HERE}json_calls.object_lists:"

_OF_FAMILIES: Final[Mapping[str, str]] = {
    "harmony": f"{_HERE}channels.harmony:Harmony",
    "gemma4": f"{_HERE}channels.gemma4:Gemma4",
    "functiongemma": f"{_HERE}channels.functiongemma:FunctionGemma",
    "kimi_k3": f"{_HERE}channels.kimi_k3:KimiK3",
}
"""Formats that are recognised by a marker that only one family's templates have."""

_JSON_FAMILIES: Final[Mapping[str, str]] = {
    "kimi_k2": f"{_HERE}named_calls.kimi_k2:KIMI_K2",
    "deepseek_v3": f"{_HERE}named_calls.deepseek_v3:DEEPSEEK_V3",
    "deepseek_v31": f"{_HERE}named_calls.deepseek_v3:DEEPSEEK_V31",
    "granite": f"{_OBJECTS}GRANITE",
    "cohere_command3": f"{_HERE}json_calls.cohere:Cohere",
    "cohere_command_r": f"{_HERE}json_calls.cohere:COMMAND_R",
    "nemotron_json": f"{_OBJECTS}NEMOTRON_JSON",
    "jamba": f"{_OBJECTS}JAMBA",
    "hunyuan_a13b": f"{_OBJECTS}HUNYUAN_A13B",
    "minimax": f"{_OBJECTS}MINIMAX",
    "apriel": f"{_OBJECTS}APRIEL",
    "internlm": f"{_OBJECTS}INTERNLM",
    "xlam": f"{_HERE}json_calls.xlam:XLam",
    "phi4_mini_json": f"{_OBJECTS}PHI4_MINI_JSON",
    "apertus": f"{_HERE}json_calls.apertus:Apertus",
    "ernie45": f"{_OBJECTS}ERNIE45",
    "granite_20b_fc": f"{_OBJECTS}GRANITE_20B_FC",
    "step3_vl": f"{_OBJECTS}STEP3_VL",
    "longcat": f"{_OBJECTS}LONGCAT",
    "gigachat3": f"{_OBJECTS}GIGACHAT3",
    "granite4": f"{_HERE}json_calls.hermes:Granite4",
    "llama4_json": f"{_HERE}json_calls.llama3_json:Llama4Json",
    "hunyuan": f"{_HERE}named_calls.hunyuan:HUNYUAN",
    "functionary_v31": f"{_HERE}named_calls.functionary:FUNCTIONARY_V31",
    "functionary_v32": f"{_HERE}named_calls.functionary:FunctionaryV32",
}
"""The same, for families whose arguments are one JSON object."""

_TAGGED_FAMILIES: Final[Mapping[str, str]] = {
    "seed_oss": f"{_HERE}tagged_calls.qwen3_coder:SeedOss",
    "hy_v3": f"{_HERE}tagged_calls.argument_pairs:HyV3",
    "glm47": f"{_HERE}tagged_calls.argument_pairs:Glm47",
    "glm45": f"{_HERE}tagged_calls.argument_pairs:Glm45",
    "longcat_xml": f"{_HERE}tagged_calls.argument_pairs:LongcatPairs",
    "minimax_m3": f"{_HERE}tagged_calls.elements:MiniMaxM3",
    "minimax_m2": f"{_HERE}tagged_calls.invoke_blocks:MiniMaxM2",
    "deepseek_v32": f"{_HERE}tagged_calls.invoke_blocks:DeepSeekV32",
    "deepseek_v41": f"{_HERE}tagged_calls.invoke_blocks:DeepSeekV41",
    "deepseek_v4": f"{_HERE}tagged_calls.invoke_blocks:DeepSeekV4",
    "step3": f"{_HERE}tagged_calls.invoke_blocks:Step3",
    "minicpm5": f"{_HERE}tagged_calls.function_elements:MiniCpm5",
    "lfm2": f"{_HERE}python_calls.marked_calls:Lfm2",
    "olmo3": f"{_HERE}python_calls.marked_calls:Olmo3",
}
"""The same, for families whose arguments stand between tags, or are Python."""

_SHARED: Final[Mapping[str, str]] = {
    "qwen3_coder": f"{_HERE}tagged_calls.qwen3_coder:Qwen3Coder",
    "hermes": f"{_HERE}json_calls.hermes:Hermes",
    "mistral": f"{_HERE}json_calls.mistral:Mistral",
    "pythonic": f"{_HERE}python_calls.pythonic:Pythonic",
    "llama3_json": f"{_HERE}json_calls.llama3_json:Llama3Json",
}
"""Formats whose words other families' templates may contain, too: they are recognised last."""

ALIASES: Final[Mapping[str, str]] = {
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "mimo": "qwen3_coder",
    "poolside_v1": "glm45",
    "ling3": "glm45",
    "qwen3_json": "hermes",
    "llama4_pythonic": "pythonic",
    "cohere_command4": "cohere_command3",
    "functionary": "functionary_v32",
    "granite-20b-fc": "granite_20b_fc",
    **dict.fromkeys(("openai", "gpt-oss"), "harmony"),
    **dict.fromkeys(("qwen", "qwen25"), "hermes"),
    "llama3": "llama3_json",
    "glm": "glm45",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "minimax-m2": "minimax_m2",
}
"""Names under which other servers know a format, and what it is called here."""

_READ: Final = {**_OF_FAMILIES, **_JSON_FAMILIES, **_TAGGED_FAMILIES, **_SHARED}
TOOL_PARSERS: Final[Mapping[str, str]] = {
    **_READ,
    **{name: _READ[same] for name, same in ALIASES.items()},
}
"""`module:attribute` of each format, in the order in which templates are tried."""
TOOL_PARSER_GROUP: Final = "pdserve.tool_parsers"
"""Group of entry points with which other packages add formats."""

_NEEDED: Final = ("markers", "starts", "detect", "check", "parser", "grammar", "call_id")

_UNREAD: Final = (
    "<tool_calls>",  # Step 3
)
"""Marks of model families whose format has no parser here. No shared format is chosen for them,
even if their templates contain its words."""


@cache
def tool_format(name: str) -> ToolFormat:
    """The format called `name`: one of `TOOL_PARSERS`, an entry point, or `module:attribute`.

    Errors: `ConfigError` with the remedy.
    """
    found = load_format("tool-parser", name, TOOL_PARSERS, TOOL_PARSER_GROUP, _NEEDED)
    return cast("ToolFormat", found)


def detect_tool_format(template: str | None) -> str:
    """Return the name of the format that a chat template uses; empty if none is certain.

    A format is chosen by the structure of its calls, not by one word. The wrong parser would show
    markup to clients; without a parser, a request with `tools` is refused with a remedy.
    """
    if template is None or not ("tools" in template or "tool_calls" in template):
        return ""
    for name in (*_OF_FAMILIES, *_JSON_FAMILIES, *_TAGGED_FAMILIES):
        if tool_format(name).detect(template):
            return name
    if "tools" not in template or any(mark in template for mark in _UNREAD):
        return ""
    return next((name for name in _SHARED if tool_format(name).detect(template)), "")
