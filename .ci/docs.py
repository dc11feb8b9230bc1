"""Check what the documents promise: relative links lead somewhere, and flags they name exist.

A flag is taken from code that starts with `pdserve` (a line, or a span between backquotes) and
looked up in the help of that sub-command. Says every problem, and exits with 1 when there is one.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
COMMAND = re.compile(r"(?:^\s*(?:\$ |srun )?|`)(pdserve(?: [^`\n#]*)?)", re.MULTILINE)
FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z0-9-]*)")


def documents() -> list[Path]:
    """Every Markdown file that readers are pointed to."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])


def broken_links(document: Path, text: str) -> Iterator[str]:
    """Relative links to files that are not there."""
    for target in LINK.findall(text):
        outside = "://" in target or target.startswith("mailto:")
        if not outside and not (document.parent / target).exists():
            yield f"link to {target}, which does not exist"


@functools.cache
def help_of(*words: str) -> str:
    """What `pdserve WORDS --help` prints, empty when there is no such sub-command."""
    command = [sys.executable, "-m", "pdserve", *words, "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return result.stdout if result.returncode == 0 else ""


def unknown_flags(text: str) -> Iterator[str]:
    """Flags of `pdserve` commands that the command's help does not name."""
    for command in COMMAND.findall(text.replace("\\\n", " ")):
        words = command.split()[1:2]
        sub = [] if not words or words[0].startswith("-") else words
        known = set(FLAG.findall(help_of(*sub)))
        for flag in FLAG.findall(command):
            if flag not in known:
                yield f"`{' '.join(['pdserve', *sub])}` has no {flag}"


def main() -> int:
    """Print the problems; the exit status says whether there were any."""
    problems = []
    for document in documents():
        text = document.read_text(encoding="utf-8")
        where = document.relative_to(ROOT)
        problems += [f"{where}: {p}" for p in [*broken_links(document, text), *unknown_flags(text)]]
    print("\n".join(dict.fromkeys(problems)) or f"{len(documents())} documents are sound")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
