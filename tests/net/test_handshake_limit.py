"""There are never more unfinished handshakes than the bound, and the busiest host pays first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.net.handshake_limit import PendingHandshakes


def test_the_busiest_host_loses_its_oldest() -> None:
    pending: PendingHandshakes[str] = PendingHandshakes(4)
    for key, host in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("a3", "a")):
        assert pending.add(key, host) is None
    assert pending.add("b2", "b") == "a1"
    assert pending.add("c1", "c") == "a2"
    assert pending.evicted == 2
    assert sorted(pending.drain()) == ["a3", "b1", "b2", "c1"]
    assert len(pending) == 0


def test_a_flood_from_one_host_does_not_touch_another() -> None:
    pending: PendingHandshakes[int] = PendingHandshakes(10)
    pending.add(-1, "good")
    evicted = [pending.add(number, "bad") for number in range(1000)]
    assert -1 not in evicted
    assert -1 in pending.drain()


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abc"), st.booleans())))
def test_the_bound_holds_and_nothing_is_forgotten(steps) -> None:
    pending: PendingHandshakes[tuple[int, str]] = PendingHandshakes(5)
    present: dict[tuple[int, str], None] = {}
    for number, host, add in steps:
        key = (number, host)
        if add and key not in present:
            victim = pending.add(key, host)
            if victim is not None:
                del present[victim]
            present[key] = None
        elif not add:
            pending.remove(key, host)
            present.pop(key, None)
        assert len(pending) == len(present) <= 5
    assert set(pending.drain()) == set(present)
