"""Orders to forget KV: whom they are about, and what workers answer."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from pdserve.cli.tier.drop import drop, order_of, workers_named
from pdserve.errors import ConfigError, NotReady
from pdserve.ids import NodeId
from pdserve.launch import exit_codes
from pdserve.messages.status import ClusterStatus, MemberStatus
from pdserve.messages.tiers import DropOrder, DropReport

if TYPE_CHECKING:
    from pdserve.cli.console.reach import Reach


def asked(**fields: Any) -> Namespace:
    return Namespace(**({"all": False, "tenant": [], "salt": [], "older": ""} | fields))


def member(name: str, role: str = "worker") -> MemberStatus:
    return MemberStatus(node=NodeId(name), role=role, epoch=1, address=f"{name}:1")


STATUS = ClusterStatus(
    cluster="c", asked=NodeId("r"), now=0.0, members=(member("r", "router"), *map(member, "ab"))
)


class Visitor:
    """A cluster, played."""

    def __init__(self, *down: str) -> None:
        self.orders: dict[str, DropOrder] = {}
        self.down = down
        self.closed = False

    def client(self) -> Visitor:
        return self

    async def status(self) -> ClusterStatus:
        return STATUS

    async def drop_kv(self, address: str, node: NodeId, order: DropOrder) -> DropReport:
        assert address == f"{node}:1"
        if node in self.down:
            raise NotReady("the engine is restarting\x1b[2J")
        self.orders[node] = order
        return DropReport({"device": 3, "disk": 12} if node == "a" else {})

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("fields", "order"),
    [
        ({"all": True}, DropOrder()),
        ({"tenant": ["t", "u"]}, DropOrder(("tenant:t", "tenant:u"))),
        ({"salt": ["x"]}, DropOrder(("salt:x",))),
        ({"older": "2h"}, DropOrder(None, 7200.0)),
        ({"all": True, "older": "30s"}, DropOrder(None, 30.0)),
        ({"tenant": ["t"], "older": "1d"}, DropOrder(("tenant:t",), 86400.0)),
    ],
)
def test_the_command_line_becomes_an_order(fields: dict[str, Any], order: DropOrder) -> None:
    assert order_of(asked(**fields)) == order


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "say what is to be forgotten: --all"),
        ({"all": True, "tenant": ["t"]}, "give one of them"),
        ({"older": "soon"}, "--older: 'soon' is not a duration"),
        ({"older": "0"}, "say --all"),
    ],
)
def test_an_order_about_nothing_or_two_things_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        order_of(asked(**fields))
    assert says in caught.value.message


def test_workers_are_found_by_name() -> None:
    assert [one.node for one in workers_named(STATUS, [])] == ["a", "b"]
    assert [one.node for one in workers_named(STATUS, ["b"])] == ["b"]
    with pytest.raises(ConfigError, match="'r' is no worker; there are a, b"):
        workers_named(STATUS, ["r"])
    with pytest.raises(ConfigError, match="there is no worker"):
        workers_named(ClusterStatus(cluster="c", asked=NodeId("r"), now=0.0), [])


async def test_each_worker_is_told_and_says_what_is_gone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    visitor = Visitor()
    done = await drop(cast("Reach", visitor), DropOrder(), [])
    assert done == exit_codes.OK
    assert visitor.orders == {"a": DropOrder(), "b": DropOrder()}
    assert visitor.closed
    assert capsys.readouterr().out.splitlines() == [
        "a: forgot blocks: 3 on device, 12 on disk",
        "b: forgot what was cached",
    ]


async def test_old_blocks_are_only_below_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    await drop(cast("Reach", Visitor()), DropOrder(None, 60.0), ["b"])
    assert capsys.readouterr().out == "b: has no tier below its device\n"


async def test_a_worker_that_cannot_is_named_and_the_others_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    visitor = Visitor("a")
    done = await drop(cast("Reach", visitor), DropOrder(("tenant:t",)), ["a", "b"])
    assert done == exit_codes.FAILED
    assert list(visitor.orders) == ["b"]
    out = capsys.readouterr().out
    assert "a: the engine is restarting" in out
    assert "\x1b" not in out
