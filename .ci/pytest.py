"""Run the test-suite: first what may run beside other tests, on several cores, then what must not.

    python .ci/pytest.py [pytest's arguments]

Tests marked `alone` measure time, or fill the machine by themselves. Both parts run whatever comes
of the first, unless that was told to stop (-x); the exit status is pytest's, of the first part that
failed.
"""

from __future__ import annotations

import os
import subprocess
import sys

MOST = 4
"""Processes at a time: more gain little, and each takes the memory of a whole suite. Two for each
core, since what starts servers mostly waits for them."""
NONE_CHOSEN = 5
"""pytest's exit status when the arguments leave no test over."""
STOP = {"-x", "--exitfirst", "--maxfail=1"}


def cores() -> int:
    """That this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def part(name: str, *arguments: str) -> int:
    """Run one part; `tests/support/parts.py` leaves out the other's tests."""
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, env=os.environ | {"PDSERVE_TEST_PART": name}).returncode


def main(arguments: list[str]) -> int:
    """The exit status."""
    together = ("-n", str(min(2 * cores(), MOST)), "--dist", "loadfile", "--no-loadscope-reorder")
    first = part("together", *together, *arguments)
    if first not in (0, NONE_CHOSEN) and STOP & set(arguments):
        return first
    second = part("alone", *arguments)
    failed = [status for status in (first, second) if status not in (0, NONE_CHOSEN)]
    if failed:
        return failed[0]
    return NONE_CHOSEN if first == second == NONE_CHOSEN else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
