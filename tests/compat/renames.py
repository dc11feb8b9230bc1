"""What modules, classes and functions of the release before are called today: `renames.toml`.

It knows names only. Where the two trees come from is the caller's business: a tree is a function
from a module's name to the names that it defines, or None without such a module.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    Tree = Callable[[str], Collection[str] | None]

FILE = Path(__file__).with_name("renames.toml")
_DOTTED = re.compile(r"\bpdserve(?:_engines)?(?:\.\w+)+")


@dataclass(frozen=True)
class Renames:
    """The tables of the file; modules are `a.b`, symbols `a.b:Name`."""

    modules: Mapping[str, str] = field(default_factory=dict)
    symbols: Mapping[str, str] = field(default_factory=dict)
    gone: Mapping[str, str] = field(default_factory=dict)

    def module(self, old: str) -> str:
        """Today's name; the longest entry that the old name begins with counts."""
        known, rest = old, ""
        while known not in self.modules:
            known, dot, last = known.rpartition(".")
            rest = dot + last + rest
            if not known:
                return old
        return self.modules[known] + rest

    def symbol(self, old: str) -> str:
        """Today's `module:Name`."""
        module, _, name = old.partition(":")
        now = self.symbols.get(old, name)
        return now if ":" in now else f"{self.module(module)}:{now}"

    def dotted(self, old: str) -> str:
        """The same of `module.Name`, as Python shows a class."""
        module, _, name = old.rpartition(".")
        return self.symbol(f"{module}:{name}").replace(":", ".")

    def hint(self, old: str) -> str:
        """A type's text with today's names."""
        return _DOTTED.sub(lambda match: self.dotted(match[0]), old)

    def is_gone(self, old: str) -> bool:
        """`module.Name` is in [gone], or its module or a package of it is."""
        module, _, name = old.rpartition(".")
        parts = module.split(".")
        above = (".".join(parts[: count + 1]) for count in range(len(parts)))
        return f"{module}:{name}" in self.gone or any(one in self.gone for one in above)

    def missing(self, old: Sequence[str], today: Collection[str]) -> list[str]:
        """A sentence for each old `module.Name` that nothing is known of today."""
        lost = [one for one in old if self.dotted(one) not in today and not self.is_gone(one)]
        return [
            f"{one} is not there as {self.dotted(one)}: enter its new name in [symbols] or its "
            "module's in [modules] of renames.toml, or in [gone] why it is no longer sent"
            for one in lost
        ]

    def mistakes(self, old: Tree, today: Tree) -> list[str]:
        """A sentence for each entry that does not fit the two trees."""
        return [
            *self._wrong_modules(old, today),
            *self._wrong_symbols(old, today),
            *self._wrong_gone(old, today),
        ]

    def _wrong_modules(self, old: Tree, today: Tree) -> Iterator[str]:
        for was, now in self.modules.items():
            if old(was) is None:
                yield f"[modules] {was}: the release before had no such module"
            if today(now) is None:
                yield f"[modules] {was}: there is no module {now}"

    def _wrong_symbols(self, old: Tree, today: Tree) -> Iterator[str]:
        for was in self.symbols:
            now = self.symbol(was)
            if not _defines(old, was):
                yield f"[symbols] {was}: the release before had no such name"
            if not _defines(today, now):
                yield f"[symbols] {was}: there is no {now}"
        for place, count in Counter(map(self.symbol, self.symbols)).items():
            if count > 1:
                yield f"[symbols]: {count} names have become {place}"

    def _wrong_gone(self, old: Tree, today: Tree) -> Iterator[str]:
        for was, reason in self.gone.items():
            if not _defines(old, was):
                yield f"[gone] {was}: the release before had no such name"
            now = self.symbol(was) if ":" in was else self.module(was)
            if _defines(today, now):
                yield f"[gone] {was}: it is there, as {now}"
            if not reason:
                yield f"[gone] {was}: say why it is no longer sent"


def _defines(tree: Tree, name: str) -> bool:
    """Whether there is a module, or `module:Name`."""
    module, colon, symbol = name.partition(":")
    found = tree(module)
    return found is not None and (not colon or symbol in found)


def read(text: str) -> Renames:
    """Raises `TypeError` for another table."""
    return Renames(**tomllib.loads(text))


def renames() -> Renames:
    """Of the committed file."""
    return read(FILE.read_text(encoding="utf-8"))


def paths_of(module: str) -> tuple[str, str]:
    """Where a module's source may be, from the repository's root."""
    folder = "engines/" if module.startswith("pdserve_engines") else ""
    stem = folder + module.replace(".", "/")
    return f"{stem}.py", f"{stem}/__init__.py"


def module_at(path: str) -> str:
    """The module whose source is at this path from the repository's root."""
    stem = path.removeprefix("engines/").removesuffix(".py").removesuffix("/__init__")
    return stem.replace("/", ".")


def defined(source: str) -> set[str]:
    """What a module defines at its top, in branches of `if` and `try` too."""
    return set(_defined(ast.parse(source).body))


def _defined(body: Sequence[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            names = [name for target in node.targets for name in ast.walk(target)]
            yield from (name.id for name in names if isinstance(name, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.If | ast.Try):
            yield from _defined([*node.body, *node.orelse])
            for handler in getattr(node, "handlers", ()):
                yield from _defined(handler.body)
