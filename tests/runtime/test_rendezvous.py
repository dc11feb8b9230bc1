from __future__ import annotations

from pdserve.runtime.rendezvous import key_of, score


def test_scores_are_the_same_everywhere() -> None:
    """Nodes of different processes must agree: these are values, not properties."""
    assert score(key_of(b"model"), "r1") == 16447190525321158831


def test_scores_of_one_key_are_independent() -> None:
    """Every order of three nodes comes up about as often."""
    orders: dict[tuple[str, ...], int] = {}
    for n in range(6000):
        key = key_of(str(n).encode())
        order = tuple(sorted(("a", "b", "c"), key=lambda node: score(key, node)))
        orders[order] = orders.get(order, 0) + 1
    assert len(orders) == 6
    assert all(850 < count < 1150 for count in orders.values())
