"""What pdserve's adapters use of a foreign engine: the data files beside this module, parsed.

A file lists names; each entry says where the name is (`at`) and which of its members are used, in
Python's own words: `"top_p = 1.0"` is a parameter with that default, `"rid"` one without, and
`"seed = ..."` one whose default does not matter. This module does not know how a name is looked
up: `installed`, `source` and `references` do that, and `compare` says what differs.

Only the standard library is imported here, so that the checker runs in an engine's environment.
"""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER = Path(__file__).parent
ENGINES = ("vllm", "sglang", "tensorrt_llm")

ANY = "..."
"""The default's text of a parameter that is optional, whatever its default is."""

Parameters = dict[str, str | None]
"""Name -> text of the default, in order; None: required. `*args` and `**kwargs` keep their
stars."""

_KEYS = {
    "at", "use", "fields", "fields_from", "parameters", "methods", "values", "choices",
    "attributes", "ordered", "partial", "implemented", "source",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One name of an engine and the members of it that are used. None: not asked about."""

    at: str
    """`package.module:Name` or `package.module:Class.method`."""
    use: str = ""
    """What the adapter does with it, for the reader of a difference."""
    source: str = ""
    """File and commit that the entry was transcribed from, if not the package itself."""
    fields: Parameters | None = None
    """Fields of a dataclass, msgspec struct, pydantic model or named tuple."""
    fields_from: str = ""
    """A package whose structs hold the fields, where a class assembles its fields from them."""
    parameters: Parameters | None = None
    """Parameters of a function or method, or of a class's constructor."""
    methods: Mapping[str, Parameters] | None = None
    values: Mapping[str, str] | None = None
    """Members of an enum: name -> text of the value."""
    choices: tuple[str, ...] | None = None
    """Values of a `Literal` that are used."""
    attributes: tuple[str, ...] | None = None
    """Attributes of instances: assigned to `self`, annotated in the class, or properties."""
    ordered: bool = False
    """The fields travel by position: a field that has moved is a difference."""
    partial: bool = False
    """Not all values of the enum are listed."""
    implemented: bool = False
    """The adapter implements this class: new parameters and new abstract methods matter."""


@dataclass(frozen=True, slots=True)
class Contract:
    """A data file."""

    package: str
    """The distribution's name at the package index."""
    version: str
    """The release that the entries were read from."""
    entries: tuple[Entry, ...]


def load(engine: str) -> Contract:
    """Read the data file of an engine."""
    text = (FOLDER / f"{engine}.toml").read_text(encoding="utf-8")
    return parse(tomllib.loads(text))


def parse(data: Mapping[str, Any]) -> Contract:
    """Build a contract from the content of a data file. Raises `ValueError` for an entry that says
    nothing, has an unknown key or appears twice."""
    entries = tuple(_entry(table) for table in data["name"])
    seen: set[str] = set()
    for entry in entries:
        if entry.at in seen:
            raise ValueError(f"{entry.at} is listed twice")
        seen.add(entry.at)
    return Contract(data["package"], data["version"], entries)


def _entry(table: Mapping[str, Any]) -> Entry:
    if unknown := table.keys() - _KEYS:
        raise ValueError(f"{table.get('at')} has unknown keys {sorted(unknown)}")
    if ":" not in table["at"]:
        raise ValueError(f"{table['at']} is not of the form module:Name")
    made: dict[str, Any] = dict(table)
    for key in ("fields", "parameters"):
        if key in made:
            made[key] = members(made[key])
    if "methods" in made:
        made["methods"] = dict(map(_method, made["methods"]))
    if "values" in made:
        made["values"] = {name: text or "" for name, text in members(made["values"]).items()}
    for key in ("choices", "attributes"):
        if key in made:
            made[key] = tuple(made[key])
    return Entry(**made)


def members(lines: list[str]) -> Parameters:
    """Parse `"name"` and `"name = default"` lines. Raises `ValueError` for a name listed twice."""
    found: Parameters = {}
    for line in lines:
        name, equals, default = (part.strip() for part in line.partition("="))
        if name in found:
            raise ValueError(f"{name} is listed twice")
        found[name] = canonical(ast.parse(default, mode="eval").body) if equals else None
    return found


def _method(line: str) -> tuple[str, Parameters]:
    """Parse `"name(a, b=1)"`."""
    function = ast.parse(f"def {line}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return function.name, {
        name: None if node is None else canonical(node)
        for name, node in argument_nodes(function.args).items()
    }


def argument_nodes(arguments: ast.arguments) -> dict[str, ast.expr | None]:
    """Parameters of a parsed function in order: name -> its default's node; None: required."""
    found: dict[str, ast.expr | None] = {}
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = len(positional) - len(arguments.defaults)
    for index, argument in enumerate(positional):
        found[argument.arg] = None if index < missing else arguments.defaults[index - missing]
    if arguments.vararg:
        found[f"*{arguments.vararg.arg}"] = None
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found[argument.arg] = default
    if arguments.kwarg:
        found[f"**{arguments.kwarg.arg}"] = None
    return found


_ARITHMETIC = (
    ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop,
)  # fmt: skip


def canonical(node: ast.expr) -> str:
    """The text of a default that all readers agree on: literals and sums of literals as `repr`
    writes them, anything else as `ast.unparse` does."""
    if isinstance(node, ast.Constant) and node.value is Ellipsis:
        return ANY
    try:
        return repr(ast.literal_eval(node))
    except (ValueError, TypeError):
        pass
    if all(isinstance(part, _ARITHMETIC) for part in ast.walk(node)):
        # Constants and operators only, such as 1 << 30: there is no name that could be called.
        return repr(eval(compile(ast.Expression(node), "<default>", "eval"), {}))
    return ast.unparse(node)
