"""Runs a fuzz target coverage-guided; the only file here that needs `atheris` (and says so).

    python -m tests.fuzz frames -max_total_time=300 [corpus/]
    python -m tests.fuzz --engine=atheris frames --seconds 300

Targets are the files `fuzz_*.py`: each has a function `fuzz` of one input and a list of `seeds`,
which are the corpus if none is given. Flags are libFuzzer's; it prints what it executed, and leaves
an input that fails in the current folder. `make test` runs the same functions without it.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["main"]


def main() -> None:
    """Fuzz the target that the command line names; does not return."""
    name, *flags = _arguments(sys.argv[1:]) or sys.exit(__doc__)
    try:
        atheris: Any = importlib.import_module("atheris")
    except ModuleNotFoundError:
        sys.exit("atheris is not installed; the tests named test_fuzz.py run the targets without")
    with atheris.instrument_imports(include=["pdserve", "tests.fuzz"]):
        target = importlib.import_module(f"tests.fuzz.fuzz_{name}")
    for function in _functions():
        atheris.instrument_func(function)
    if all(flag.startswith("-") for flag in flags):
        # Decoders are compiled: a seed that shows no coverage of its own is worth keeping too.
        flags += ["-keep_seed=1", _folder_of(target.seeds())]
    atheris.Setup([sys.argv[0], *flags], target.fuzz)
    atheris.Fuzz()


def _functions() -> Iterator[FunctionType]:
    """All of pdserve's that are loaded and not watched yet: an editable install has a loader of its
    own, past which the one of atheris does not get."""
    for name, module in list(sys.modules.items()):
        if name.startswith("pdserve"):
            kinds = [kind for kind in vars(module).values() if isinstance(kind, type)]
            for holder in (module, *kinds):
                for found in vars(holder).values():
                    if isinstance(found, FunctionType) and found.__module__ == name:
                        yield found


def _arguments(given: list[str]) -> list[str]:
    """The target, then libFuzzer's flags."""
    left = [one for one in given if one != "--engine=atheris"]  # there is no other
    if "--seconds" in left:
        at = left.index("--seconds")
        left[at : at + 2] = [f"-max_total_time={int(left[at + 1])}"]
    return left


def _folder_of(seeds: list[bytes]) -> str:
    """A new corpus. It stays, so that a second run may go on from it."""
    folder = Path(tempfile.mkdtemp(prefix="corpus-"))
    for number, seed in enumerate(seeds):
        (folder / f"seed-{number}").write_bytes(seed)
    return str(folder)
