"""Does the test of a field notice if the field is not there?

    python -m tests.protocols.without [FIELD ...]

Runs the test that `test_fields_page.TRIED` names for each field while the field reads as absent, in
the test's own process and in the servers it starts; says which tests pass all the same. Exits with
1 if any does. A minute or several: it is no part of the suite.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.protocols.test_fields_page import ROOT, TRIED

CUSTOM: Final = '''
import os, sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

FIELD = os.environ["TEST_WITHOUT_FIELD"]


class Blind(MetaPathFinder):
    """Makes a field of the requests read as null once their records are there."""

    def find_spec(self, name, path, target=None):
        if name != "pdserve.protocols.completion_requests":
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                break
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            for record in (module.ChatRequest, module.CompletionRequest):
                if FIELD in record.__struct_fields__:
                    setattr(record, FIELD, property(lambda self: None))

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Blind())
'''


def notices(field: str, folder: Path) -> bool:
    """Whether its test fails without it."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": path, "TEST_WITHOUT_FIELD": field}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", TRIED[field]]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if ended.returncode not in (0, 1):
        raise RuntimeError(f"{field}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return ended.returncode == 1


def main(fields: list[str]) -> int:
    """Try these fields, or all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(CUSTOM)
        blind = []
        for field in fields or TRIED:
            noticed = notices(field, folder)
            print(f"{field}: {'noticed' if noticed else 'PASSES WITHOUT IT'}", flush=True)
            if not noticed:
                blind.append(field)
    print(f"{len(fields or TRIED) - len(blind)} noticed, {len(blind)} not: {', '.join(blind)}")
    return bool(blind)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
