"""Finds downloaded wheels, and runs single modules of one without installing it.

PDSERVE_WHEELS names the folder; without it, `~/.cache/pdserve/wheels`. A wheel gets there by
`pip download --no-deps sglang==0.5.23`.
"""

from __future__ import annotations

import ast
import os
import sys
import zipfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def find_wheel(package: str, version: str) -> Path:
    """The wheel of a release; skips the test if there is none."""
    folder = os.environ.get("PDSERVE_WHEELS") or Path.home() / ".cache" / "pdserve" / "wheels"
    wheels = sorted(Path(folder).glob(f"{package}-{version}-*.whl"))
    if not wheels:
        pytest.skip(f"no wheel of {package} {version} in {folder}")
    return wheels[0]


@contextmanager
def module_of(
    wheel: Path, name: str, stubs: Mapping[str, Mapping[str, Any]]
) -> Iterator[ModuleType]:
    """Run one module's text; `stubs` stand in for modules of the package that it imports."""
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"{name.replace('.', '/')}.py")
    made = {name: ModuleType(name)} | {stub: ModuleType(stub) for stub in stubs}
    for stub, content in stubs.items():
        vars(made[stub]).update(content)
    before = {each: sys.modules.get(each) for each in made}
    sys.modules.update(made)
    try:
        exec(compile(text, name, "exec"), vars(made[name]))
        yield made[name]
    finally:
        for each, module in before.items():
            if module is None:
                del sys.modules[each]
            else:
                sys.modules[each] = module


@cache
def _body(wheel: Path, module: str) -> list[ast.stmt]:
    with zipfile.ZipFile(wheel) as archive:
        return ast.parse(archive.read(f"{module.replace('.', '/')}.py")).body


def function_of(wheel: Path, at: str, names: Mapping[str, Any]) -> Any:
    """One function or method, `module:Name` or `module:Class.name`, as a plain function.

    `names` are the module's names that it uses; nothing else of the module is run.
    """
    module, _, name = at.partition(":")
    body = _body(wheel, module)
    for part in name.split("."):
        (node,) = [
            each
            for each in body
            if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and each.name == part
        ]
        body = node.body
    space = dict(names)
    text = "from __future__ import annotations\n" + ast.unparse(node)
    exec(compile(text, at, "exec"), space)
    return space[node.name]
