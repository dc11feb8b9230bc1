"""Random worlds: whatever goes wrong at whatever moment, each request has one outcome, and in the
end nothing is left of it on either side."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.ids import NodeLife
from pdserve.messages.handoff import LEASE_SECONDS
from pdserve.worker.disagg.decode_handler import DecodeHandler
from pdserve.worker.disagg.fence import Fence
from pdserve.worker.disagg.policy import DisaggPolicy
from pdserve.worker.disagg.prefill_handler import PrefillHandler
from pdserve.worker.disagg.prefill_job import _PERFORM as PREFILL_PERFORM
from pdserve.worker.disagg.prefill_job import PrefillJob
from pdserve.worker.disagg.remote_prefill import _PERFORM, RemotePrefillRequest
from pdserve.worker.disagg.state_table import (
    DecodeAction,
    DecodeEvent,
    DecodeState,
    PrefillAction,
    PrefillState,
    StateMachine,
)
from tests.worker.disagg.cluster import DisaggCluster, play, request
from tests.worlds.loop import Livelock

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.worker.disagg.cluster import Host

STEPS = ("admit", "open", "activate", "prefill", "send")
BENIGN = frozenset({"cancel", "owner", "mode", "keep", "crawl", "full"})
"""Faults that cost time at most."""
AT_WORK = (DecodeState.ATTEMPT, DecodeState.FILL, DecodeState.VERIFY)
SPAN = 12.0
"""Seconds of faults."""
CALM = 150.0
"""Membership agrees again within this, and attempts of stuck engines are over."""


class World:
    """One site, and what a seed does to it."""

    def __init__(self, site: DisaggCluster, seed: int) -> None:
        self.site = site
        self.random = random.Random(seed)
        self.faults: Counter[str] = Counter()
        among = sorted(BENIGN) if self.random.random() < 0.3 else FAULTS
        self.kinds = self.random.sample(among, self.random.randint(1, len(among)))
        self.lost: dict[Any, float] = {}
        """Attempts that prefill workers hold and the decode worker has given up, since when."""

    async def run(self) -> None:
        site, draw = self.site, self.random
        site.d.decode.chooser = self.chooser()
        site.d.chooser = site.d.decode.chooser
        site.queue.doubles = draw.random() < 0.2
        self.audit()
        number = 0
        until = site.loop.time() + SPAN
        while site.loop.time() < until:
            await asyncio.sleep(draw.expovariate(6.0))
            if draw.random() < 0.6:
                number += 1
                self.ask(number)
            else:
                kind = draw.choice(self.kinds)
                self.faults[kind] += 1
                getattr(self, f"do_{kind}")()
        await self.calm()

    def chooser(self) -> DisaggPolicy:
        mode: Any = self.random.choice(["always", "always", "rule", "predict"])
        chooser = DisaggPolicy(mode, min_tokens=10)
        return chooser

    def ask(self, number: int) -> None:
        draw = self.random
        deadline = draw.choice([None, None, 1.0, 5.0, 20.0])
        asked = request(
            f"r{number}", prompt=draw.randint(5, 400), deadline=deadline, n=draw.choice([1, 1, 3])
        )
        if self.site.d.up and hasattr(self.site.d, "decode") and self.site.d.node.joined:
            self.site.ask(asked)

    # ------------------------------------------------------------------ what must always hold

    def audit(self) -> None:
        self.later(0.1, self.audit)
        if self.site.d.up and hasattr(self.site.d, "decode"):
            self.audit_decode(self.site.d)
        for host in self.site.prefills:
            if host.process is not None and not host.process.paused and hasattr(host, "prefill"):
                self.audit_prefill(host)

    def audit_decode(self, d: Host) -> None:
        complain = self.site.complain
        for remote in d.decode._remote.values():
            held = remote.fence.holder is not None
            if held and remote.state not in (*AT_WORK, DecodeState.ACTIVE):
                complain(f"{remote} has an attempt")
            if remote._callers and remote.state is not DecodeState.ATTEMPT:
                complain(f"{remote} lets prefill workers wait for a ticket")
            if remote.handle not in d.engine.busy:
                complain(f"{remote} is not with the engine")

    def audit_prefill(self, host: Host) -> None:
        """Engine time, and blocks of others, only for what somebody may still want."""
        site, now = self.site, self.site.loop.time()
        known = {one._handle for one in host.prefill._claims.values()}
        for handle in host.engine.prompts.keys() - known:
            site.complain(f"{host.name} computes {handle} for nobody")
        for one in host.prefill._claims.values():
            member = host.node.registry.get(one.decode.node)
            if one.state is PrefillState.CLAIMED:
                continue  # it may have come from an owner who had not heard; it only asks, for 6 s
            if member is None or member.epoch != one.decode.epoch:
                site.complain(f"{host.name} works for the dead: {one}")
            key = (host.name, host.lives, one.decode, one.held)
            if one.held is None or self.wanted(host, one):
                self.lost.pop(key, None)
            elif now - self.lost.setdefault(key, now) > LEASE_SECONDS + 2.0:
                site.complain(f"{host.name} holds what was given up long ago: {one}")

    def wanted(self, host: Host, one: PrefillJob) -> bool:
        d = self.site.d
        if not d.up or not hasattr(d, "decode") or d.node.epoch != one.decode.epoch:
            return False
        assert one.held is not None
        remote = d.decode._remote.get(one.held.request)
        by = NodeLife(host.node.id, host.node.epoch)
        return remote is not None and remote.fence.current(one.held.attempt, by)

    def audit_end(self) -> None:
        site = self.site
        for client in site.clients:
            deadline, ended = client.request.deadline, client.ends
            if deadline is None or ended is None or client.tokens or client.cancelled:
                continue
            assert ended - client.asked < deadline + 0.1, client.request.request_id
        if self.faults.keys() <= BENIGN and site.d.lives == 1:
            words = {"lapsed", "superseded", "died", "lost", "failed", "fenced"}
            assert not words & site.d.decode.tally.attempts.keys(), site.d.decode.tally.attempts

    # ------------------------------------------------------------------ faults

    def later(self, seconds: float, action: Any) -> None:
        self.site.loop.call_later(seconds, action, context=self.site.net.context)

    def prefill(self) -> Host:
        return self.random.choice(self.site.prefills)

    def do_cancel(self) -> None:
        open_ones = [
            client for client in self.site.clients if not client.over and not client.cancelled
        ]
        if open_ones:
            self.site.cancel(self.random.choice(open_ones))

    def do_kill(self) -> None:
        host = self.prefill()
        if host.up:
            host.kill()
            self.later(self.random.uniform(0.5, 5.0), host.start)

    def do_kill_d(self) -> None:
        site = self.site
        if not site.d.up or self.faults["kill_d"] > 2:
            return
        site.d.kill()
        for client in site.clients:
            if not client.over:
                client.cancelled = True  # lost with its worker; its frontend asks elsewhere
        self.later(self.random.uniform(0.5, 3.0), site.d.start)

    def do_freeze(self) -> None:
        host = self.prefill()
        if host.process is not None and not host.process.paused:
            host.freeze()
            process = host.process
            lasts = self.random.choice([0.3, 2.0, LEASE_SECONDS + 1.0])
            self.later(lasts, lambda: host.thaw() if host.process is process else None)

    def do_partition(self) -> None:
        name = self.prefill().name
        self.site.net.partition("d", name)
        lasts = self.random.choice([0.3, 2.0, 8.0, 20.0])
        self.later(lasts, lambda: self.site.net.heal("d", name))

    def do_reset(self) -> None:
        self.site.net.reset("d", self.prefill().name)

    def do_delay(self) -> None:
        pair = ("d", self.prefill().name)
        for way in (pair, pair[::-1]):
            self.site.net.set_conditions(*way, delay_min=0.0, delay_max=0.5)
        self.later(2.0, lambda: self._undelay(pair))

    def _undelay(self, pair: tuple[str, str]) -> None:
        for way in (pair, pair[::-1]):
            self.site.net.set_conditions(*way, delay_max=0.0)

    def do_step(self) -> None:
        host = self.random.choice([self.site.d, *self.site.prefills])
        step, mode = self.random.choice(STEPS), self.random.choice(["fail", "hang", "slow"])
        if (host is self.site.d, step) == (True, "prefill") and mode == "hang":
            return  # nobody could help that
        host.script.steps.setdefault(step, []).append(mode)

    def do_full(self) -> None:
        """The decode worker's pool has no blocks for an attempt."""
        self.site.d.script.steps.setdefault("open", []).append("full")

    def do_crawl(self) -> None:
        """A long prompt: longer than a lease lasts."""
        self.prefill().script.steps.setdefault("prefill", []).append("crawl")

    def do_owner(self) -> None:
        self.site.queue.change_owner()

    def do_engine(self) -> None:
        host = self.random.choice([self.site.d, *self.site.prefills])
        if host.up and hasattr(host, "engine"):
            host.call_later(0.0, host.engine.die)

    def do_keep(self) -> None:
        self.site.queue.keeps = True
        self.later(1.0, lambda: setattr(self.site.queue, "keeps", False))

    def do_mode(self) -> None:
        mode: Any = self.random.choice(["always", "rule", "predict", "never"])
        self.site.d.chooser.mode = mode

    # ------------------------------------------------------------------ the end

    async def calm(self) -> None:
        site = self.site
        await asyncio.sleep(LEASE_SECONDS + 5.0)
        site.net.heal()
        site.queue.keeps = False
        for host in (site.d, *site.prefills):
            host.script.steps.clear()
            if not host.up:
                host.start()
        await site.until(lambda: all(c.over or c.cancelled for c in site.clients), timeout=CALM)
        for client in site.clients:
            assert not client.problems, client.problems
            if client.outcome in ("remote", "local"):
                wanted = {choice: 3 for choice in range(client.request.n)}
                assert client.tokens == wanted, client.request.request_id
        await site.quiet(LEASE_SECONDS + 2.0)
        self.audit_end()
        await site.until(site.converged, timeout=CALM)
        site.d.decode.chooser.mode = "always"
        await site.until(lambda: len(site.queue.offers) == len(site.prefills))
        last = site.ask(request("last"))
        await site.until(lambda: last.over)
        assert last.outcome == "remote"
        await site.quiet()


FAULTS = [name[3:] for name in vars(World) if name.startswith("do_")]

visited: Counter[tuple[Any, Any]] = Counter()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[Any, Any]]:
    feed = StateMachine.feed

    def looked(self: Any, event: Any) -> Any:
        visited[self.state, event] += 1
        return feed(self, event)

    monkeypatch.setattr(StateMachine, "feed", looked)
    return visited


def rounds(long: bool) -> int:
    return 1000 if long else 12


@pytest.mark.timeout(3000)
def test_random_worlds(seed: int, long: bool, watched: Counter[tuple[Any, Any]]) -> None:
    source = random.Random(seed)
    for _ in range(rounds(long)):
        number = source.getrandbits(32)

        async def world(site: DisaggCluster, number: int = number) -> None:
            made = World(site, number)
            try:
                await made.run()
            except AssertionError as error:
                raise AssertionError(f"world {number}, faults {dict(made.faults)}") from error

        play(world, prefills=source.randint(1, 3), seed=number)


def test_an_attempt_that_hung_does_not_make_the_next_wait_ten_times_longer() -> None:
    """In this world an attempt hangs, which teaches the prediction 60 s, and so does the next."""

    async def world(site: DisaggCluster) -> None:
        await World(site, 436453548).run()

    play(world, prefills=3, seed=436453548)


# ---------------------------------------------------------------- do these worlds see anything?


def _nothing(*arguments: Any, **fields: Any) -> None:
    pass


def _any_claim(
    self: Fence, asked: Any, by: Any, state: DecodeState, now: float, **fields: Any
) -> Any:
    opens = state in (DecodeState.QUEUE, DecodeState.ATTEMPT, DecodeState.FILL)
    return (DecodeEvent.CLAIM, "") if opens else (DecodeEvent.STALE, "")


BUGS: dict[str, tuple[Any, str, Any]] = {
    "any claim opens an attempt": (Fence, "claim", _any_claim),
    "leases never end at the decode worker": (RemotePrefillRequest, "_lapse", _nothing),
    "leases are not renewed": (PrefillHandler, "_beat", _nothing),
    "what has ended is remembered": (DecodeHandler, "forget", _nothing),
    "nobody looks at the deadline": (RemotePrefillRequest, "_expired", _nothing),
    "nobody loses patience": (RemotePrefillRequest, "_impatient", _nothing),
    "deaths are not heard of": (PrefillHandler, "_on_member", _nothing),
}
ACTIONS = {
    "a cancelled item stays in the queue": DecodeAction.UNQUEUE,
    "a lost attempt is not given up": DecodeAction.GIVE_UP,
    "an attempt is never closed": DecodeAction.CLOSE,
    "the engine keeps what is cancelled": DecodeAction.FREE,
}
PREFILL_ACTIONS = {
    "a withdrawn prompt is computed on": PrefillAction.ABORT,
    "a claim that is refused is kept": PrefillAction.END_REFUSED,
}
BUDGET = 200


def _fails(numbers: Iterable[int]) -> bool:
    for number in numbers:

        async def world(site: DisaggCluster, number: int = number) -> None:
            await World(site, number).run()

        try:
            play(world, prefills=1 + number % 3, seed=number)
        except (AssertionError, Livelock, KeyError, RuntimeError):
            return True
    return False


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [*BUGS, *ACTIONS, *PREFILL_ACTIONS])
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the rules that these worlds exercise; `test_every_cell` has the others."""
    if name in BUGS:
        owner, function, bug = BUGS[name]
        monkeypatch.setattr(owner, function, bug)
    elif name in ACTIONS:
        monkeypatch.setitem(_PERFORM, ACTIONS[name], _nothing)
    else:
        monkeypatch.setitem(PREFILL_PERFORM, PREFILL_ACTIONS[name], _nothing)
    assert _fails(range(BUDGET))
