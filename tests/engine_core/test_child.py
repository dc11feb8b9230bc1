"""The engine process ignores what a terminal sends, from its beginning."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import signal, sys, types

fake = types.ModuleType("pdserve.engine_core.main")


def run():
    both = (signal.SIGINT, signal.SIGTERM)
    ignored = [signal.getsignal(one) is signal.SIG_IGN for one in both]
    print(ignored, sorted(name for name in sys.modules if "engine_core." in name))
    return 5


fake.main = run
sys.modules["pdserve.engine_core.main"] = fake
from pdserve.engine_core import child

sys.exit(child.main())
"""


def test_signals_are_ignored_before_anything_else_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == 5
    assert done.stdout == (
        "[True, True] ['pdserve.engine_core.child', 'pdserve.engine_core.main']\n"
    )
