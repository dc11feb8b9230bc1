"""Ids and lives of nodes."""

from __future__ import annotations

from pdserve.ids import NodeId, NodeLife, new_request_id, new_seed


def test_a_life_is_the_tuple_of_its_node_and_epoch() -> None:
    """Sets of lives keep the order that they had as bare tuples: seeds repeat."""
    life = NodeLife(NodeId("worker-1"), 1700)
    assert life == ("worker-1", 1700)
    assert hash(life) == hash(("worker-1", 1700))
    assert life < NodeLife(NodeId("worker-1"), 1701) < NodeLife(NodeId("worker-2"), 1)


def test_a_life_is_shown_as_node_and_epoch() -> None:
    assert f"{NodeLife(NodeId('worker-1'), 1700)}" == "worker-1/1700"


def test_fresh_ids_differ() -> None:
    assert new_request_id() != new_request_id()
    assert 0 <= new_seed() < 2**63
