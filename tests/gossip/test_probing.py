"""The table of stages, row by row."""

from __future__ import annotations

from random import Random

import pytest

from pdserve.gossip.config import GossipConfig
from pdserve.gossip.context import GossipContext
from pdserve.gossip.events import Send
from pdserve.gossip.messages import IndirectPing, IndirectPingResult, Ping
from pdserve.gossip.probing import Prober, ProbeStage
from pdserve.ids import NodeId

A, B, C, ME = NodeId("a"), NodeId("b"), NodeId("c"), NodeId("me")


class Bench:
    """One prober that watches `a`, with `b` and `c` to help."""

    def __init__(self, helpers=(B, C)):
        self.context = GossipContext(ME, GossipConfig(), Random(1))
        self.context.links.update({A: 1, B: 1, C: 1})
        self.prober = Prober(self.context, lambda _: (), lambda _: list(helpers), lambda _: 1)
        self.prober.watch([A])

    def due(self):
        """Let the appointment with `a` come."""
        self.context.now = self.first()
        (key,) = self.context.agenda.take(self.context.now)
        assert key == ("ping", A)
        return self.prober.due(A)

    def sent(self):
        effects, self.context.effects = self.context.effects, []
        sent = [effect for effect in effects if isinstance(effect, Send)]
        assert len(sent) == len(effects)
        return [(effect.node, effect.message) for effect in sent]

    def first(self):
        """When the next appointment is."""
        assert self.context.agenda.first is not None
        return self.context.agenda.first

    def to_relayed(self):
        for _ in range(3):
            assert not self.due()
        (asked,) = {
            message.nonce for _, message in self.sent() if isinstance(message, IndirectPing)
        }
        assert self.prober.stage(A) is ProbeStage.RELAYED
        return asked


def test_a_ping_that_is_answered_rests_until_the_next_multiple_of_the_interval():
    bench = Bench()
    bench.due()
    ((to, ping),) = bench.sent()
    assert to == A
    bench.prober.ack(A, ping.nonce)
    assert bench.prober.stage(A) is ProbeStage.IDLE
    interval, due = bench.context.config.ping_interval, bench.context.agenda.first
    assert due is not None
    assert due % interval == 0.0
    assert bench.context.now < due <= bench.context.now + interval


def test_only_the_right_nonce_from_the_right_node_counts():
    bench = Bench()
    bench.due()
    ((_, ping),) = bench.sent()
    bench.prober.ack(A, ping.nonce + 1)
    bench.prober.ack(B, ping.nonce)
    assert bench.prober.stage(A) is ProbeStage.WAITING


def test_silence_leads_through_helpers_to_a_verdict():
    bench = Bench()
    start = bench.first()
    bench.to_relayed()
    assert bench.due()
    assert bench.context.now == pytest.approx(start + 1.5)
    assert bench.context.health.score == 1, "the helpers were silent too"


def test_a_helpers_yes_is_proof_and_all_noes_are_a_verdict_at_once():
    bench = Bench()
    nonce = bench.to_relayed()
    assert bench.prober.answer(B, nonce, True) is None
    assert bench.prober.stage(A) is ProbeStage.IDLE
    nonce = bench.to_relayed()
    assert bench.prober.answer(B, nonce, False) is None
    assert bench.prober.answer(B, nonce, False) is None, "it counts once"
    assert bench.prober.answer(C, nonce, False) == A
    assert bench.context.health.score == 0, "helpers that report are no reason for doubt"


def test_a_late_ack_still_counts():
    bench = Bench()
    bench.due()
    ((_, ping),) = bench.sent()
    bench.due()
    bench.due()
    bench.prober.ack(A, ping.nonce)
    assert bench.prober.stage(A) is ProbeStage.IDLE


def test_without_helpers_the_verdict_does_not_wait():
    bench = Bench(helpers=())
    assert [bench.due() for _ in range(3)] == [False, False, True]


def test_after_a_standstill_the_round_starts_over():
    bench = Bench()
    bench.to_relayed()
    bench.prober.start_over()
    assert bench.context.agenda.first == bench.context.now
    assert not bench.due()
    assert bench.prober.stage(A) is ProbeStage.WAITING


def test_a_helper_pings_and_reports_either_way():
    bench = Bench()
    bench.prober.watch([])
    for alive in (True, False):
        bench.prober.ping_for(B, IndirectPing(7, A, 1))
        ((to, ping),) = bench.sent()
        assert (to, type(ping)) == (A, Ping)
        if alive:
            bench.prober.ack(A, ping.nonce)
        else:
            bench.context.now = bench.first()
            ((_, nonce),) = bench.context.agenda.take(bench.context.now)
            bench.prober.relay_due(int(nonce))
        assert bench.sent() == [(B, IndirectPingResult(7, alive))]
        assert len(bench.context.agenda) == 0


@pytest.mark.parametrize("request_", [IndirectPing(7, NodeId("x"), 1), IndirectPing(7, A, 2)])
def test_a_helper_without_a_way_says_so_at_once(request_):
    bench = Bench()
    bench.prober.ping_for(B, request_)
    assert bench.sent() == [(B, IndirectPingResult(7, False))]


def test_pings_for_others_are_bounded():
    bench = Bench()
    for nonce in range(300):
        bench.prober.ping_for(B, IndirectPing(nonce, A, 1))
    pings = [message for _, message in bench.sent() if isinstance(message, Ping)]
    assert len(pings) == bench.context.config.relays_limit


def test_who_hears_few_of_its_targets_is_isolated():
    bench = Bench()
    bench.prober.watch([A, B, C])
    assert not bench.prober.isolated()
    bench.context.now = 60.0
    assert bench.prober.isolated()
    bench.prober.heard(A)
    assert bench.prober.isolated()
    bench.prober.heard(B)
    assert not bench.prober.isolated()


def test_a_lone_target_that_is_silent_isolates_nobody():
    bench = Bench()
    bench.context.now = 60.0
    assert not bench.prober.isolated()
