"""Fetches over shared memory and TCP: two cores, each with its transports in a thread."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.blocks.hashing import joined_hashes, prompt_root
from pdserve.clock import SystemClock
from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.kv_transfer.thread_connector import make_thread_connector
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.engine import (
    AbsorbKv,
    KvAbsorbed,
    KvPullAnswer,
    KvPullOpened,
    KvPullServed,
    PeerGone,
    ServeKvPull,
    SetNodeLife,
    TransferSpec,
)
from pdserve.testing.inline_engine import InlineEngine
from pdserve.testing.scripted import ScriptedExecutor
from pdserve.testing.transfer_support import CallCarrier
from tests.engine_core.kv_fetch.pair import BLOCK, SECRET, SPEC, carried, question
from tests.engine_core.kv_transfer.test_handoff import prompt_of, reference, request

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.messages.engine import Event

SOON = 30.0


@dataclass(eq=False)
class RealEnd:
    """One worker: its core and what its node knows."""

    carrier: CallCarrier
    engine: InlineEngine
    peer: RealEnd = field(init=False)
    absorbed: list[KvAbsorbed] = field(default_factory=list)
    calls: dict[int, int] = field(default_factory=dict)
    """Numbers of the peer's questions, by those here."""
    numbers: int = 0

    @property
    def life(self) -> NodeLife:
        return self.carrier.life

    @property
    def core(self) -> EngineCore:
        assert isinstance(self.engine.core, EngineCore)
        return self.engine.core

    def step(self) -> None:
        for event in self.engine.step():
            self._pass(event)
        self.core.pool.check()

    def _pass(self, event: Event) -> None:
        match event:
            case KvPullOpened():
                self.peer.serve(self, event)
            case KvPullServed():
                answer = KvPullAnswer(self.calls.pop(event.number), event.grant)
                self.peer.core.handle(carried(answer, KvPullAnswer))
            case KvAbsorbed():
                self.absorbed.append(event)

    def serve(self, peer: RealEnd, event: KvPullOpened) -> None:
        if self.carrier.deaf:
            return
        self.numbers += 1
        self.calls[self.numbers] = event.number
        command = question(self.numbers, event, peer.life)
        self.core.handle(carried(command, ServeKvPull))


class RealPair:
    """R absorbs what O has."""

    def __init__(self, backend: str) -> None:
        self._woken = threading.Event()
        spec = msgspec.structs.replace(SPEC, transfer=TransferSpec(backends=(backend,)))
        self.r, self.o = (self._end(name, spec) for name in ("d", "p"))
        self.r.peer, self.o.peer = self.o, self.r
        self.r.carrier.join(self.o.carrier)

    def _end(self, name: str, spec) -> RealEnd:
        carrier = CallCarrier(NodeLife(NodeId(name), 1))
        mover = make_thread_connector(spec.transfer, self._woken.set, carrier.end.theirs)
        core = EngineCore(ScriptedExecutor(), SystemClock(), mover)
        end = RealEnd(carrier, InlineEngine(core, spec))
        core.handle(SetNodeLife(*end.life))
        return end

    def until(self, met: Callable[[], object]) -> None:
        late = time.monotonic() + SOON
        while not met():
            assert time.monotonic() < late, "it takes too long"
            if not (self.r.core.has_work or self.o.core.has_work):
                due = [at for end in (self.r, self.o) if (at := end.core.wake_at()) is not None]
                wait = min([*due, time.monotonic() + 1.0]) - time.monotonic()
                self._woken.wait(max(0.0, min(1.0, wait)))
            self._woken.clear()
            self.r.step()
            self.o.step()

    def absorb(self, prompt: list[int], timeout: float = SOON) -> KvAbsorbed:
        """Have R absorb the prompt's blocks; returns what came of it."""
        engine = self.r.engine
        root = prompt_root(SECRET, engine.capabilities.compat_hash, "")
        hashes = joined_hashes(prompt, BLOCK, parent=root, secret=SECRET)
        before = len(self.r.absorbed)
        order = AbsorbKv(
            number=1, node="p", epoch=1, first=0, parent=root, hashes=hashes, timeout=timeout
        )
        self.r.core.handle(order)
        self.until(lambda: len(self.r.absorbed) > before)
        return self.r.absorbed[-1]

    def idle(self) -> bool:
        counts = [end.core.pool.counts() for end in (self.r, self.o)]
        return all(one.used == one.quarantined == 0 for one in counts)

    def close(self) -> None:
        for end in (self.r, self.o):
            assert end.engine.close() == 0
            end.carrier.end.close()
        assert self.idle()


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_blocks_come_over_real_transports(backend: str):
    both = RealPair(backend)
    try:
        prompt = prompt_of(37)
        both.o.engine.generate([request(prompt, max_tokens=1)])
        result = both.absorb(prompt[:36])
        assert (result.blocks, result.pulled, result.error) == (9, 9, "")
        wanted = request(prompt)
        ledger = both.r.engine.submit(wanted)
        both.until(lambda: ledger.done)
        assert ledger.tokens == reference(wanted)
        assert both.r.core.stats().cached_tokens == 36
        absent = both.absorb(prompt_of(20, seed=4))
        assert (absent.pulled, absent.error) == (0, "absent")
        both.until(both.idle)
        assert both.o.core.stats().served_bytes == both.r.core.stats().pulled_bytes > 0
    finally:
        both.close()


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_an_owner_that_is_silent_or_dead_costs_only_the_deadline(backend: str):
    both = RealPair(backend)
    try:
        prompt = prompt_of(37)
        both.o.engine.generate([request(prompt, max_tokens=1)])
        assert both.absorb(prompt[:16]).error == ""
        both.o.carrier.deaf = True
        assert both.absorb(prompt[:36], timeout=0.2).error == "deadline"
        both.r.carrier.end.post(PeerGone("p", 1))
        both.r.core.handle(PeerGone("p", 1))
        both.until(both.idle)
        assert both.r.core.pool.counts().cached == 4
    finally:
        both.close()
