"""The two parts in which `make test` runs the suite: together on several cores, then alone.

`.ci/pytest.py` runs one after the other, naming each by `PDSERVE_TEST_PART`; without that pytest
runs everything. A test marked `alone` measures time, or fills the machine by itself.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

PART = os.environ.get("PDSERVE_TEST_PART", "")
"""`together`, `alone`, `vllm` (what runs with the real vLLM, beside `together`), or empty: all."""
PROCESSES = 5
"""Most processes that run tests at the same time: four together, and one with vLLM."""


def belongs(part: str, alone: bool) -> bool:
    """Whether this part takes a test that must be alone, or need not."""
    return part in ("", "vllm") or alone == (part == "alone")


def worker_number() -> int:
    """The number of this process among those that run tests at the same time, below `PROCESSES` as
    `make test` starts them."""
    if PART == "vllm":
        return PROCESSES - 1
    name = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    return int(name.removeprefix("gw"))


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the other part's tests."""
    others = [i for i in items if not belongs(PART, i.get_closest_marker("alone") is not None)]
    if others:
        config.hook.pytest_deselected(items=others)
        gone = set(others)
        items[:] = [item for item in items if item not in gone]


def limit_of(item: pytest.Item) -> float:
    """Seconds that the mark `timeout` of this test allows; 0 without one."""
    marker = item.get_closest_marker("timeout")
    if marker is None or not marker.args:
        return 0.0
    return float(marker.args[0]) or math.inf


def long_files_first(items: list[pytest.Item]) -> None:
    """Order the files of the part `together` by the longest time limit in each.

    A file runs on one process: a long one that starts last leaves all other processes idle. Files
    with equal limits, and tests of one file, keep their order.
    """
    if PART != "together":
        return
    limits: dict[str, float] = {}
    for item in items:
        file = item.nodeid.partition("::")[0]
        limits[file] = max(limits.get(file, 0.0), limit_of(item))
    items.sort(key=lambda item: -limits[item.nodeid.partition("::")[0]])
