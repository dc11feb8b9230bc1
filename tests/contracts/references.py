"""Looks names up in TensorRT-LLM's own manifests of its interface.

Its repository keeps one YAML file per class under `tests/unittest/api_stability/`: `references/`
holds what may still change, `references_committed/` what may not; together they are the class. An
entry of our data file names its manifest in `source`. Names without one are read as source text.
"""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.contracts.contract import Parameters, canonical
from tests.contracts.source import SourceReader

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from tests.contracts.contract import Contract

_FOLDER = Path("tests/unittest/api_stability")
_MANIFEST = re.compile(r"api_stability/\w+/(\w+)\.yaml")


class ReferenceReader:
    """Reads a checkout of TensorRT-LLM, or a folder with only its manifests."""

    def __init__(self, path: Path, contract: Contract) -> None:
        self._source = SourceReader(path)
        self._path = path
        self._stems = {
            entry.at: found[1]
            for entry in contract.entries
            if (found := _MANIFEST.search(entry.source))
        }
        self._methods_of = cache(self._read)

    def close(self) -> None:
        """Close what is open."""
        self._source.close()

    def exists(self, at: str) -> bool:
        if at not in self._stems:
            return self._source.exists(at)
        has = self._methods_of(self._stems[at])
        return _last(at) in has if "." in at.partition(":")[2] else bool(has)

    def fields(self, at: str) -> Parameters | None:
        return self.parameters(at) if at in self._stems else self._source.fields(at)

    def fields_of_package(self, package: str) -> Parameters | None:
        return self._source.fields_of_package(package)

    def parameters(self, at: str) -> Parameters | None:
        if at not in self._stems:
            return self._source.parameters(at)
        name = _last(at) if "." in at.partition(":")[2] else "__init__"
        return self._methods_of(self._stems[at]).get(name)

    def methods(self, at: str) -> Mapping[str, Parameters] | None:
        if at not in self._stems:
            return self._source.methods(at)
        return self._methods_of(self._stems[at])

    def abstract(self, at: str) -> Collection[str]:
        return self._source.abstract(at)

    def values(self, at: str) -> Mapping[str, str] | None:
        return self._source.values(at)

    def choices(self, at: str) -> Collection[str] | None:
        return self._source.choices(at)

    def attributes(self, at: str) -> Collection[str] | None:
        if at not in self._stems:
            return self._source.attributes(at)
        return self._properties(self._stems[at])

    # ------------------------------------------------------------------ the manifests

    def _contents(self, stem: str) -> list[dict[str, Any]]:
        """Both manifests of a class; what is not committed comes last and wins."""
        # No stubs for mypy; PyYAML is in every environment that has huggingface-hub.
        yaml: Any = importlib.import_module("yaml")
        folders = ("references_committed", "references")
        paths = [self._path / _FOLDER / folder / f"{stem}.yaml" for folder in folders]
        return [yaml.safe_load(p.read_text(encoding="utf-8")) for p in paths if p.is_file()]

    def _read(self, stem: str) -> dict[str, Parameters]:
        found: dict[str, Parameters] = {}
        for content in self._contents(stem):
            for method, about in (content.get("methods") or {}).items():
                parameters = found.setdefault(method, {})
                for name, said in (about.get("parameters") or {}).items():
                    # A manifest writes `**kwargs` without its stars.
                    parameters["**kwargs" if name == "kwargs" else name] = _default(said)
        return found

    def _properties(self, stem: str) -> set[str]:
        """Properties, and what the constructor keeps."""
        contents = self._contents(stem)
        names = {name for content in contents for name in (content.get("properties") or {})}
        return names | self._methods_of(stem).get("__init__", {}).keys()


def _last(at: str) -> str:
    return at.rpartition(".")[2]


def _default(said: Mapping[str, Any]) -> str | None:
    """`inspect._empty` in a manifest means that there is none, and the text `None` is None."""
    value = said["default"]
    if value == "inspect._empty":
        return None
    return "None" if value == "None" else canonical(ast.parse(repr(value), mode="eval").body)
