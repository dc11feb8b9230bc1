"""Two cores that fetch blocks from each other; the test plays their nodes.

Everything that moves (bytes, questions, answers) is a step of the `FakeNet`, in any order. `Wanted`
plays the scheduler: it reserves blocks, pulls into them and gives them their hashes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.blocks.hashing import joined_hashes, prompt_root, split_hashes
from pdserve.engine_core.kv_fetch.chains import blocks_up_to
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.engine import (
    AbsorbKv,
    EngineSpec,
    KvAbsorbed,
    KvPullAnswer,
    KvPullEnded,
    KvPullOpened,
    KvPullServed,
    PeerGone,
    ServeKvPull,
    StopKvPull,
    TransferSpec,
)
from pdserve.messages.tiers import KvSource
from pdserve.testing.scripted import ENGINE, ScriptedExecutor
from pdserve.wire.codec import encode
from tests.support.disagg_pair import PairedCore, make_pair

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from pdserve.engine_core.kv_fetch.puller import KvPuller
    from pdserve.engine_core.kv_fetch.server import KvServer
    from pdserve.messages.engine import Event
    from pdserve.messages.kv_pull import KvPullGrant
    from pdserve.messages.request import GenerateRequest

BLOCK = 4
SECRET = b"secret"
SPEC = EngineSpec(
    engine=ENGINE,
    model="",
    block_size=BLOCK,
    max_model_len=96,
    hash_secret=SECRET,
    options={"blocks": "100", "layers": "8"},
    transfer=TransferSpec(),
)
OWNER = KvSource("p", 1, 100)
ASKER = NodeLife(NodeId("d"), 1)


@dataclass(eq=False)
class Wanted:
    """One pull as a scheduler uses it."""

    end: PairedCore
    number: int
    hashes: list[bytes]
    parent: bytes
    before: list[int]
    blocks: list[int]
    ended: tuple[int, str] | None = None
    """Good blocks, and the error."""
    fences: int = 0
    used: list[int] = field(default_factory=list)

    def on_pulled(self, number: int, blocks_ok: int, error: str) -> None:
        assert number == self.number
        assert self.ended is None, "two ends"
        assert not self.fences
        self.ended = blocks_ok, error
        pool = self.end.core.pool
        self.used = pool.commit_run(self.blocks[:blocks_ok], self.hashes[:blocks_ok], self.parent)
        pool.quarantine(self.blocks[blocks_ok:])
        pool.release([*self.before, *self.used])

    def on_fenced(self, number: int) -> None:
        assert number == self.number
        assert self.ended is not None, "a fence before the end"
        assert not self.fences, "two fences"
        self.fences += 1
        self.end.core.pool.unquarantine(self.blocks[self.ended[0] :])

    def cancel(self) -> None:
        """Want it no more."""
        if self.ended is None:
            puller_of(self.end).cancel(self.number, self.end.clock.now())
            self.on_pulled(self.number, 0, "cancelled")

    @property
    def over(self) -> bool:
        return self.ended is not None and (self.fences == 1 or self.ended[0] == len(self.blocks))


@dataclass
class FetchPair:
    """R fetches, O owns. Both could do either."""

    r: PairedCore
    o: PairedCore
    wanted: list[Wanted] = field(default_factory=list)
    asked: list[KvPullOpened] = field(default_factory=list)
    grants: list[KvPullGrant] = field(default_factory=list)
    ended: list[KvPullEnded] = field(default_factory=list)
    absorbed: list[KvAbsorbed] = field(default_factory=list)
    lose_answers: bool = False
    """Neither question nor answer arrives."""
    alter: Callable[[KvPullGrant], KvPullGrant] | None = None
    """Changes an answer on its way."""
    _open: dict[int, int] = field(default_factory=dict)
    """O's node's number by R's number, while the answer is not there."""
    _numbers: int = 0

    @property
    def net(self):
        return self.r.mover.net

    # ------------------------------------------------------------------ what R wants

    def pull(
        self,
        prompt: Sequence[int],
        *,
        first: int = 0,
        source: KvSource = OWNER,
        timeout: float = 10.0,
        count: int | None = None,
    ) -> Wanted:
        """Pull the prompt's blocks from `first` on, all or `count`."""
        names = names_of(self.r, prompt)
        pool, now = self.r.core.pool, self.r.clock.now()
        parent = names[first - 1] if first else root_of(self.r)
        hashes = names[first:] if count is None else names[first : first + count]
        before = blocks_up_to(pool, parent)
        blocks = pool.reserve(len(hashes), shared=before)
        assert blocks is not None
        number = len(self.wanted) + 1
        one = Wanted(self.r, number, hashes, parent, before, blocks)
        self.wanted.append(one)
        puller_of(self.r).pull(
            number, source, hashes, blocks, first * BLOCK, now + timeout, now=now, listener=one
        )
        return one

    def absorb(self, prompt: Sequence[int], *, first: int = 0, timeout: float = 10.0) -> None:
        """Have R absorb the prompt's blocks from `first` on."""
        names = names_of(self.r, prompt)
        self.r.core.handle(
            AbsorbKv(
                number=len(self.absorbed) + 100,
                node="p",
                epoch=1,
                first=first,
                parent=names[first - 1] if first else root_of(self.r),
                hashes=b"".join(names[first:]),
                timeout=timeout,
            )
        )

    # ------------------------------------------------------------------ the nodes

    def step_r(self) -> list[Event]:
        events = self.r.step()
        self.note_r(events)
        return events

    def note_r(self, events: Sequence[Event]) -> None:
        """Do what R's node does for these events."""
        for event in events:
            match event:
                case KvPullOpened():
                    self.asked.append(event)
                    self.net.under_way.append(lambda event=event: self._ask(event))
                case KvPullEnded():
                    self.ended.append(event)
                    number = self._open.pop(event.number, None)
                    if number is not None:
                        self.o.core.handle(StopKvPull(number))
                case KvAbsorbed():
                    self.absorbed.append(event)

    def _ask(self, event: KvPullOpened) -> None:
        if self.lose_answers or any(one.number == event.number for one in self.ended):
            return
        self._numbers += 1
        self._open[event.number] = self._numbers
        self.o.core.handle(carried(question(self._numbers, event), ServeKvPull))

    def step_o(self) -> list[Event]:
        events = self.o.step()
        self.note_o(events)
        return events

    def note_o(self, events: Sequence[Event]) -> None:
        """Do what O's node does for these events."""
        for event in events:
            if isinstance(event, KvPullServed):
                self.grants.append(event.grant)
                self.net.under_way.append(lambda event=event: self._answer(event))

    def _answer(self, event: KvPullServed) -> None:
        for number, asked in list(self._open.items()):
            if asked == event.number and not self.lose_answers:
                del self._open[number]
                grant = event.grant if self.alter is None else self.alter(event.grant)
                answer = KvPullAnswer(number, grant)
                self.r.core.handle(carried(answer, KvPullAnswer))

    def die(self, end: PairedCore) -> None:
        """The other end learns that this one is dead."""
        other, name = (self.o, "d") if end is self.r else (self.r, "p")
        other.core.handle(PeerGone(name, 1))

    # ------------------------------------------------------------------ courses

    def turn(self, rng: Random | None = None) -> None:
        self.step_r()
        self.step_o()
        self.net.step(rng)

    @property
    def busy(self) -> bool:
        return self.r.core.has_work or self.o.core.has_work or bool(self.net.under_way)

    def run(self, rng: Random | None = None) -> None:
        """Take turns until nothing happens any more without time."""
        for _ in range(20_000):
            if not self.busy:
                return
            self.turn(rng)
        raise AssertionError("the two make no progress")

    def sleep(self, seconds: float) -> None:
        """Let time pass, and what is due happen."""
        for end in (self.r, self.o):
            end.clock.advance(seconds)
        self.turn()

    def generate(self, end: PairedCore, wanted: GenerateRequest) -> list[list[int]]:
        """Run a request at one end; returns its tokens."""
        ledger = end.engine.submit(wanted)
        for _ in range(20_000):
            if ledger.done:
                break
            self.turn()
        assert ledger.error is None
        return ledger.tokens

    def check_idle(self) -> None:
        """Nothing is held at either end."""
        for end in (self.r, self.o):
            end.core.pool.check()
            counts = end.core.pool.counts()
            assert (counts.used, counts.quarantined) == (0, 0), (end.mover, counts)
        assert server_of(self.o).serving == 0
        assert server_of(self.o)._in_flight == 0
        assert puller_of(self.r).under_way == 0
        assert all(one.over for one in self.wanted)

    def close(self) -> None:
        """Close both ends: nothing is held."""
        for end in (self.r, self.o):
            assert end.engine.close() == 0
            counts = end.core.pool.counts()
            assert counts.used == counts.quarantined == 0
        assert all(one.over for one in self.wanted)


def evict(end: PairedCore, count: int) -> None:
    """Evict the oldest cached blocks."""
    pool = end.core.pool
    blocks = pool.reserve(pool.counts().free + count)
    assert blocks is not None
    pool.release(blocks)


def carried(command: Any, kind: Any) -> Any:
    """The command after a journey over the wire."""
    return msgspec.msgpack.decode(encode(command), type=kind)


def question(number: int, event: KvPullOpened, asker: NodeLife = ASKER) -> ServeKvPull:
    """What the owner's node tells its core when a pull of the asker has opened."""
    return ServeKvPull(
        number=number,
        node=asker.node,
        epoch=asker.epoch,
        hashes=event.hashes,
        ticket=event.ticket,
        timeout=event.timeout,
    )


def fetch_pair(spec: EngineSpec = SPEC, **changes: Any) -> FetchPair:
    """`r` and `o`: changes of each end's spec; `executor` and `core` as for `make_pair`."""
    both = make_pair(
        changes.pop("executor", ScriptedExecutor),
        spec,
        d=changes.pop("r", None),
        p=changes.pop("o", None),
        **changes,
    )
    return FetchPair(both.d, both.p)


def root_of(end: PairedCore) -> bytes:
    return prompt_root(SECRET, end.engine.capabilities.compat_hash, "")


def names_of(end: PairedCore, prompt: Sequence[int]) -> list[bytes]:
    """Hashes of the prompt's full blocks."""
    size = end.core.pool.block_size
    joined = joined_hashes(list(prompt), size, parent=root_of(end), secret=SECRET)
    return [*split_hashes(joined)]


def puller_of(end: PairedCore) -> KvPuller:
    puller = end.core._puller
    assert puller is not None
    return puller


def server_of(end: PairedCore) -> KvServer:
    assert end.core._fetches is not None
    return end.core._fetches.server
