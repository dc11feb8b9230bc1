"""What every test gets: leak checks, a seed, uvloop, Hypothesis settings for shared machines."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.support.leaks import (
    no_leaked_resources,
    no_leaked_tasks,
    tasks_end_with_the_test,
    watch_blocks,
)
from tests.support.loops import pytest_asyncio_loop_factories
from tests.support.seeds import (
    is_long,
    long,
    pytest_collection_modifyitems,
    pytest_report_header,
    seed,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "long",
    "no_leaked_resources",
    "no_leaked_tasks",
    "pytest_asyncio_loop_factories",
    "pytest_collection_modifyitems",
    "pytest_report_header",
    "seed",
    "tasks_end_with_the_test",
    "watch_blocks",
]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without garbage collections: nearly all that is made stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Take what the collection has made out of the garbage collector's sight: twenty thousand tests
    and all that they import make each full collection of a test cost half a second."""
    gc.collect()
    gc.freeze()


# No per-example deadline, and no check of how fast or how large the first examples are: a busy
# neighbour on the machine, or what a seed draws, is not a bug of ours.
UNCHECKED = (
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.filter_too_much,
    HealthCheck.large_base_example,
)
settings.register_profile("short", deadline=None, print_blob=True, suppress_health_check=UNCHECKED)
settings.register_profile("long", settings.get_profile("short"), max_examples=2000)
settings.load_profile("long" if is_long() else "short")
