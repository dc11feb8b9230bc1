"""Workers that are to pull another one's blocks: who is told, and what they answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from pdserve.cli.tier import command
from pdserve.cli.tier.warm_from import warm_from
from pdserve.errors import ConfigError, NotReady
from pdserve.launch import exit_codes
from pdserve.messages.kv_pull import KvTaken, WarmUp
from tests.cli.tier.test_drop import STATUS

if TYPE_CHECKING:
    from pdserve.cli.console.reach import Reach
    from pdserve.ids import NodeId
    from pdserve.messages.status import ClusterStatus


class Visitor:
    """A cluster, played."""

    def __init__(self, taken: KvTaken | None) -> None:
        self.orders: dict[str, WarmUp] = {}
        self.taken = taken
        self.closed = False

    def client(self) -> Visitor:
        return self

    async def status(self) -> ClusterStatus:
        return STATUS

    async def warm(self, address: str, node: NodeId, order: WarmUp) -> KvTaken:
        assert address == f"{node}:1"
        self.orders[node] = order
        if self.taken is None:
            raise NotReady("the engine is restarting\x1b[2J")
        return self.taken

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("taken", "says", "code"),
    [
        (KvTaken(12), "b: pulled 12 blocks", exit_codes.OK),
        (KvTaken(7, "full"), "no more fits beside its own blocks", exit_codes.OK),
        (KvTaken(3, "gone"), "the other worker cannot be reached", exit_codes.FAILED),
        (None, "b: the engine is restarting", exit_codes.FAILED),
    ],
)
async def test_the_others_are_told_and_say_what_they_have(
    taken: KvTaken | None, says: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    visitor = Visitor(taken)
    assert await warm_from(cast("Reach", visitor), "a", []) == code
    assert visitor.orders == {"b": WarmUp(source="a")}
    assert visitor.closed
    assert says in capsys.readouterr().out


async def test_a_source_and_a_target_are_needed() -> None:
    reach = cast("Reach", Visitor(KvTaken()))
    with pytest.raises(ConfigError, match="the same worker"):
        await warm_from(reach, "a", ["a"])
    with pytest.raises(ConfigError, match="'r' is no worker"):
        await warm_from(reach, "r", [])
    with pytest.raises(ConfigError, match="'r' is no worker"):
        await warm_from(reach, "a", ["r"])


def test_it_sends_no_request() -> None:
    with pytest.raises(ConfigError, match="--from takes neither"):
        command.run(["warm", "--from", "a", "--prompt", "x"])
