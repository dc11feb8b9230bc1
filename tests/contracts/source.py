"""Looks names up in an engine's source text, by `ast`; nothing is imported or run.

The text is a wheel or a folder, which holds the package at its top or under `python/` or `src/`.
Base classes and re-exported names are followed through `import` statements within the package; what
a module assembles while it runs is invisible here.
"""

from __future__ import annotations

import ast
import zipfile
from functools import cache
from typing import TYPE_CHECKING

from tests.contracts.contract import ANY, argument_nodes, canonical

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from tests.contracts.contract import Parameters

_DEPTH = 8
"""Most re-exports, base classes or constants in a row that are followed."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class SourceReader:
    """Reads a wheel, or a folder of source text."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path) if path.is_file() else None
        names: Iterable[str] = () if self._zip is None else self._zip.namelist()
        self._names = frozenset(names)
        self._path = path
        self._module = cache(self._parse)

    def close(self) -> None:
        """Close the wheel."""
        if self._zip is not None:
            self._zip.close()

    # ------------------------------------------------------------------ what `compare` asks

    def exists(self, at: str) -> bool:
        module, _, name = at.partition(":")
        return self._find(module, name) is not None

    def fields(self, at: str) -> Parameters | None:
        found = self._class(at)
        return None if found is None else self._fields(*found)

    def fields_of_package(self, package: str) -> Parameters | None:
        """Fields of all classes in the package's modules; None if there is no such package."""
        modules = self._modules_of(package)
        found: Parameters = {}
        for module in modules:
            for node in self._module(module).body:
                if isinstance(node, ast.ClassDef):
                    found |= self._fields(module, node)
        return found if modules else None

    def parameters(self, at: str) -> Parameters | None:
        module, _, name = at.partition(":")
        found = self._find(module, name)
        if found is None:
            return None
        where, node = found
        if isinstance(node, ast.ClassDef):
            constructor = self._methods(where, node).get("__init__")
            return self._fields(where, node) if constructor is None else constructor
        if isinstance(node, _Function):
            return self._arguments(where, node, method="." in name)
        return None

    def methods(self, at: str) -> Mapping[str, Parameters] | None:
        found = self._class(at)
        return None if found is None else self._methods(*found)

    def abstract(self, at: str) -> Collection[str]:
        """Methods that are abstract in the class or a base and implemented in neither."""
        found = self._class(at)
        marks: dict[str, bool] = {}
        for _, node in [] if found is None else self._lineage(*found):
            for item in node.body:
                if isinstance(item, _Function):
                    marks[item.name] = "abstractmethod" in _decorators(item)
        return [name for name, is_abstract in marks.items() if is_abstract]

    def values(self, at: str) -> Mapping[str, str] | None:
        found = self._class(at)
        if found is None:
            return None
        return {
            target.id: canonical(node.value)
            for _, owner in self._lineage(*found)
            for node in owner.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name) and not target.id.startswith("_")
        }

    def choices(self, at: str) -> Collection[str] | None:
        module, _, name = at.partition(":")
        found = self._find(module, name)
        if found is None or not isinstance(found[1], ast.expr):
            return None
        return _strings(found[1])

    def attributes(self, at: str) -> Collection[str] | None:
        found = self._class(at)
        if found is None:
            return None
        return {name for _, node in self._lineage(*found) for name in attribute_names(node)}

    # ------------------------------------------------------------------ finding modules and names

    def _parse(self, module: str) -> ast.Module:
        """The module's syntax tree; an empty one if there is no such module."""
        inner = module.replace(".", "/")
        for name in (f"{inner}.py", f"{inner}/__init__.py"):
            text = self._text(name)
            if text is not None:
                return ast.parse(text)
        return ast.Module(body=[], type_ignores=[])

    def _text(self, name: str) -> bytes | None:
        if self._zip is not None:
            return self._zip.read(name) if name in self._names else None
        for top in ("", "python", "src"):
            path = self._path / top / name
            if path.is_file():
                return path.read_bytes()
        return None

    def _modules_of(self, package: str) -> list[str]:
        inner = package.replace(".", "/") + "/"
        if self._zip is not None:
            names = [n.removeprefix(inner) for n in self._names if n.startswith(inner)]
        else:
            folders = [self._path / top / inner for top in ("", "python", "src")]
            names = [p.name for f in folders if f.is_dir() for p in f.glob("*.py")]
        stems = sorted(n.removesuffix(".py") for n in names if n.endswith(".py") and "/" not in n)
        return [f"{package}.{stem}" for stem in stems if stem != "__init__"]

    def _find(self, module: str, name: str, depth: int = _DEPTH) -> tuple[str, ast.AST] | None:
        """The module that defines `name` (a dotted one, perhaps) and the node that does so."""
        first, _, rest = name.partition(".")
        node = _definition(self._module(module), first)
        if isinstance(node, ast.ImportFrom):
            original = next(a.name for a in node.names if (a.asname or a.name) == first)
            target = self._import_target(module, node)
            return (
                self._find(target, f"{original}.{rest}" if rest else original, depth - 1)
                if (depth)
                else None
            )
        if node is None or not rest:
            return None if node is None else (module, node)
        if not isinstance(node, ast.ClassDef):
            return None
        for where, owner in reversed(self._lineage(module, node)):
            for item in owner.body:
                if isinstance(item, _Function | ast.ClassDef) and item.name == rest:
                    return where, item
        return None

    def _import_target(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = self._text(module.replace(".", "/") + "/__init__.py") is not None
        parts = module.split(".")
        up = node.level - is_package
        base = parts[: len(parts) - up] if up else parts
        return ".".join([*base, *([node.module] if node.module else [])])

    def _class(self, at: str) -> tuple[str, ast.ClassDef] | None:
        module, _, name = at.partition(":")
        found = self._find(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        return found[0], found[1]

    def _lineage(
        self, module: str, node: ast.ClassDef, depth: int = _DEPTH
    ) -> list[tuple[str, ast.ClassDef]]:
        """The class and the bases that are found in the package, bases first."""
        found: list[tuple[str, ast.ClassDef]] = []
        for base in node.bases if depth else []:
            parent = self._find(module, ast.unparse(base)) if isinstance(base, ast.Name) else None
            if parent is not None and isinstance(parent[1], ast.ClassDef):
                lineage = self._lineage(parent[0], parent[1], depth - 1)
                found += [pair for pair in lineage if pair not in found]
        return [*found, (module, node)]

    # ------------------------------------------------------------------ members

    def _fields(self, module: str, node: ast.ClassDef) -> Parameters:
        found: Parameters = {}
        for where, owner in self._lineage(module, node):
            for item in owner.body:
                if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
                    continue
                if "ClassVar" not in ast.unparse(item.annotation):
                    found[item.target.id] = self._default(where, item.value)
        return found

    def _methods(self, module: str, node: ast.ClassDef) -> dict[str, Parameters]:
        return {
            item.name: self._arguments(where, item, method=True)
            for where, owner in self._lineage(module, node)
            for item in owner.body
            if isinstance(item, _Function)
        }

    def _arguments(self, module: str, node: _Function, *, method: bool) -> Parameters:
        nodes = argument_nodes(node.args)
        if method and nodes and "staticmethod" not in _decorators(node):
            del nodes[next(iter(nodes))]
        return {name: self._default(module, default) for name, default in nodes.items()}

    def _default(self, module: str, node: ast.expr | None, depth: int = _DEPTH) -> str | None:
        """The default's text; names of constants and of other classes' fields are followed."""
        if node is None:
            return None
        if isinstance(node, ast.Call) and _is_field_call(node):
            return self._field_call(module, node)
        if isinstance(node, ast.Name | ast.Attribute) and depth:
            target = self._constant(module, node)
            if target is not None:
                return self._default(*target, depth - 1)
        return canonical(node)

    def _field_call(self, module: str, node: ast.Call) -> str | None:
        """The default in `field(default=…)`, `Field(…)` or `field(default_factory=…)`."""
        given = {word.arg: word.value for word in node.keywords if word.arg}
        value = given.get("default", node.args[0] if node.args else None)
        if value is not None:
            text = self._default(module, value)
            return None if text == ANY else text
        factory = given.get("default_factory")
        if factory is None:
            return None
        return factory_text(ast.unparse(factory))

    def _constant(self, module: str, node: ast.expr) -> tuple[str, ast.expr] | None:
        """Where a module's constant or a class's field gets its value."""
        name, _, attribute = ast.unparse(node).partition(".")
        found = self._find(module, name)
        if found is None:
            return None
        where, owner = found
        if not attribute:
            return (where, owner) if isinstance(owner, ast.expr) else None
        if not isinstance(owner, ast.ClassDef):
            return None
        for place, base in reversed(self._lineage(where, owner)):
            for item in base.body:
                if (
                    isinstance(item, ast.AnnAssign)
                    and ast.unparse(item.target) == attribute
                    and item.value is not None
                ):
                    return place, item.value
        return None


def attribute_names(node: ast.ClassDef) -> Iterator[str]:
    """Names that instances of a class have: annotated, assigned to `self`, or properties."""
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item.target.id
        if isinstance(item, _Function) and any("property" in d for d in _decorators(item)):
            yield item.name
    for part in ast.walk(node):
        if (
            isinstance(part, ast.Attribute)
            and isinstance(part.ctx, ast.Store)
            and isinstance(part.value, ast.Name)
            and part.value.id == "self"
        ):
            yield part.attr


def factory_text(name: str) -> str:
    """The text of a default that a factory makes; `[]`, `{}` and the like for the usual ones."""
    usual = {"list": "[]", "dict": "{}", "set": "set()", "tuple": "()"}
    return usual.get(name, f"{name}()")


_Bound = ast.ClassDef | _Function | ast.ImportFrom | ast.expr
"""What a name of a module can be bound to."""


def _definition(tree: ast.Module, name: str) -> _Bound | None:
    """What binds a name in a module, in `if` and `try` blocks as well.

    The last one counts, but a class does before what is made of it under its own name.
    """
    found = [bound for node in _statements(tree.body) if (bound := _bound(node, name))]
    classes = [bound for bound in found if isinstance(bound, ast.ClassDef)]
    return (classes or found or [None])[-1]


def _bound(node: ast.stmt, name: str) -> _Bound | None:
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return node if node.name == name else None
        case ast.ImportFrom():
            return node if name in [alias.asname or alias.name for alias in node.names] else None
        case ast.Assign():
            return node.value if name in map(ast.unparse, node.targets) else None
        case ast.AnnAssign():
            return node.value if ast.unparse(node.target) == name else None
    return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _decorators(node: _Function) -> list[str]:
    return [ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list]


def _is_field_call(node: ast.Call) -> bool:
    return ast.unparse(node.func).rpartition(".")[2] in ("field", "Field")


def _strings(node: ast.expr) -> list[str]:
    constants = (part for part in ast.walk(node) if isinstance(part, ast.Constant))
    return [part.value for part in constants if isinstance(part.value, str)]
