"""Looks names up in an installed package, by importing it and by `inspect`.

Runs in the environment that has the package; only the standard library is needed besides.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import textwrap
import typing
from typing import TYPE_CHECKING, Any

from tests.contracts.contract import canonical
from tests.contracts.source import attribute_names, factory_text

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from tests.contracts.contract import Parameters


class InstalledReader:
    """Imports the modules that are asked for."""

    def exists(self, at: str) -> bool:
        return _get(at) is not None

    def fields(self, at: str) -> Parameters | None:
        found = _get(at)
        return None if found is None else _fields(found)

    def fields_of_package(self, package: str) -> Parameters | None:
        # The class has assembled its fields when it was imported.
        return None

    def parameters(self, at: str) -> Parameters | None:
        found = _get(at)
        if inspect.isclass(found) and "__init__" not in vars(found):
            fields = _fields(found)
            return fields or _signature(found.__init__, method=True)
        if inspect.isclass(found):
            return _signature(found.__init__, method=True)
        return None if found is None else _signature(found, method="." in at.partition(":")[2])

    def methods(self, at: str) -> Mapping[str, Parameters] | None:
        found = _get(at)
        if found is None:
            return None
        names = [name for name, item in inspect.getmembers(found) if inspect.isroutine(item)]
        made = {name: _signature_in(found, name) for name in names}
        return {name: parameters for name, parameters in made.items() if parameters is not None}

    def abstract(self, at: str) -> Collection[str]:
        return getattr(_get(at), "__abstractmethods__", ())

    def values(self, at: str) -> Mapping[str, str] | None:
        found = _get(at)
        if not (inspect.isclass(found) and issubclass(found, enum.Enum)):
            return None
        return {item.name: _text(item.value) for item in found}

    def choices(self, at: str) -> Collection[str] | None:
        found = _get(at)
        return None if found is None else [str(choice) for choice in typing.get_args(found)]

    def attributes(self, at: str) -> Collection[str] | None:
        """By the text of the class and its bases: there is no instance to look at."""
        found = _get(at)
        if found is None:
            return None
        names: set[str] = set()
        for owner in found.__mro__:
            try:
                text = textwrap.dedent(inspect.getsource(owner))
            except (OSError, TypeError):
                continue
            node = ast.parse(text).body[0]
            assert isinstance(node, ast.ClassDef)
            names.update(attribute_names(node))
        return names


def _get(at: str) -> Any:
    """The object, or None if there is none."""
    module, _, name = at.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        return None
    for part in name.split("."):
        found = getattr(found, part, None)  # type: ignore[assignment]
    return found


def _signature_in(owner: type, name: str) -> Parameters | None:
    static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    item = inspect.getattr_static(owner, name)
    item = item.__func__ if isinstance(item, staticmethod | classmethod) else item
    return _signature(item, method=not static)


def _signature(function: Any, *, method: bool) -> Parameters | None:
    """Parameters without the first one of a method; None for what has no signature."""
    bound = inspect.ismethod(function)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    stars: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    found: Parameters = {}
    for parameter in list(signature.parameters.values())[1 if method and not bound else 0 :]:
        default = parameter.default
        text = None if default is inspect.Parameter.empty else _text(default)
        found[stars.get(parameter.kind, "") + parameter.name] = text
    return found


def _fields(owner: Any) -> Parameters | None:
    if dataclasses.is_dataclass(owner):
        return {
            field.name: _default(field.default, field.default_factory, dataclasses.MISSING)
            for field in dataclasses.fields(owner)
            if field.init
        }
    if hasattr(owner, "__struct_fields__"):
        import msgspec

        return {
            field.name: _default(field.default, field.default_factory, msgspec.NODEFAULT)
            for field in msgspec.structs.fields(owner)
        }
    if hasattr(owner, "model_fields"):
        return {name: _pydantic(field) for name, field in owner.model_fields.items()}
    if hasattr(owner, "_fields"):
        given = owner._field_defaults
        return {n: _text(given[n]) if n in given else None for n in owner._fields}
    return None


def _default(default: Any, factory: Any, missing: Any) -> str | None:
    if factory is not missing and factory is not None:
        return factory_text(getattr(factory, "__name__", "factory"))
    if default is missing:
        return None
    # A pydantic dataclass keeps pydantic's record of a field as the field's default.
    return _pydantic(default) if type(default).__name__ == "FieldInfo" else _text(default)


def _pydantic(field: Any) -> str | None:
    if field.is_required():
        return None
    if field.default_factory is not None:
        return factory_text(getattr(field.default_factory, "__name__", "factory"))
    return _text(field.default)


def _text(value: Any) -> str:
    """The text of a default as `contract.canonical` would write it."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    try:
        return canonical(ast.parse(repr(value), mode="eval").body)
    except SyntaxError:
        return repr(value)
