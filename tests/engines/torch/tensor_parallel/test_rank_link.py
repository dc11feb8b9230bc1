from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from pdserve.messages.engine import EngineSpec
from pdserve_engines.torch.tensor_parallel.rank_link import (
    AllocatePool,
    LoadRank,
    RankFailed,
    RankLink,
    RankLinkClosed,
    link_pair,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def ends() -> Iterator[tuple[RankLink, RankLink]]:
    ours, socket = link_pair()
    theirs = RankLink(socket)
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_in_order_with_their_descriptors(ends: tuple[RankLink, RankLink]) -> None:
    ours, theirs = ends
    spec = EngineSpec(engine="torch", model="/models/m", tensor_parallel=2)
    reading, writing = os.pipe()
    ours.send(LoadRank(spec, 1, 8.0), [writing])
    ours.send(AllocatePool(7))
    os.close(writing)
    message, fds = theirs.receive(0.0) or (None, [])
    assert message == LoadRank(spec, 1, 8.0)
    assert not os.get_inheritable(fds[0])
    os.write(fds[0], b"hello")
    os.close(fds[0])
    assert os.read(reading, 10) == b"hello"
    os.close(reading)
    assert theirs.receive(0.0) == (AllocatePool(7), [])
    assert theirs.receive(0.0) is None


def test_what_was_said_before_the_end_is_heard(ends: tuple[RankLink, RankLink]) -> None:
    ours, theirs = ends
    theirs.send(RankFailed("no room"))
    theirs.close()
    assert ours.receive(0.0) == (RankFailed("no room"), [])
    with pytest.raises(RankLinkClosed):
        ours.receive(0.0)
    with pytest.raises(RankLinkClosed):
        ours.send(AllocatePool(1))
