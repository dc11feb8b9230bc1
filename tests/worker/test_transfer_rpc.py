"""Transports reach each other over their nodes' links, in the right lives, and are counted."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any, cast

import pytest

from pdserve.errors import LinkLost, PdserveError, TransferRefused
from pdserve.ids import NodeId
from pdserve.messages.engine import EngineStats, PathState
from pdserve.messages.handoff import TransportCall, TransportReply
from pdserve.messages.node import NodeCard
from pdserve.messages.transfer import BackendProbe, ControlDone, PathReady
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.runtime.registry import MemberGone
from pdserve.runtime.rpc_methods import TRANSFER
from pdserve.sim.engine import VirtualTimeEngine
from pdserve.testing.fake_rdma import FakeFabric
from pdserve.testing.scripted import reference_tokens
from pdserve.testing.virtual_time import run
from pdserve.worker import transfer_rpc as paths_module
from pdserve.worker.transfer_rpc import TransferRpc
from tests.engine.test_handoff_between_engines import Prefilling, Remote, request, spec
from tests.runtime.cluster import cluster

if TYPE_CHECKING:
    from pdserve.runtime.node import Node


class Recorder:
    """What an engine is asked."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.attached: list[tuple[str, int]] = []
        self.gone: list[tuple[str, int]] = []
        self.returning: list[bool] = []
        self.calls: list[tuple[str, int, TransportCall]] = []
        self.answer: TransportReply | PdserveError | None = TransportReply(ControlDone())
        self.states: list[PathState] = []
        self.failed_loads = 0

    def stats(self):
        return EngineStats(failed_loads=self.failed_loads)

    def attach(self, node, epoch):
        self.attached.append((node, epoch))

    def peer_gone(self, node, epoch, *, returns=False):
        self.gone.append((node, epoch))
        self.returning.append(returns)

    def transfer_call(self, node, epoch, ask, reply):
        self.calls.append((node, epoch, ask))
        if self.answer is not None:
            reply(self.answer)

    def on_transfer(self, ask):
        self.ask = ask

    def paths(self):
        return self.states


class Real:
    """An engine in a world's time."""

    def __init__(self, fabric: FakeFabric) -> None:
        self.metrics = Metrics()
        self.engine = VirtualTimeEngine(spec("fake"), pace=0.02, load_time=0.1, fabric=fabric)


def joined(node: Node, engine: Recorder, told: Degradations | None = None) -> TransferRpc:
    return TransferRpc(node, cast("Any", engine), engine.metrics, told)


class Answers:
    def __init__(self) -> None:
        self.all: list[object] = []
        self.came = asyncio.Event()

    def __call__(self, answer: object) -> None:
        self.all.append(answer)
        self.came.set()

    async def one(self) -> object:
        await self.came.wait()
        (answer,) = self.all
        return answer


ASK = BackendProbe()


def test_questions_reach_the_life_that_was_meant() -> None:
    async def main() -> None:
        async with cluster() as c:
            a, b = await c.add("a"), await c.add("b")
            ours, theirs = Recorder(), Recorder()
            joined(a, ours)
            joined(b, theirs)
            await c.until(c.converged)
            await c.until(lambda: bool(ours.attached and theirs.attached))
            assert ours.attached == [("a", a.epoch)]
            answers = Answers()
            ours.ask(b.id, b.epoch, TransportCall(b.epoch, "shm", PathReady(3)), 5.0, answers)
            assert await answers.one() == TransportReply(ControlDone())
            assert theirs.calls == [("a", a.epoch, TransportCall(b.epoch, "shm", PathReady(3)))]

            answers = Answers()
            theirs.answer = TransferRefused("no path 3")
            ours.ask(b.id, b.epoch, TransportCall(b.epoch, "shm", PathReady(3)), 5.0, answers)
            answer = await answers.one()
            assert isinstance(answer, TransferRefused)
            assert "no path 3" in answer.message

            answers = Answers()  # another life of it than the one that is there
            ours.ask(b.id, b.epoch + 1, TransportCall(b.epoch + 1, "shm", ASK), 5.0, answers)
            assert isinstance(await answers.one(), LinkLost)
            link = await a.link(b.id, timeout=5.0)
            with pytest.raises(TransferRefused, match="which has ended"):
                await link.request(TRANSFER, TransportCall(b.epoch - 1, "shm", ASK), timeout=5.0)
            assert len(theirs.calls) == 2

            answers = Answers()
            ours.ask(NodeId("nobody"), 1, TransportCall(1, "shm", ASK), 5.0, answers)
            assert isinstance(await answers.one(), LinkLost)

            theirs.answer = None  # a core in a long step
            answers = Answers()
            begin = c.loop.time()
            ours.ask(b.id, b.epoch, TransportCall(b.epoch, "shm", ASK), 2.0, answers)
            assert isinstance(await answers.one(), PdserveError)
            assert c.loop.time() - begin == pytest.approx(2.0, abs=0.1)

    run(main())


def test_no_more_is_asked_at_a_time_than_the_bound(monkeypatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(paths_module, "MAX_PENDING_CALLS", 3)
        async with cluster() as c:
            a, b = await c.add("a"), await c.add("b")
            ours, theirs = Recorder(), Recorder()
            theirs.answer = None
            joined(a, ours)
            joined(b, theirs)
            await c.until(c.converged)
            answers = [Answers() for _ in range(5)]
            for each in answers:
                ours.ask(b.id, b.epoch, TransportCall(b.epoch, "shm", ASK), 1.0, each)
            assert [len(each.all) for each in answers] == [0, 0, 0, 1, 1]
            for each in answers:
                await each.one()
            await asyncio.sleep(0.1)
            again = Answers()
            theirs.answer = TransportReply(ControlDone())
            ours.ask(b.id, b.epoch, TransportCall(b.epoch, "shm", ASK), 1.0, again)
            assert await again.one() == TransportReply(ControlDone())

    run(main())


def test_ends_of_lives_are_told() -> None:
    async def main() -> None:
        async with cluster() as c:
            a, b = await c.add("a"), await c.add("b")
            ours, theirs = Recorder(), Recorder()
            joined(a, ours)
            joined(b, theirs)
            await c.until(c.converged)
            b.publish_card(NodeCard(role="worker", transfers=("shm",)), {})
            await c.until(lambda: bool((m := a.registry.get(b.id)) and m.card and m.card.transfers))
            assert ours.gone == []
            b.publish_card(NodeCard(role="worker", reason="the engine is restarting"), {})
            await c.until(lambda: bool(ours.gone))
            assert ours.gone == [("b", b.epoch)]
            epoch = b.epoch
            await c.crash("b")
            await c.until(lambda: len(ours.gone) == 2, timeout=60.0)
            assert ours.gone[1] == ("b", epoch)
            assert ours.returning == [True, False]

    run(main())


def test_who_was_held_for_dead_reaches_no_transport_any_more() -> None:
    """One that stood still learns of its death last, and its link may be up until then."""

    async def main() -> None:
        async with cluster() as c:
            a, b = await c.add("a"), await c.add("b")
            ours, theirs = Recorder(), Recorder()
            paths = joined(a, ours)
            joined(b, theirs)
            await c.until(c.converged)
            member = a.registry.get(b.id)
            assert member is not None
            paths._on_member(MemberGone(member, "died"))
            answers = Answers()
            theirs.ask(a.id, a.epoch, TransportCall(a.epoch, "shm", ASK), 5.0, answers)
            error = await answers.one()
            assert isinstance(error, TransferRefused)
            assert "declared dead" in error.message
            assert ours.calls == []

    run(main())


def test_a_node_that_rejoins_attaches_again() -> None:
    async def main() -> None:
        async with cluster() as c:
            a, b = await c.add("a"), await c.add("b")
            ours, theirs = Recorder(), Recorder()
            joined(a, ours)
            joined(b, theirs)
            await c.until(c.converged)
            await c.until(lambda: len(theirs.attached) == 1)
            c.world.pause("b")
            await c.until(lambda: a.registry.get(b.id) is None, timeout=120.0)
            c.world.resume("b")
            await c.until(lambda: len(theirs.attached) == 2, timeout=120.0)
            assert theirs.attached[1] == ("b", b.epoch)
            assert theirs.attached[0][1] < b.epoch
            assert ours.gone[0] == theirs.attached[0]

    run(main())


def test_what_paths_say_becomes_metrics() -> None:
    async def main() -> None:
        async with cluster() as c:
            a = await c.add("a")
            ours = Recorder()
            joined(a, ours)
            metrics = ours.metrics
            path = PathState(node="b", epoch=1, backend="shm", sent_bytes=10, sent_seconds=0.5)
            ours.states = [path]
            await asyncio.sleep(1.0)
            assert metrics.transfer_bytes.labels("sent", "shm").value == 10
            later = PathState(
                node="b",
                epoch=1,
                backend="shm",
                sent_bytes=25,
                received_bytes=4,
                sent_seconds=2.0,
                failures=1,
            )
            ours.states = [later]
            await asyncio.sleep(1.0)
            ours.states = []  # the engine has died
            await asyncio.sleep(1.0)
            ours.states = [
                path,
                PathState(node="c", epoch=1, backend="tcp", received_bytes=1, degraded="shm fails"),
            ]
            await asyncio.sleep(1.0)
            assert metrics.transfer_bytes.labels("sent", "shm").value == 35
            assert metrics.transfer_bytes.labels("received", "shm").value == 4
            assert metrics.transfer_bytes.labels("received", "tcp").value == 1
            assert metrics.transfer_seconds.labels("shm").value == 2.5
            assert metrics.transfer_failures.labels("shm").value == 1
            assert metrics.transfer_paths_degraded.value == 1
            ours.states = []
            await asyncio.sleep(1.0)
            assert metrics.transfer_paths_degraded.value == 0

    run(main())


def test_a_poorer_way_or_none_degrades_the_process_as_long_as_it_lasts() -> None:
    async def main() -> None:
        async with cluster() as c:
            a = await c.add("a")
            ours = Recorder()
            told = Degradations(ours.metrics)
            joined(a, ours, told)
            best = PathState(node="b", epoch=1, backend="shm")
            poorer = PathState(node="c", epoch=1, backend="tcp", degraded="shm fails")
            none = PathState(node="d", epoch=1, backend="none", degraded="tcp: no TLS (there)")
            ours.states = [best]
            await asyncio.sleep(1.0)
            assert not told.reasons()
            ours.states = [best, poorer]
            await asyncio.sleep(1.0)
            assert "KV with c goes over tcp: shm fails" in told.reasons()["kv_transfer"]
            ours.states = [none]
            await asyncio.sleep(1.0)
            assert set(told.reasons()) == {"kv_transfer"}
            assert ours.metrics.transfer_paths_degraded.value == 1
            ours.states = []
            await asyncio.sleep(1.0)
            assert not told.reasons()
            ours.states = [none]
            await asyncio.sleep(1.0)
            assert "d goes over none: tcp: no TLS (there)" in told.reasons()["kv_transfer"]

    run(main())


def test_loads_that_failed_degrade_the_process_for_a_while() -> None:
    async def main() -> None:
        async with cluster() as c:
            a = await c.add("a")
            ours = Recorder()
            told = Degradations(ours.metrics)
            joined(a, ours, told)
            await asyncio.sleep(1.0)
            assert not told.reasons()
            ours.failed_loads = 2
            await asyncio.sleep(1.0)
            assert "computed again" in told.reasons()["kv_loads"]
            await asyncio.sleep(400.0)
            ours.failed_loads = 3
            await asyncio.sleep(400.0)
            assert "kv_loads" in told.reasons()
            await asyncio.sleep(300.0)
            assert not told.reasons()
            ours.failed_loads = 0  # of another core
            await asyncio.sleep(1.0)
            assert not told.reasons()

    run(main())


async def prefilled(c, d: Real, p: Real, peer, me, wanted) -> Remote:
    """One request over the nodes, from its admission to its last token."""
    remote, prefilling = Remote(wanted), Prefilling()
    handle = d.engine.submit_remote(wanted, remote)
    await c.until(lambda: remote.cached is not None)
    d.engine.open_attempt(handle, 1, peer.id, peer.epoch)
    await c.until(lambda: bool(remote.opened or remote.lost))
    assert not remote.lost, remote.lost
    p.engine.prefill(wanted, remote.opened[1], me.id, me.epoch, prefilling)
    await c.until(lambda: bool(prefilling.handoff))
    assert prefilling.handoff is not None
    d.engine.activate(handle, 1, prefilling.handoff)
    await c.until(lambda: remote.ledger.done)
    return remote


def test_engines_hand_over_across_the_network_and_lose_what_a_death_took(seed: int) -> None:
    async def main() -> None:
        fabric = FakeFabric(Random(seed))
        async with cluster(seed % 1000) as c:
            a, b = await c.add("d"), await c.add("p")
            d, p = Real(fabric), Real(fabric)
            TransferRpc(a, d.engine, d.metrics)
            TransferRpc(b, p.engine, p.metrics)
            await c.until(c.converged)
            await d.engine.start()
            await p.engine.start()
            remote = await prefilled(c, d, p, b, a, request())
            assert remote.ledger.tokens[0] == reference_tokens(request())
            await asyncio.sleep(1.5)
            moved = d.metrics.transfer_bytes.labels("received", "fake").value
            assert moved == p.metrics.transfer_bytes.labels("sent", "fake").value > 0

            lost = Remote(request(25))
            handle = d.engine.submit_remote(request(25), lost)
            await c.until(lambda: lost.cached is not None)
            d.engine.open_attempt(handle, 1, b.id, b.epoch)
            await c.until(lambda: bool(lost.opened))
            p.engine.free()  # the process is gone, with its devices
            await c.crash("p")
            await c.until(lambda: bool(lost.lost), timeout=60.0)
            d.engine.prefill_here(handle)
            await c.until(lambda: lost.ledger.done)
            assert lost.ledger.tokens[0] == reference_tokens(request(25))
            assert d.engine.stats().blocks_quarantined == 0
            assert d.engine.paths() == []
            await d.engine.stop()
            await p.engine.stop()
            assert fabric.pairs == {}

    run(main())
