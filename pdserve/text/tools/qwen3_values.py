"""What a value that a model writes as plain text means, by the JSON schema of its parameter."""

from __future__ import annotations

import ast
import json
import math
import re
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pdserve.openai.schema import Tool

__all__ = ["Schemas", "written"]

_INTEGER: Final = re.compile(r"[+-]?\d{1,4000}", re.ASCII)
_NUMBER: Final = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_STRING: Final = ("string",)
_DEEPEST: Final = 16
"""References and unions in each other that are followed."""


class Schemas:
    """The parameters of one tool; of an unknown one, all are strings."""

    def __init__(self, tool: Tool | None) -> None:
        self._root = (tool.function.parameters if tool is not None else None) or {}

    def types(self, name: str) -> tuple[str, ...]:
        """JSON types that the parameter may have, as the schema lists them; at least one."""
        properties = self._root.get("properties")
        schema = properties.get(name) if isinstance(properties, dict) else None
        return tuple(dict.fromkeys(self._types(schema, _DEEPEST))) or _STRING

    def _types(self, schema: Any, deep: int) -> Iterator[str]:
        if not isinstance(schema, dict) or not deep:
            return
        kind = schema.get("type")
        if isinstance(kind, str):
            yield kind
        elif isinstance(kind, list):
            yield from (each for each in kind if isinstance(each, str))
        else:
            for value in self._values(schema):
                yield _type_of(value)
        if schema.get("nullable") is True:
            yield "null"
        for other in self._parts(schema):
            yield from self._types(other, deep - 1)

    def _values(self, schema: dict[str, Any]) -> list[Any]:
        values = schema.get("enum")
        return (
            values if isinstance(values, list) else [schema["const"]] if "const" in schema else []
        )

    def _parts(self, schema: dict[str, Any]) -> Iterator[Any]:
        """Schemas that this one is made of."""
        for key in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(key)
            if isinstance(parts, list):
                yield from parts
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            yield self._referred(reference)

    def _referred(self, reference: str) -> Any:
        found: Any = self._root
        for step in reference[2:].split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        return found


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def written(text: str, types: tuple[str, ...]) -> str:
    """`text` as JSON of the narrowest of the types that it fits; as a string if it fits none."""
    bare = text.strip()
    for kind, read in _READERS.items():
        found = read(bare) if kind in types else None
        if found is not None:
            return found
    return json.dumps(text, ensure_ascii=False)


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
    """JSON as it stands, or a literal of Python."""
    try:
        return text if isinstance(json.loads(text, parse_constant=_refuse), kind) else None
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(text)
        return (
            json.dumps(value, ensure_ascii=False, allow_nan=False)
            if isinstance(value, kind)
            else None
        )
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_READERS: Final[Mapping[str, Callable[[str], str | None]]] = {
    "null": _null,
    "boolean": _boolean,
    "integer": _integer,
    "number": _number,
    "object": _object,
    "array": _array,
}
"""The narrower type first; whatever else it may be, text is a string."""
