"""What each role imports until it listens and has joined. A heavy import there delays every start.

Each role runs as a process that reports its imports in order.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.e2e.server import Server

if TYPE_CHECKING:
    from pathlib import Path

ENGINES = {"numpy", "torch", "pdserve_engines", "pdserve.engine_core.core", "pdserve.kv.block_pool"}
"""For the engine process."""
MODELS = {"jinja2", "tokenizers", "pdserve.text.chat.chat_template"}
"""For a model that is served, once a worker has told of it."""
HTTP = {"aiohttp", "pdserve.frontend.service"}
METADATA = {"importlib.metadata", "email.message"}
"""To look for what other packages add."""
OTHERS = {"multiprocessing", "xml", "unittest", "pdserve.sim", "pdserve.testing", "pdserve.client"}
FORBIDDEN = {
    "router": ENGINES | MODELS | HTTP | OTHERS | {"pdserve.engine.client"},
    "worker": ENGINES | MODELS | HTTP | OTHERS | METADATA | {"pdserve.router.core"},
    "frontend": ENGINES | MODELS | OTHERS | {"pdserve.router.core", "pdserve.worker.service"},
}
"""Modules that a role leaves alone; a package stands for all within it."""
IMPORTED = re.compile(r"import time: +\d+ \| +\d+ \| +(\S+)")


class Reporting(Server):
    """A role as a process that writes each import to its standard error."""

    def __init__(self, role: str, home: Path) -> None:
        super().__init__(None, "--role", role, "--engine", "instant", HOME=str(home))
        self._command[1:1] = ["-X", "importtime"]
        self._command += ["--listen", "127.0.0.1:0"]


def imports(role: str, home: Path) -> set[str]:
    """The modules of a process of this role, until it has joined."""
    joined = rf" {role} {role}\S* at "
    with Reporting(role, home) as server:
        server.wait_for_line(joined)
        lines = list(server.lines)
    until = next(place for place, line in enumerate(lines) if re.search(joined, line))
    return {match[1] for line in lines[:until] if (match := IMPORTED.match(line))}


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


@pytest.mark.parametrize("role", FORBIDDEN)
def test_a_role_starts_without_what_it_needs_later_or_never(role: str, tmp_path: Path) -> None:
    found = imports(role, tmp_path)
    assert f"pdserve.launch.roles.{role}" in found
    heavy = {m for m in found for package in FORBIDDEN[role] if within(m, package)}
    assert not heavy, sorted(heavy)
