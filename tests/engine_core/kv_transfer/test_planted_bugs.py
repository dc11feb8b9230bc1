"""Bugs of handoffs to a worker with a host tier, planted one at a time: random courses notice each.

D asks P for prompts while it brings what it has of them up from its host memory. P is pressed: it
evicts everything that nobody holds. After every step, whatever is being sent is held by its sender,
what a peer may write to is written by nobody else, and every block that can be found has the bytes
of its hash. At the end every request has the tokens that it gets alone, and nothing is held.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.kv_transfer.receiver import KvReceiver
from pdserve.engine_core.kv_transfer.sender import KvSender
from pdserve.engine_core.scheduler.remote_admission import RemoteAdmission
from pdserve.engine_core.tiers.core_tiers import TierStorage
from pdserve.kv.storage import BlockMemory
from pdserve.kv.tiers.job_runner import JobRunner, MemoryCopier
from pdserve.kv.tiers.jobs import CopyIn
from pdserve.kv.tiers.virtual_io import LaneRate, VirtualTierIo
from pdserve.messages.engine import AttemptLost, EngineSpec, TransferSpec
from pdserve.messages.tiers import TierSpec
from pdserve.testing.scripted import ENGINE, ScriptedExecutor
from tests.engine_core.kv_transfer.test_handoff import prompt_of, reference, request
from tests.support.disagg_pair import DisaggPair, make_pair
from tests.support.kv_checks import check_contents, check_reads, contents_of, evict_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine_core.executor import ModelInfo
    from pdserve.kv.tiers.jobs import JobDone, TierJob
    from pdserve.messages.engine import Event

BLOCK = 4
BLOCK_BYTES = 16 * BLOCK
FRAMES = 40
SECRET = b"secret"
SPEC = EngineSpec(
    engine=ENGINE,
    model="",
    block_size=BLOCK,
    max_batch_tokens=12,
    max_sequences=6,
    max_model_len=96,
    hash_secret=SECRET,
    options={"blocks": "40", "layers": "4"},
    transfer=TransferSpec(),
)
PROMPTS = [prompt_of(length, seed=length) for length in (14, 21, 34)]


CONTENTS = {
    name: content
    for prompt in PROMPTS
    for name, content in contents_of(prompt, BLOCK, SECRET).items()
}


class WatchedIo(VirtualTierIo):
    """Jobs in simulated time; knows which are under way."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.under_way: list[TierJob] = []

    def submit(self, job: TierJob) -> None:
        self.under_way.append(job)
        super().submit(job)

    def _end(self, job: TierJob, seconds: float) -> JobDone:
        self.under_way.remove(job)
        return super()._end(job, seconds)


class HandoffWorld:
    """One course; `run` raises AssertionError for what must not be."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        tiers = TierSpec(host_bytes=FRAMES * BLOCK_BYTES)
        self.both: DisaggPair = make_pair(
            ScriptedExecutor, SPEC, d={"tiers": tiers}, core=self._core
        )

    def _core(self, executor: Any, clock: Any, mover: Any) -> EngineCore:
        core = EngineCore(executor, clock, mover)
        core._step_cost.prefill = lambda length, cached=0: float(length - cached)  # type: ignore[method-assign]

        def open_storage(spec: TierSpec, info: ModelInfo, secret_id: bytes) -> TierStorage:
            arena = BlockMemory(FRAMES, (BLOCK_BYTES,))
            device, view = executor.region().view, arena.view()
            runner = JobRunner(MemoryCopier(device, view, BLOCK_BYTES), arena, None)
            rates = dict.fromkeys(("d2h", "h2d"), LaneRate(1e7, 0.02))
            self.io = WatchedIo(clock, BLOCK_BYTES, runner, rates)

            def free() -> None:
                view.release()
                device.release()
                arena.close()

            return TierStorage(FRAMES, BLOCK_BYTES, self.io, None, runner, free)

        core._open_storage = open_storage  # type: ignore[method-assign]
        return core

    # ------------------------------------------------------------------ the course

    def run(self, steps: int = 60) -> None:
        for prompt in PROMPTS:
            self.both.d.engine.submit(request(prompt, max_tokens=1))
        self.rest()
        for _ in range(steps):
            self.rng.choice(ACTIONS)(self)
            self.turn()
        self.rest()
        self.finish()

    def turn(self) -> None:
        both = self.both
        events = both.step_d()
        self.look()
        for event in events:
            self.answer(event)
        both.net.step(self.rng)
        for event in both.step_p():
            self.answer(event)
        self.look()
        for end in (both.d, both.p):
            end.clock.advance(0.004)

    def answer(self, event: Event) -> None:
        """Do what the nodes do. An attempt that is lost is followed by another one."""
        both = self.both
        match type(event).__name__:
            case "Admitted" | "AttemptLost":
                handle = event.handle  # type: ignore[union-attr]
                lives = not both.d.engine.ledgers[handle].done
                if lives and (not isinstance(event, AttemptLost) or event.kind != "Overloaded"):
                    both.open(handle)
            case "AttemptBlocksOpened":
                both.prefill(event)  # type: ignore[arg-type]
            case "Prefilled":
                both.activate(event)  # type: ignore[arg-type]

    def rest(self) -> None:
        """Go on until nothing is left to do."""
        for _ in range(3_000):
            ends = (self.both.d, self.both.p)
            idle = not self.both.net.under_way and not self.io.under_way
            if idle and not any(end.core.has_work for end in ends):
                return
            self.turn()
        raise AssertionError("the two make no progress")

    def finish(self) -> None:
        both = self.both
        for handle, ledger in both.d.engine.ledgers.items():
            assert ledger.done, handle
            assert ledger.error is None, ledger.error
            if not ledger.aborted:
                assert ledger.tokens == reference(ledger.request)
        both.close()

    # ------------------------------------------------------------------ what may happen

    def ask(self) -> None:
        """A prompt for P, of which D may have something on its host."""
        self.both.submit(request(self.rng.choice(PROMPTS), max_tokens=self.rng.randint(1, 3)))

    def forget(self) -> None:
        """D's device is given to others; its host keeps what was there."""
        evict_all(self.both.d)

    def press(self) -> None:
        """P's blocks are given to others."""
        evict_all(self.both.p)

    def lose(self) -> None:
        """A part does not arrive, or arrives late; P is asked again."""
        self.both.net.faults.append(self.rng.choice(("lost", "late")))

    def abort(self) -> None:
        ledgers = [one for one in self.both.d.engine.ledgers.values() if not one.done]
        if ledgers:
            self.both.d.engine.abort(self.rng.choice(ledgers))

    # ------------------------------------------------------------------ what must hold

    def look(self) -> None:
        for end in (self.both.d, self.both.p):
            check_reads(end)
            check_contents(end, CONTENTS)
        self.check_writers()

    def check_writers(self) -> None:
        """A block is written by a peer, or from the host, or belongs to a sequence."""
        d = self.both.d
        written = self.both.net.closing(d.mover)
        copied = [b for job in self.io.under_way if isinstance(job, CopyIn) for b in job.blocks]
        assert not written & {*copied}, "a peer and this worker write to one block"
        running = {b for one in d.core.scheduler.running for b in one.blocks}
        assert not written & running, "a peer writes to the block of a sequence"


ACTIONS: list[Callable[[HandoffWorld], None]] = [
    *[HandoffWorld.ask] * 3,
    *[HandoffWorld.forget] * 3,
    *[HandoffWorld.press] * 2,
    *[lambda world: None] * 6,
    HandoffWorld.lose,
    HandoffWorld.abort,
]


def test_nothing_is_wrong_without_a_bug(seed: int, long: bool) -> None:
    lost = from_host = received = 0
    for number in (*range(3), *range(seed, seed + (200 if long else 3))):
        world = HandoffWorld(number)
        world.run()
        stats, lost = world.both.d.stats, lost + len(world.both.lost)
        received += stats.received_tokens
        from_host += stats.tiers[0].hit_tokens
    assert min(lost, from_host, received) > 0


# ------------------------------------------------------------------ bugs that must be noticed


def a_late_need_is_answered_from_blocks_that_were_freed(patch: pytest.MonkeyPatch) -> None:
    """P sends a prompt again from where it was when it was sent first."""
    whole, known = KvSender._post, dict[Any, Any]()

    def post(self: KvSender, prefill: Any, sequence: Any, piece: Any) -> None:
        whole(self, prefill, sequence, piece)
        if piece is not None:
            delivery = self._mover._deliveries[-1]  # type: ignore[attr-defined]
            key = self, tuple(sequence.tokens), delivery.part.start, len(delivery.part.blocks)
            blocks = known.setdefault(key, delivery.part.blocks)
            delivery.part, delivery.data = replace(delivery.part, blocks=blocks), None

    patch.setattr(KvSender, "_post", post)


def parts_are_held_only_while_the_prompt_is_computed(patch: pytest.MonkeyPatch) -> None:
    whole = KvSender._post

    def post(self: KvSender, prefill: Any, sequence: Any, piece: Any) -> None:
        whole(self, prefill, sequence, piece)
        if piece is not None:
            blocks, complete = prefill.under_way[piece.number]
            self._pool.release(blocks)
            prefill.under_way[piece.number] = ([], complete)

    patch.setattr(KvSender, "_post", post)
    patch.setattr(KvSender, "_sends", lambda self, sequence: False)


def parts_are_sent_before_they_are_computed(patch: pytest.MonkeyPatch) -> None:
    """They do not wait for the step that writes them."""
    whole = KvSender.planned

    def planned(self: KvSender, plan: Any) -> None:
        whole(self, plan)
        self.computed(plan)

    patch.setattr(KvSender, "planned", planned)


def a_peer_fills_blocks_that_come_from_the_host(patch: pytest.MonkeyPatch) -> None:
    """What D brings up is in the ticket too: both write to one block."""
    whole = RemoteAdmission.bind

    def bind(self: Any, handle: int) -> tuple[list[int], list[int]] | None:
        found = whole(self, handle)
        names = [*self._reusable_hashes(self.stem_of(handle))]
        if found is None:
            return None
        shared, fresh = found
        for fetch in self.onboarder._onboardings.values():
            for name, block in zip(fetch.hashes, fetch.blocks, strict=False):
                at = names.index(name) - len(shared) if name in names else -1
                if 0 <= at < len(fresh):
                    self._pool.release_early([fresh[at]])
                    self._pool.acquire([block])
                    fresh[at] = block
        return shared, fresh

    patch.setattr(RemoteAdmission, "bind", bind)


def a_lost_attempt_leaves_its_blocks_to_others(patch: pytest.MonkeyPatch) -> None:
    """The writer before may still write when the next one begins."""
    whole = KvReceiver._end

    def end(self: KvReceiver, attempt: Any) -> None:
        whole(self, attempt)
        if attempt.key in self._closing:
            self._free(attempt.key)

    patch.setattr(KvReceiver, "_end", end)


BUGS = [
    a_late_need_is_answered_from_blocks_that_were_freed,
    parts_are_held_only_while_the_prompt_is_computed,
    parts_are_sent_before_they_are_computed,
    a_peer_fills_blocks_that_come_from_the_host,
    a_lost_attempt_leaves_its_blocks_to_others,
]
WORLDS = 40
"""Most courses until a bug is noticed; always the same."""


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_every_bug_is_noticed(bug: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        assert any(is_noticed(HandoffWorld(number)) for number in range(WORLDS))


def is_noticed(world: HandoffWorld) -> bool:
    """Whether the course fails; gives its memory back, even if it is broken."""
    try:
        world.run()
    except (AssertionError, ValueError, KeyError):
        return True
    finally:
        for end in (world.both.d, world.both.p):
            with suppress(AssertionError, ValueError, KeyError):
                end.core.close()
            end.core._executor.close()
    return False
