"""Runs a fuzz target coverage-guided; the only file here that needs `atheris` (and says so)."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["run"]


def run(target: Callable[[bytes], None]) -> None:
    """Fuzz `target` with libFuzzer's flags from the command line; does not return."""
    try:
        atheris = importlib.import_module("atheris")
    except ModuleNotFoundError:
        sys.exit("atheris is not installed; tests/wire/test_fuzz.py runs the targets without it")
    atheris.instrument_all()
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()
