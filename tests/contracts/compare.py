"""Says how an engine's release differs from what the adapters use.

Pure: a `Reader` looks names up, in an installed package, in source text or in a manifest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tests.contracts.contract import ANY

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from tests.contracts.contract import Contract, Entry, Parameters


class Reader(Protocol):
    """Looks up names of one release. Each method returns None if there is no such name, and raises
    `NotImplementedError` if this reader cannot see that kind of member."""

    def exists(self, at: str) -> bool: ...
    def fields(self, at: str) -> Parameters | None: ...
    def fields_of_package(self, package: str) -> Parameters | None: ...
    def parameters(self, at: str) -> Parameters | None: ...
    def methods(self, at: str) -> Mapping[str, Parameters] | None: ...
    def abstract(self, at: str) -> Collection[str]: ...
    def values(self, at: str) -> Mapping[str, str] | None: ...
    def choices(self, at: str) -> Collection[str] | None: ...
    def attributes(self, at: str) -> Collection[str] | None: ...


def differences(contract: Contract, reader: Reader) -> list[str]:
    """All differences, one line each, in the order of the data file."""
    found: list[str] = []
    for entry in contract.entries:
        lines = [f"gone: {entry.at}"] if not reader.exists(entry.at) else _of(entry, reader)
        found += [f"{line}  ({entry.use})" if entry.use else line for line in lines]
    return found


def _of(entry: Entry, reader: Reader) -> Iterator[str]:
    at = entry.at
    if entry.fields is not None:
        has = reader.fields_of_package(entry.fields_from) if entry.fields_from else None
        yield from _fields(entry, reader.fields(at) if has is None else has)
    if entry.parameters is not None:
        new = entry.implemented
        yield from _parameters(at, entry.parameters, reader.parameters(at), new=new)
    if entry.methods is not None:
        yield from _methods(entry, reader)
    if entry.values is not None:
        yield from _values(entry, reader.values(at))
    if entry.choices is not None:
        yield from _missing(at, entry.choices, reader.choices(at))
    if entry.attributes is not None:
        yield from _missing(at, entry.attributes, reader.attributes(at))


def _fields(entry: Entry, has: Parameters | None) -> Iterator[str]:
    assert entry.fields is not None
    yield from _parameters(entry.at, entry.fields, has, new=False)
    if not entry.ordered or has is None:
        return
    wanted, order = list(entry.fields), list(has)
    for place, name in enumerate(wanted):
        if name in has and order.index(name) != place:
            yield f"moved: {entry.at}.{name} from place {place} to {order.index(name)}"


def _parameters(at: str, used: Parameters, has: Parameters | None, *, new: bool) -> Iterator[str]:
    """`new`: a parameter that is not in `used` is a difference even if it is optional."""
    if has is None:
        yield f"unreadable: {at} has no parameters any more"
        return
    for name, default in used.items():
        if name not in has:
            yield f"gone: {at}.{name}"
        elif default == ANY and has[name] is None:
            yield f"default changed: {at}.{name} had one, is required"
        elif default != ANY and default != has[name]:
            yield f"default changed: {at}.{name} was {_said(default)}, is {_said(has[name])}"
    for name, default in has.items():
        if name in used or (name.startswith("*") and not new):
            continue
        if default is None:
            yield f"new required parameter: {at}.{name}"
        elif new:
            yield f"new parameter: {at}.{name} = {default}"


def _said(default: str | None) -> str:
    return "required" if default is None else default


def _methods(entry: Entry, reader: Reader) -> Iterator[str]:
    assert entry.methods is not None
    has = reader.methods(entry.at) or {}
    for name, parameters in entry.methods.items():
        if name not in has:
            yield f"gone: {entry.at}.{name}"
        else:
            at = f"{entry.at}.{name}"
            yield from _parameters(at, parameters, has[name], new=entry.implemented)
    if entry.implemented:
        for name in sorted(set(reader.abstract(entry.at)) - entry.methods.keys()):
            yield f"new abstract method: {entry.at}.{name}"


def _values(entry: Entry, has: Mapping[str, str] | None) -> Iterator[str]:
    assert entry.values is not None
    has = has or {}
    for name, value in entry.values.items():
        if name not in has:
            yield f"gone: {entry.at}.{name}"
        elif value != ANY and value != has[name]:
            yield f"value changed: {entry.at}.{name} was {value}, is {has[name]}"
    if not entry.partial:
        for name in has.keys() - entry.values.keys():
            yield f"new value: {entry.at}.{name} = {has[name]}"


def _missing(at: str, used: Collection[str], has: Collection[str] | None) -> Iterator[str]:
    for name in used:
        if has is None or name not in has:
            yield f"gone: {at}.{name}"
