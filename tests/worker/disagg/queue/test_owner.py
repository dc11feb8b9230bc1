from __future__ import annotations

from typing import Any

import pytest

from pdserve.ids import NodeId
from pdserve.messages.node import NodeCard
from pdserve.runtime.registry import Member
from pdserve.worker.disagg.queue.owner import owner_candidates, queue_owner


def router(node: str, **changes: Any) -> Member:
    fields: dict[str, Any] = {"card": NodeCard(role="router"), **changes}
    return Member(NodeId(node), 1, f"{node}:1", "router", **fields)


ROUTERS = [router(f"r{n}") for n in range(5)]
MODELS = [f"model-{n}" for n in range(500)]


def test_all_that_see_the_same_routers_agree() -> None:
    for model in MODELS:
        assert queue_owner(model, ROUTERS) == queue_owner(model, reversed(ROUTERS))


def test_models_are_shared_out() -> None:
    counts = [sum(queue_owner(model, ROUTERS) is one for model in MODELS) for one in ROUTERS]
    assert all(60 < count < 140 for count in counts)


def test_who_goes_gives_up_only_its_own() -> None:
    gone, *rest = ROUTERS
    for model in MODELS:
        before = queue_owner(model, ROUTERS)
        if before is not gone:
            assert queue_owner(model, rest) is before


def test_a_later_life_owns_the_same() -> None:
    for model in MODELS[:20]:
        lives = [Member(m.node, 2, m.address, m.role, m.card) for m in ROUTERS]
        before, after = queue_owner(model, ROUTERS), queue_owner(model, lives)
        assert before is not None
        assert after is not None
        assert (before.node, after.epoch) == (after.node, 2)


def test_without_routers_there_is_no_owner() -> None:
    assert queue_owner("m", []) is None


@pytest.mark.parametrize("changes", [{"card": None}, {"card": NodeCard(draining=True)}])
def test_who_has_not_settled_or_drains_owns_nothing(changes: dict[str, Any]) -> None:
    assert owner_candidates([router("a", **changes)]) == []


@pytest.mark.parametrize("changes", [{"suspect": True}, {"reachable": False}])
def test_who_is_in_doubt_owns_something_only_if_nobody_else_is_left(
    changes: dict[str, Any],
) -> None:
    doubtful, sound = router("a", **changes), router("b")
    assert owner_candidates([doubtful, sound]) == [sound]
    assert owner_candidates([doubtful]) == [doubtful]


def test_only_routers_are_candidates() -> None:
    worker = Member(NodeId("w"), 1, "w:1", "worker", NodeCard(role="worker"))
    assert owner_candidates([worker]) == []
