"""A real Slurm of one node, and `pdserve` in one word, for all tests here."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.slurm import Slurm, why_not

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """One for all tests here."""
    if (why := why_not()) is not None:
        pytest.skip(why)
    with Slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`pdserve` in one word, from this very checkout."""
    path = tmp_path_factory.mktemp("bin") / "pdserve"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m pdserve "$@"\n')
    path.chmod(0o755)
    return path
