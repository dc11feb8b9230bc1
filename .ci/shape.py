"""Table of a tree's shape: files per folder, lengths of functions and classes, single-use helpers.

    python .ci/shape.py v0.2.0 HEAD

Counts `pdserve` and `engines` at each git revision. A length counts the lines from `def` or `class`
to the end. A single-use helper is a private function or method that its file names exactly once
outside of its own definition.
"""

from __future__ import annotations

import ast
import io
import statistics
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Tree = Mapping[str, str]

TOPS = ("pdserve", "engines")
CROWDED = 15
LONG = 40
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources(revision: str) -> dict[str, str]:
    """Path to text of each Python file."""
    command = ["git", "archive", "--format=tar", revision, *TOPS]
    packed = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        files = [one for one in archive if one.isfile() and one.name.endswith(".py")]
        return {one.name: archive.extractfile(one).read().decode() for one in files}  # type: ignore[union-attr]


def folders(tree: Tree) -> list[int]:
    """Modules in each folder, the most first; `__init__.py` is none."""
    paths = map(PurePath, tree)
    counts = Counter(path.parent for path in paths if path.name != "__init__.py")
    return sorted(counts.values(), reverse=True)


def lengths(tree: Tree, kinds: tuple[type[ast.AST], ...]) -> list[int]:
    """Lines of each definition of these kinds, the longest first."""
    nodes = (node for text in tree.values() for node in ast.walk(ast.parse(text)))
    found = [node.end_lineno - node.lineno + 1 for node in nodes if isinstance(node, kinds)]  # type: ignore[attr-defined]
    return sorted(found, reverse=True)


def single_use(tree: Tree) -> int:
    """Private functions and methods that one place in their file uses."""
    return sum(1 for text in tree.values() for _ in _single_use(ast.parse(text)))


def _single_use(module: ast.Module) -> Iterator[str]:
    used: Counter[str] = Counter()
    for node in ast.walk(module):
        if isinstance(node, ast.Name):
            used[node.id] += 1
        elif isinstance(node, ast.Attribute):
            used[node.attr] += 1
    for node in ast.walk(module):
        if isinstance(node, FUNCTION) and node.name.startswith("_") and used[node.name] == 1:
            yield node.name


def over(limit: int) -> Callable[[list[int]], int]:
    """How many numbers are above `limit`."""
    return lambda numbers: sum(number > limit for number in numbers)


def column(tree: Tree) -> dict[str, float]:
    """Every row's figure for one tree."""
    rooms, functions = folders(tree), lengths(tree, FUNCTION)
    classes = lengths(tree, (ast.ClassDef,))
    return {
        "Python files": len(tree),
        "lines": sum(text.count("\n") for text in tree.values()),
        "folders with modules": len(rooms),
        "modules in a folder, median": statistics.median(rooms),
        "modules in a folder, most": rooms[0],
        f"folders above {CROWDED} modules": over(CROWDED)(rooms),
        "functions": len(functions),
        "function's lines, median": statistics.median(functions),
        f"functions above {LONG} lines": over(LONG)(functions),
        "longest function": functions[0],
        "classes": len(classes),
        "class's lines, median": statistics.median(classes),
        "classes above 300 lines": over(300)(classes),
        "longest class": classes[0],
        "single-use private helpers": single_use(tree),
    }


def main(revisions: list[str]) -> None:
    """Print the table."""
    columns = [column(sources(revision)) for revision in revisions]
    print("| |", " | ".join(revisions), "|")
    print("|---|", "|".join("---:" for _ in revisions), "|", sep="")
    for name in columns[0]:
        print(f"| {name} |", " | ".join(f"{one[name]:,g}" for one in columns), "|")


if __name__ == "__main__":
    main(sys.argv[1:])
