"""What every test gets: leak checks, a seed, uvloop, Hypothesis settings for shared machines."""

from __future__ import annotations

from hypothesis import settings

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

# No per-example deadline: a busy neighbour on the machine is not a bug of ours.
settings.register_profile("short", deadline=None, print_blob=True)
settings.register_profile("long", deadline=None, print_blob=True, max_examples=2000)
settings.load_profile("long" if is_long() else "short")
