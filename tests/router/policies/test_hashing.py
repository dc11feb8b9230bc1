"""A key's home moves only when it must."""

from __future__ import annotations

from collections import Counter

from pdserve.router.policies.hashing import home, key_of
from tests.router.policies.support import worker

WORKERS = [worker(f"w{i}") for i in range(8)]
KEYS = [key_of(str(i).encode()) for i in range(2000)]


def test_homes_are_spread():
    homes = Counter(home(key, WORKERS).node for key in KEYS)
    assert len(homes) == 8
    assert max(homes.values()) < 2 * min(homes.values())


def test_order_does_not_matter():
    assert all(home(key, WORKERS) is home(key, WORKERS[::-1]) for key in KEYS)


def test_a_worker_that_goes_gives_up_only_its_own():
    left = WORKERS[1:]
    for key in KEYS:
        before = home(key, WORKERS)
        assert before is WORKERS[0] or home(key, left) is before
