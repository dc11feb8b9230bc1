"""Finds downloaded wheels, and runs single modules of one without installing it.

PDSERVE_WHEELS names the folder; without it, `~/.cache/pdserve/wheels`. A wheel gets there by
`pip download --no-deps sglang==0.5.23`.
"""

from __future__ import annotations

import os
import sys
import zipfile
from contextlib import contextmanager
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
