"""The table of popular models in docs/models.md: what serves them, and which formats they speak.

    python .ci/models_table.py           # print it
    python .ci/models_table.py --write   # put it into docs/models.md

The models are those of .ci/models.toml. Formats are detected in the public templates that
.ci/templates.sh downloads, without which nothing is written. A test compares the two
(tests/text/test_models_page.py).
"""

from __future__ import annotations

import os
import sys
import tomllib
from hashlib import sha256
from pathlib import Path
from typing import Any

from pdserve.text.reasoning_parsers import detect_reasoning_format
from pdserve.text.tool_parsers import detect_tool_format
from pdserve_engines.torch.model_loader.architectures import (
    ARCHITECTURES,
    TEXT_PARTS,
    vllm_architectures,
)

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "models.md"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve"
KEY = sha256((HERE / "templates.txt").read_bytes()).hexdigest()[:16]
TEMPLATES = CACHE / f"templates-{KEY}"
BEGIN = "<!-- models: begin (made by `python .ci/models_table.py --write`) -->\n"
END = "<!-- models: end -->\n"
NONE = "–"


def models() -> list[dict[str, Any]]:
    """The entries of .ci/models.toml."""
    listed: list[dict[str, Any]] = _file()["model"]
    return listed


def compared() -> list[str]:
    """Architectures whose answers about images are compared with those of transformers."""
    listed: list[str] = _file()["compared"]
    return listed


def _file() -> dict[str, Any]:
    return tomllib.loads((HERE / "models.toml").read_text())


def formats(model: dict[str, Any]) -> tuple[str, str]:
    """Tool and reasoning format, detected if the model has a public template."""
    if "template" not in model:
        return model.get("tools", ""), model.get("reasoning", "")
    source = (TEMPLATES / f"{model['template']}.jinja").read_text(encoding="utf-8")
    return detect_tool_format(source), detect_reasoning_format(source)


def engines(model: dict[str, Any]) -> str:
    """The engines that serve its architecture."""
    name = model["architecture"]
    found = []
    if name in ARCHITECTURES and "note" not in model:
        found.append("torch (text)" if name in TEXT_PARTS else "torch")
    if name in vllm_architectures():
        proved = ", compared" if name in compared() and "note" not in model else ""
        found.append(f"vLLM (images{proved})" if model.get("sees") else "vLLM")
    return ", ".join(found) or "neither"


def row(model: dict[str, Any]) -> str:
    spoken = (f"`{name}`" if name else NONE for name in formats(model))
    cells = (model["name"], f"`{model['architecture']}`", engines(model), *spoken)
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """The rows, as Markdown."""
    head = "| model | architecture | served by | tool calls | reasoning |\n|---|---|---|---|---|\n"
    return head + "\n".join(map(row, models())) + "\n"


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
