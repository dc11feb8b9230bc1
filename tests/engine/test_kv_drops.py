"""Orders to forget KV and their answers pass by number, within one life of the core."""

from __future__ import annotations

import pytest

from pdserve.engine.kv_drops import MOST_ORDERS, KvDrops
from pdserve.errors import ConfigError, EngineDied, Overloaded
from pdserve.messages.engine import DropKv, KvDropped


class Orders:
    """Orders, and all that passes over them."""

    def __init__(self) -> None:
        self.posted: list[object] = []
        self.drops = KvDrops()

    def order(self, *owners: str, older: float = 0.0) -> list[object]:
        answers: list[object] = []
        self.drops.order(self.posted.append, owners or None, older, answers.append)
        return answers


def test_each_order_gets_its_answer_once() -> None:
    o = Orders()
    first, second = o.order(), o.order("tenant:t", older=9.0)
    assert o.posted == [DropKv(1), DropKv(2, ("tenant:t",), 9.0)]
    o.drops.take(KvDropped(2, {"disk": 5}))
    assert (first, second) == ([], [{"disk": 5}])
    o.drops.take(KvDropped(1, {}, "ConfigError", "all or nothing"))
    o.drops.take(KvDropped(1, {"disk": 1}))
    (error,) = first
    assert isinstance(error, ConfigError)
    assert error.message == "all or nothing"


def test_orders_end_with_the_core_and_late_answers_are_dropped() -> None:
    o = Orders()
    answers = o.order()
    died = EngineDied("killed")
    o.drops.end(died)
    o.drops.end(died)
    o.drops.take(KvDropped(1, {"disk": 1}))
    assert answers == [died]


def test_waiting_orders_are_bounded() -> None:
    o = Orders()
    for _ in range(MOST_ORDERS):
        o.order()
    with pytest.raises(Overloaded, match="64 orders to drop KV wait"):
        o.order()
    o.drops.take(KvDropped(1))
    assert o.order() == []
