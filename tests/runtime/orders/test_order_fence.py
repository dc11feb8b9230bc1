from __future__ import annotations

from pdserve.runtime.orders.order_fence import OrderFence


def test_only_orders_as_late_as_the_last_one_are_obeyed() -> None:
    fence = OrderFence()
    assert not fence.refusal(5, 1)
    fence.obeyed(5, 2)
    assert not fence.refusal(5, 2)  # repeated, because its answer was lost
    assert not fence.refusal(5, 3)
    assert not fence.refusal(6, 1)
    assert fence.refusal(5, 1) == (
        "stale: a later planner has ordered it (plan 2 of term 5, and this is plan 1 of term 5)"
    )
    assert "plan 9 of term 4" in fence.refusal(4, 9)
    assert fence.newest == 5


def test_an_operators_order_is_never_late_and_makes_no_other_late() -> None:
    fence = OrderFence()
    fence.obeyed(5, 2)
    assert not fence.refusal(0, 0)
    fence.obeyed(0, 0)
    assert fence.refusal(5, 1)
    fence.obeyed(4, 9)
    assert fence.refusal(5, 1)
