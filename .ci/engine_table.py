"""The table of engines in docs/engines.md, made of each engine package's `SUPPORT`.

    python .ci/engine_table.py           # print it
    python .ci/engine_table.py --write   # put it into docs/engines.md

A test compares the two (tests/engine_core/test_support.py).
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.engine_core.support import EngineSupport

PAGE = Path(__file__).parent.parent / "docs" / "engines.md"
ENGINES = ("torch", "vllm", "tensorrt_llm", "sglang", "sim", "instant")
FEATURES = {
    "grammar": "`grammar`",
    "thinking": "`thinking`",
    "bans": "`bans`",
    "lora": "LoRA adapters",
    "embeddings": "embeddings",
    "images": "images",
    "classify": "rerankers",
}
FIELDS = {
    "logprobs": "logprobs",
    "prompt_logprobs": "logprobs of the prompt",
    "kv_events": "routing by its prefix cache",
    "disaggregation": "prefill and decode apart",
    "exact": "a migrated stream continues exactly",
    "devices": "computes on",
}
BEGIN = "<!-- engines: begin (made by `python .ci/engine_table.py --write`) -->\n"
END = "<!-- engines: end -->\n"


def support() -> dict[str, EngineSupport]:
    """What each engine declares. Imports no engine's library but torch."""
    return {name: importlib.import_module(f"pdserve_engines.{name}").SUPPORT for name in ENGINES}


def table() -> str:
    """The rows, as Markdown."""
    declared = support()
    lines = ["| | " + " | ".join(f"`{name}`" for name in declared) + " |"]
    lines.append("|---" * (len(declared) + 1) + "|")
    for feature, words in FEATURES.items():
        cells = ["yes" if feature in each.features else "–" for each in declared.values()]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    for field, words in FIELDS.items():
        cells = [getattr(each, field) or "–" for each in declared.values()]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with today's table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


def main(arguments: list[str]) -> int:
    """Print or write the table."""
    if arguments == ["--write"]:
        PAGE.write_text(written(PAGE.read_text()))
    else:
        print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
