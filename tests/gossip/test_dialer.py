"""One dial at a time, and slower after each failure."""

from __future__ import annotations

from random import Random

from pdserve.gossip.config import GossipConfig
from pdserve.gossip.context import GossipContext
from pdserve.gossip.dialer import Dialer
from pdserve.gossip.events import Dial
from pdserve.ids import NodeId


def make():
    context = GossipContext(NodeId("me"), GossipConfig(), Random(1))
    return context, Dialer(context, "me:1")


def test_an_address_is_dialled_once_at_a_time():
    context, dialler = make()
    for address in ("a:1", "a:1", "", "me:1"):
        dialler.dial(address)
    assert context.effects == [Dial("a:1")]
    assert dialler.up("a:1")
    assert not dialler.up("a:1")
    dialler.dial("a:1")
    assert len(context.effects) == 2


def test_delays_double_up_to_a_bound_and_start_over_with_a_link():
    context, dialler = make()
    config = context.config
    delays = [dialler.failed("a:1", refused=False) for _ in range(40)]
    assert delays[0] <= config.redial_first
    assert delays[3] > config.redial_first
    assert config.redial_most / 2 <= max(delays) <= config.redial_most
    dialler.up("a:1")
    assert dialler.failed("a:1", refused=False) <= config.redial_first
    assert dialler.failed("a:1", refused=True) >= config.redial_refused


def test_failures_of_addresses_nobody_has_are_forgotten():
    context, dialler = make()
    for _ in range(9):
        dialler.failed("a:1", refused=False)
        dialler.failed("b:1", refused=False)
    dialler.keep(["b:1"])
    assert dialler.failed("a:1", refused=False) <= context.config.redial_first
    assert dialler.failed("b:1", refused=False) > context.config.redial_first
