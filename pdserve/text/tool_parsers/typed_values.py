"""Converts plain-text values to JSON by the schema of their parameter."""

from __future__ import annotations

import ast
import json
import math
import re
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import InvalidRequest
from pdserve.text.tool_parsers.partial_json import json_or_none, refuse_constant, repaired_string
from pdserve.text.tool_parsers.python_literals import MAX_STRUCTURE, structure_size
from pdserve.text.tool_parsers.schema_budget import SchemaBudget
from pdserve.text.tool_parsers.tool_call_grammar import (
    parameters_field,
    properties_of,
    resolve_reference,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool

__all__ = [
    "MAX_PARAMETER_STEPS",
    "ParameterTypes",
    "check_parameters",
    "json_or_text",
    "types_of_schema",
    "value_as_json",
]

_INTEGER: Final = re.compile(r"[+-]?\d{1,4000}", re.ASCII)
_NUMBER: Final = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_STRING: Final = ("string",)
MAX_PARAMETER_STEPS: Final = 512
"""Most schemas, types and references that are read for one parameter, on the event loop when a
model begins to write it: a fifth of a millisecond."""
_VALUES_PER_STEP: Final = 64
_NAMES: Final[Mapping[type, str]] = {
    bool: "boolean",
    str: "string",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}
_ALIASES: Final[Mapping[str, str]] = {
    **{kind.__name__: name for kind, name in _NAMES.items()},
    **dict.fromkeys(("tuple", "arr", "sequence"), "array"),
    **dict.fromkeys(("text", "char", "varchar", "enum"), "string"),
    **dict.fromkeys(("int32", "int64", "uint", "uint32", "uint64", "long", "short"), "integer"),
    **dict.fromkeys(("double", "float32", "float64"), "number"),
    "map": "object",
    "None": "null",
}
"""Type names of Python and other languages, which clients write into schemas."""


class ParameterTypes:
    """Types of one tool's parameters; of an unknown tool, all are strings."""

    __slots__ = ("_known", "_root", "_unnamed")

    def __init__(self, tool: Tool | None) -> None:
        self._root = (tool.function.parameters if tool is not None else None) or {}
        self._known: dict[str, tuple[str, ...]] = {}
        """Types by the parameter's name, since a model may write the same one repeatedly."""
        self._unnamed: set[str] = set()
        """Parameters for which the schema names no type."""

    def described(self, name: str) -> tuple[str, ...] | None:
        """As `types`; None if the schema names none. Raises `InvalidRequest` like it."""
        found = self.types(name)
        return None if name in self._unnamed else found

    @property
    def names(self) -> Collection[str]:
        """Names of the parameters that the schema describes."""
        properties = self._root.get("properties")
        return properties if isinstance(properties, dict) else ()

    def types(self, name: str, budget: SchemaBudget | None = None) -> tuple[str, ...]:
        """JSON types that the parameter may have, as the schema lists them; at least one.

        Raises `InvalidRequest` for a schema that combines too many others. With a `SchemaBudget`,
        they count there, too, and the error names its field.
        """
        known = self._known.get(name)
        if known is None:
            own = SchemaBudget("tools" if budget is None else budget.field, MAX_PARAMETER_STEPS)
            properties = self._root.get("properties")
            schema = properties.get(name) if isinstance(properties, dict) else None
            known = tuple(dict.fromkeys(self._types(schema, own)))
            if not known:
                self._unnamed.add(name)
            known = self._known[name] = known or _STRING
            if budget is not None:
                budget.step(own.steps)
        return known

    def _types(self, schema: Any, budget: SchemaBudget) -> Iterator[str]:
        """Yield the types; reads each schema once, since references may be circular."""
        waiting, seen = [schema], set()
        while waiting:
            part = waiting.pop()
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            yield from _own_types(part, budget)
            waiting += reversed(self._parts(part, budget))

    def _parts(self, schema: dict[str, Any], budget: SchemaBudget) -> list[Any]:
        """Schemas that this one combines."""
        found: list[Any] = []
        for key in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(key)
            if isinstance(parts, list):
                budget.step(len(parts))
                found += parts
        reference = schema.get("$ref")
        if isinstance(reference, str):
            budget.step(1 + reference.count("/"))
            found.append(resolve_reference(self._root, reference))
        return found


def check_parameters(tools: Sequence[Tool]) -> None:
    """Check that `ParameterTypes.types` needs bounded work while a model writes.

    Raises `InvalidRequest`, which names the tool.
    """
    budget = SchemaBudget("tools")
    for place, tool in enumerate(tools):
        budget.field = parameters_field(place)
        schemas = ParameterTypes(tool)
        for name, _, _ in properties_of(tool.function.parameters or {}):
            schemas.types(name, budget)


def types_of_schema(schema: dict[str, Any]) -> tuple[str, ...]:
    """JSON types that the schema itself names; of unreasonably long lists, none."""
    try:
        found = _own_types(schema, SchemaBudget("tools", MAX_PARAMETER_STEPS))
        return tuple(dict.fromkeys(found))
    except InvalidRequest:
        return ()


def _own_types(schema: dict[str, Any], budget: SchemaBudget) -> Iterator[str]:
    """Yield the types that the schema itself names, or that its values have."""
    kind = schema.get("type")
    if isinstance(kind, str):
        kind = [kind]
    values = schema.get("enum")
    if isinstance(kind, list):
        budget.step(1 + len(kind))
        yield from (_ALIASES.get(each, each) for each in kind if isinstance(each, str))
    elif isinstance(values, list):
        budget.step(1 + len(values) // _VALUES_PER_STEP)
        yield from map(_NAMES.get, dict.fromkeys(map(type, values)), repeat("null"))
    else:
        budget.step()
        if "const" in schema:
            yield _NAMES.get(type(schema["const"]), "null")
    if schema.get("nullable") is True:
        yield "null"


def value_as_json(text: str, types: tuple[str, ...]) -> str:
    """`text` as JSON of the narrowest of the types that it fits; as a string if it fits none."""
    bare = text.strip()
    for kind, read in _READERS.items():
        found = read(bare) if kind in types else None
        if found is not None:
            return found
    if _STANDARD.isdisjoint(types):
        return json_or_text(text)
    return json.dumps(text, ensure_ascii=False)


def json_or_text(text: str) -> str:
    """`text` if it is JSON; a text between quotes as a JSON string; else as a string."""
    try:
        json.loads(text, parse_constant=refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        bare = text.strip()
        repaired = repaired_string(bare) if bare.startswith('"') else None
        return repaired or json.dumps(text, ensure_ascii=False)
    return text.strip()


def _null(text: str) -> str | None:
    return "null" if text in ("null", "None") else None


def _boolean(text: str) -> str | None:
    return text.lower() if text.lower() in ("true", "false") else None


def _integer(text: str) -> str | None:
    if _INTEGER.fullmatch(text):
        return str(int(text))
    number = _float(text)
    return None if number is None or not number.is_integer() else str(int(number))


def _number(text: str) -> str | None:
    if _NUMBER.fullmatch(text):
        return text
    if _INTEGER.fullmatch(text):
        return str(int(text))
    number = _float(text)
    return None if number is None else repr(number)


def _float(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _object(text: str) -> str | None:
    return _literal(text, dict)


def _array(text: str) -> str | None:
    return _literal(text, list)


def _literal(text: str, kind: type) -> str | None:
    """JSON as it stands, or a Python literal of limited size."""
    try:
        return text if isinstance(json.loads(text, parse_constant=refuse_constant), kind) else None
    except (ValueError, RecursionError):
        pass
    if structure_size(text) > MAX_STRUCTURE:
        return None
    if text[1:].lstrip(" {[").startswith('\\"'):
        # Some models escape the quotes as if the value stood inside of a string.
        return _literal(_unescaped(text), kind)
    try:
        value = ast.literal_eval(text)
        if not isinstance(value, kind):
            return None
        found = json.dumps(value, ensure_ascii=False, allow_nan=False)
        found.encode()  # half of a surrogate pair cannot be sent
        return found
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _unescaped(text: str) -> str:
    found = json_or_none(f'"{text}"')
    return found if isinstance(found, str) else ""


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large")
    return number


_READERS: Final[Mapping[str, Callable[[str], str | None]]] = {
    "null": _null,
    "boolean": _boolean,
    "integer": _integer,
    "number": _number,
    "object": _object,
    "array": _array,
}
"""The narrower type first; any text can be a string."""
_STANDARD: Final = frozenset((*_READERS, "string"))
