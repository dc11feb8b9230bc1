"""Ids and lives of nodes."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from pdserve import ids
from pdserve.ids import NodeId, NodeLife, new_random, new_request_id, new_seed

if TYPE_CHECKING:
    import pytest


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


def test_random_numbers_are_taken_from_the_system_many_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def urandom(size: int) -> bytes:
        sizes.append(size)
        return secrets.token_bytes(size)

    monkeypatch.setattr(os, "urandom", urandom)
    monkeypatch.setattr(ids, "_random", [])
    drawn = {new_random() for _ in range(1000)}
    assert len(drawn) == 1000
    assert {len(one) for one in drawn} == {12}
    assert len(sizes) == 4


def test_a_child_process_draws_its_own_numbers() -> None:
    new_random()
    coming, going = os.pipe()
    child = os.fork()
    if not child:
        os.write(going, new_random())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(coming, 12)
    os.close(coming)
    os.close(going)
    assert len(theirs) == 12
    assert theirs not in ids._random
