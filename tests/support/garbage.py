"""Finds what only the garbage collector frees: our objects in cycles that nobody holds.

A collection over all generations is rare in a server, so what is left in cycles by each request
adds up to many megabytes until it comes.
"""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def uncollected() -> Iterator[Counter[str]]:
    """At the end of the block its value has our classes of which it left unreachable objects, and
    how many. What was there before does not count."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()  # so that what is new stays in the youngest generation
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect(1)  # what is new only: all else may be a million objects
        found.update(_name(each) for each in gc.garbage if _is_ours(each))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def _is_ours(found: object) -> bool:
    return type(found).__module__.startswith("pdserve.")


def _name(found: object) -> str:
    return type(found).__qualname__
