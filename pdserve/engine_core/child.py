"""Entry point of the engine process: leaves signals to the node, before it imports anything.

A terminal sends Ctrl-C to every process of its group. One that still imports would end with a stack
trace, beside the node's orderly end.
"""

from __future__ import annotations

import signal
import sys

__all__ = ["main"]


def main() -> int:
    """Run `pdserve.engine_core.main`; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from pdserve.engine_core.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
