"""No client's structure costs the loop: requests of four kilobytes that ask for all they can.

`stalls` sends them to a frontend in a process of its own, and measures in processor time.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.frontend.stalls import PLANTED

ROOT = Path(__file__).parents[2]
FINDS = 5
"""A seed whose requests find every bug that is planted."""


def run(seed: int, count: int, *planted: str) -> tuple[int, str]:
    """The program's end, and what it said."""
    command = [sys.executable, "-m", "tests.frontend.stalls", str(seed), str(count), *planted]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr[-4000:]


@pytest.mark.alone
@pytest.mark.timeout(900)
def test_no_request_of_four_kilobytes_stops_the_loop_or_fills_memory(seed: int, long: bool):
    code, said = run(seed, 10_000 if long else 300)
    assert (code, "all were cheap" in said) == (0, True), f"seed {seed}\n{said}"


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str):
    code, said = run(FINDS, 2000, bug)
    assert code != 0, said
