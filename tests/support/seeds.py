"""Where tests get their randomness from, and which of the long suites a run takes.

`PDSERVE_TEST_SEED` (the Makefile passes the commit) drives both, so a failure is repeated by its
value and consecutive commits walk through all the long suites. `PDSERVE_TEST_LONG=1` takes
everything, and gives each test more time.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from random import Random
from typing import TYPE_CHECKING, TypeVar

import pytest

from tests.support import parts

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

SLICES = 10
"""`make test` runs one in SLICES of the tests marked `long`, unless their mark says otherwise."""
LONG_LIMIT = 900.0
"""Seconds that each test has at least in long mode: it takes up to twenty times the examples, and
other work may have most of the machine."""


def run_seed() -> str:
    """The seed of this run, as given."""
    return os.environ.get("PDSERVE_TEST_SEED", "0")


def is_long() -> bool:
    """Whether this run has no time budget."""
    return os.environ.get("PDSERVE_TEST_LONG", "") not in ("", "0")


def number_for(*names: str) -> int:
    """A 64-bit number that depends on the names and on nothing else."""
    return int.from_bytes(blake2b("\0".join(names).encode(), digest_size=8).digest(), "little")


def in_slice(nodeid: str, seed: str, one_in: int = SLICES) -> bool:
    """Whether a run with this seed takes this long test; each seed takes about 1 in `one_in`."""
    return (number_for(nodeid) + number_for(seed)) % one_in == 0


def is_in_slice(item: pytest.Item, seed: str) -> bool:
    """Whether a run with this seed takes this test. `long(whole_file=True)` marks files whose
    set-up costs more than their tests: all of their tests are taken, or none. `long(one_in=3)`
    has a turn more often than the others. `long(one_in=8, turn=3)`: no run takes it together with
    another turn of eight, so that dear files do not meet."""
    marker = item.get_closest_marker("long")
    if marker is None:
        return True
    if "turn" in marker.kwargs:
        return number_for(seed) % int(marker.kwargs["one_in"]) == marker.kwargs["turn"]
    name = item.nodeid.partition("::")[0] if marker.kwargs.get("whole_file") else item.nodeid
    return in_slice(name, seed, marker.kwargs.get("one_in", SLICES))


def extend_limits(items: list[pytest.Item]) -> None:
    """Give each test `LONG_LIMIT` unless its mark gives more, or gives no limit (0)."""
    for item in items:
        marker = item.get_closest_marker("timeout")
        if marker is None or 0 < marker.args[0] < LONG_LIMIT:
            item.add_marker(pytest.mark.timeout(LONG_LIMIT), append=False)


def drawn(values: Sequence[T], count: int, name: str) -> list[T]:
    """`count` of the values in their order, others with every commit; all in long mode. For the
    parameters of a test, when the values beside each other go the same ways. `name` tells one draw
    from another."""
    if is_long():
        return [*values]
    chosen = Random(number_for(run_seed(), name)).sample(range(len(values)), count)
    return [values[index] for index in sorted(chosen)]


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """This test's own seed in [0, 2**64): another per test and per run, the same when repeated."""
    return number_for(run_seed(), request.node.nodeid)


@pytest.fixture
def long() -> bool:
    """True without a time budget: take more examples, longer worlds, more rounds."""
    return is_long()


def pytest_report_header() -> str:
    """Say how to repeat this run."""
    length = "every long suite" if is_long() else f"1 in {SLICES} of the long suites"
    return f"pdserve: PDSERVE_TEST_SEED={run_seed()}, {length}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long tests that are not this run's, unless one was asked for by name, and what
    is not of this run's part; then order the files."""
    parts.leave_out(config, items)
    if is_long() and config.getoption("timeout", None) is None:
        extend_limits(items)
    if not is_long() and not any("::" in argument for argument in config.args):
        leave_out_long(config, items)
    parts.long_files_first(items)


def leave_out_long(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the long tests that are not in this run's slice."""
    left_out = [item for item in items if not is_in_slice(item, run_seed())]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
