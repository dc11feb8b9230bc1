"""Bugs of the engine core's tiers, planted one at a time: random lives must find each.

Every bug names the oracles of `lives` that may find it, so that a rule which has stopped to look is
noticed. Other lives, with every commit, pass without bugs (`test_random_tiers`).
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.scheduler.scheduler import Scheduler
from pdserve.engine_core.tiers.core_tiers import CoreTiers
from pdserve.engine_core.tiers.early_starts import EarlyStarts
from pdserve.engine_core.tiers.onboarder import BlockFetch, Onboarder
from pdserve.engine_core.tiers.step_gate import StepGate
from pdserve.kv.tiers.cleaner import Cleaner
from pdserve.kv.tiers.job_runner import MemoryCopier
from pdserve.kv.tiers.jobs import CopyIn, CopyOut, Fill, JobDone, Spill, bytes_of, lane_of
from pdserve.kv.tiers.lower_tiers import FetchDone, LowerTiers
from pdserve.kv.tiers.moves.fetching import Fetching
from pdserve.kv.tiers.moves.fills import Fills
from pdserve.kv.tiers.moves.job_lanes import JobLanes
from pdserve.kv.tiers.moves.spilling import Spilling
from pdserve.kv.tiers.moves.storing import Storing
from pdserve.messages.kv_events import BlockRemoved, PoolCleared
from tests.engine_core.tiers.lives import OracleError, TieredLife

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdserve.engine_core.executor import StepPlan

LIVES = 100
"""Most lives until a bug is found. Always the same: the cost is a property of the suite."""


@dataclass(frozen=True)
class Bug:
    """A bug, and the oracles that may find it."""

    plant: Callable[[pytest.MonkeyPatch], None]
    oracles: frozenset[str]


BUGS: dict[str, Bug] = {}


def found_by(*oracles: str) -> Callable[[Callable[[pytest.MonkeyPatch], None]], Any]:
    """Enter a bug under its function's name."""

    def enter(plant: Callable[[pytest.MonkeyPatch], None]) -> Any:
        BUGS[plant.__name__] = Bug(plant, frozenset(oracles))
        return plant

    return enter


def without_error(done: JobDone) -> JobDone:
    """The end of a job, as if it had succeeded."""
    return JobDone(done.job, done.seconds)


# ------------------------------------------------------------------ the ends of jobs


@found_by("content", "tokens")
def failed_copies_out_count(patch: pytest.MonkeyPatch) -> None:
    whole = Storing.stored
    patch.setattr(Storing, "stored", lambda self, job, error, now: whole(self, job, "", now))


@found_by("content", "tokens")
def failed_copies_in_count(patch: pytest.MonkeyPatch) -> None:
    whole = Fetching.copied_in
    patch.setattr(
        Fetching,
        "copied_in",
        lambda self, done, job, now: whole(self, without_error(done), job, now),
    )


@found_by("content", "tokens")
def failed_reads_are_valid(patch: pytest.MonkeyPatch) -> None:
    whole = Fetching.filled
    patch.setattr(
        Fetching,
        "filled",
        lambda self, done, job, now: whole(self, without_error(done), job, now),
    )


@found_by("books")
def a_failed_read_keeps_its_frame(patch: pytest.MonkeyPatch) -> None:
    whole = Fills._failed

    def failed(self: Fills, *arguments: Any) -> None:
        abandon, self._host.abandon = self._host.abandon, lambda frame: None  # type: ignore[method-assign]
        try:
            whole(self, *arguments)
        finally:
            self._host.abandon = abandon  # type: ignore[method-assign]

    patch.setattr(Fills, "_failed", failed)


@found_by("books")
def a_full_disk_keeps_the_frames_claimed(patch: pytest.MonkeyPatch) -> None:
    whole = Spilling.spilled

    def spilled(self: Spilling, done: JobDone, job: Spill, now: float) -> None:
        if done.error:
            for frame in job.frames:
                self._host.claim(frame)
        whole(self, done, job, now)

    patch.setattr(Spilling, "spilled", spilled)


@found_by("books")
def a_read_keeps_its_segment_for_ever(patch: pytest.MonkeyPatch) -> None:
    whole = Fetching.filled

    def filled(self: Fetching, done: JobDone, job: Fill, now: float) -> None:
        assert self._tiers.disk is not None
        if done.error:
            self._tiers.disk.claim(job.place)
        whole(self, done, job, now)

    patch.setattr(Fetching, "filled", filled)


@found_by("lanes")
def bytes_of_failed_jobs_stay_in_their_lane(patch: pytest.MonkeyPatch) -> None:
    whole = JobLanes.ended

    def ended(self: JobLanes, done: JobDone, now: float) -> None:
        if done.error:
            self._lanes[lane_of(done.job)].submit(bytes_of(done.job, self._block_bytes), now)
        whole(self, done, now)

    patch.setattr(JobLanes, "ended", ended)


# ------------------------------------------------------------------ frames and their blocks


@found_by("events")
def stored_is_told_when_a_copy_begins(patch: pytest.MonkeyPatch) -> None:
    whole = Storing._copy_out

    def copy_out(self: Storing, chosen: Any, *arguments: Any, **options: Any) -> None:
        for source in chosen:
            self._host._changes.stored(source.content)
        whole(self, chosen, *arguments, **options)

    patch.setattr(Storing, "_copy_out", copy_out)


@found_by("content", "tokens", "secret")
def a_copy_of_what_the_block_was_counts(patch: pytest.MonkeyPatch) -> None:
    """The generation is not looked at again."""
    whole = Storing.stored

    def stored(self: Storing, job: CopyOut, error: str, now: float) -> None:
        now_there = [self._device.generation(block) for block in job.blocks]
        again = CopyOut(job.blocks, job.frames, job.contents, now_there, job.spare)
        whole(self, again, error, now)

    patch.setattr(Storing, "stored", stored)


@found_by("places")
def a_copy_does_not_wait_for_the_step_that_writes_the_block(patch: pytest.MonkeyPatch) -> None:
    """Blocks have names, and are copied, when their step is planned."""
    whole = EngineCore._plan

    def plan(self: EngineCore, now: float) -> StepPlan:
        made, names = whole(self, now), self.scheduler._names
        assert self._tiers is not None
        assert names is not None
        for chunk in made.chunks:
            sequence, before = chunk.sequence, chunk.sequence.num_computed
            sequence.num_computed = chunk.start + chunk.count
            self.scheduler._commit(sequence)
            sequence.num_computed = before
            self._tiers.cleaner.lend(names.of(sequence, sequence.num_committed), now)
        return made

    patch.setattr(EngineCore, "_plan", plan)


@found_by("places")
def frames_are_claimed_only_until_the_copy_begins(patch: pytest.MonkeyPatch) -> None:
    whole = Fetching._go_on

    def go_on(self: Fetching, fetch: Any, now: float) -> None:
        first = fetch.copying
        whole(self, fetch, now)
        for place in range(first, fetch.copying):
            if fetch.sources[place] == "host":
                self._host.release(fetch.frames[place])
                fetch.frames[place] = -1

    patch.setattr(Fetching, "_go_on", go_on)


@found_by("places", "content")
def frames_that_are_written_to_disk_are_not_claimed(patch: pytest.MonkeyPatch) -> None:
    whole, spilled = Spilling.spill, Spilling.spilled

    def spill(self: Spilling, now: float) -> None:
        submit = self._jobs.submit

        def unclaimed(job: Any, at: float) -> None:
            submit(job, at)
            for frame in job.frames:
                self._host.release(frame)

        self._jobs.submit = unclaimed  # type: ignore[method-assign,assignment]
        try:
            whole(self, now)
        finally:
            self._jobs.submit = submit  # type: ignore[method-assign]

    def end(self: Spilling, done: JobDone, job: Spill, now: float) -> None:
        spilled(self, done, Spill(job.batch, ()), now)

    patch.setattr(Spilling, "spill", spill)
    patch.setattr(Spilling, "spilled", end)


@found_by("content", "tokens")
def blocks_of_one_copy_change_places(patch: pytest.MonkeyPatch) -> None:
    whole = MemoryCopier.copy_in
    patch.setattr(
        MemoryCopier,
        "copy_in",
        lambda self, frames, blocks, span=None: whole(self, frames[::-1], blocks, span),
    )


@found_by("pins")
def pins_do_not_keep_blocks(patch: pytest.MonkeyPatch) -> None:
    whole = Storing._evict

    def evict(self: Storing, count: int, now: float) -> int:
        for name in list(self._host._pins):
            self._host._unpin(name)
            self._host._place(self._host._by_hash[name])
        return whole(self, count, now)

    patch.setattr(Storing, "_evict", evict)


@found_by("books")
def a_probe_claims_what_it_finds(patch: pytest.MonkeyPatch) -> None:
    whole = LowerTiers.run

    def run(self: LowerTiers, hashes: Any, start: int = 0) -> Any:
        found = whole(self, hashes, start)
        for name, source in zip(hashes[start:], found, strict=False):
            if source == "host":
                frame = self.host.frame(name)
                assert frame is not None
                self.host.claim(frame)
        return found

    patch.setattr(LowerTiers, "run", run)


@found_by("books")
def a_frame_is_taken_before_it_is_known_to_be_needed(patch: pytest.MonkeyPatch) -> None:
    """A read that is under way is joined, and has a frame."""
    whole = Fills.join

    def join(self: Fills, number: int, index: int, name: bytes, *rest: Any) -> int | None:
        if name in self._filling:
            self._take_frame(rest[-1])
        return whole(self, number, index, name, *rest)

    patch.setattr(Fills, "join", join)


@found_by("books", "places")
def frames_of_a_refused_fetch_stay_claimed(patch: pytest.MonkeyPatch) -> None:
    """A fetch that gets only some of its frames gives the others back."""
    whole = Fetching._let_go

    def let_go(self: Fetching, fetch: Any, first: int, last: int, now: float) -> None:
        whole(self, fetch, first if first < fetch.copying else first + 1, last, now)

    patch.setattr(Fetching, "_let_go", let_go)


# ------------------------------------------------------------------ fetches


@found_by("time")
def a_fetch_has_no_deadline(patch: pytest.MonkeyPatch) -> None:
    whole = Fetching._shorten

    def shorten(self: Fetching, fetch: Any, limit: int, reason: str, now: float) -> None:
        if reason != "deadline":
            whole(self, fetch, limit, reason, now)

    patch.setattr(Fetching, "_shorten", shorten)


@found_by("places")
def blocks_of_a_cancelled_fetch_are_free_at_once(patch: pytest.MonkeyPatch) -> None:
    whole = Onboarder._stop

    def stop(self: Onboarder, onboarding: BlockFetch, now: float) -> None:
        if onboarding.plan.local and onboarding.local_done is None:
            onboarding.local_done = FetchDone(onboarding.number, 0, ())
        whole(self, onboarding, now)

    patch.setattr(Onboarder, "_stop", stop)


@found_by("content", "tokens")
def what_comes_behind_a_gap_is_used(patch: pytest.MonkeyPatch) -> None:
    def arrived(self: BlockFetch) -> list[Any]:
        found: list[Any] = [] if self.local_done is None else [*self.local_done.sources]
        return [] if self.stale else found + ["peer"] * (self.pulled or 0)

    def cancel_no_pull(self: Onboarder, done: FetchDone, now: float) -> None:
        onboarding = self._onboardings.get(done.number)
        if onboarding is not None:
            onboarding.local_done = done
            self._try_end(onboarding, now)

    patch.setattr(BlockFetch, "arrived", arrived)
    patch.setattr(Onboarder, "fetched", cancel_no_pull)


@found_by("places", "content", "tokens")
def blocks_of_a_cancelled_pull_are_free_before_its_fence(patch: pytest.MonkeyPatch) -> None:
    whole = Onboarder._cancel_pull

    def cancel(self: Onboarder, onboarding: BlockFetch, now: float) -> None:
        whole(self, onboarding, now)
        onboarding.unfenced = False

    patch.setattr(Onboarder, "_cancel_pull", cancel)


@found_by("places", "content", "tokens")
def a_pull_that_failed_needs_no_fence(patch: pytest.MonkeyPatch) -> None:
    whole = Onboarder._try_end

    def end(self: Onboarder, onboarding: BlockFetch, now: float) -> None:
        onboarding.unfenced = onboarding.unfenced and not onboarding.over
        whole(self, onboarding, now)

    patch.setattr(Onboarder, "_try_end", end)


@found_by("quota")
def one_block_more_is_fetched_than_allowed(patch: pytest.MonkeyPatch) -> None:
    whole = Onboarder.__init__

    def init(self: Onboarder, *args: Any, **kwargs: Any) -> None:
        whole(self, *args, **kwargs)
        self._most += 1

    patch.setattr(Onboarder, "__init__", init)


@found_by("books")
def blocks_stay_in_quarantine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Onboarder, "on_fenced", lambda self, number: None)


@found_by("books")
def fetches_stay_counted(patch: pytest.MonkeyPatch) -> None:
    whole = Onboarder._forget

    def forget(self: Onboarder, onboarding: BlockFetch) -> None:
        before = self.in_flight
        whole(self, onboarding)
        if onboarding.cancelled:
            self.in_flight = before

    patch.setattr(Onboarder, "_forget", forget)


@found_by("books", "time")
def a_cancelled_fetch_is_joined_and_forgets_who_waits(patch: pytest.MonkeyPatch) -> None:
    whole = Onboarder._give_back

    def give_back(self: Onboarder, onboarding: BlockFetch) -> None:
        del onboarding.waiting[1:]
        whole(self, onboarding)

    patch.setattr(Onboarder, "_give_back", give_back)


# ------------------------------------------------------------------ secrets, private blocks


@found_by("secret")
def fetches_bring_blocks_of_the_old_secret(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Onboarder, "rename", lambda self: self._coming.clear())


@found_by("secret")
def reads_bring_blocks_of_the_old_secret(patch: pytest.MonkeyPatch) -> None:
    whole = Fills._keep

    def keep(self: Fills, block_hash: bytes, filling: Any, now: float) -> None:
        filling.unwanted = False
        whole(self, block_hash, filling, now)

    patch.setattr(Fills, "_keep", keep)


@found_by("secret")
def the_host_keeps_blocks_of_the_old_secret(patch: pytest.MonkeyPatch) -> None:
    whole = LowerTiers.rename

    def rename(self: LowerTiers) -> None:
        clear, self.host.clear = self.host.clear, lambda: None  # type: ignore[method-assign]
        whole(self)
        self.host.clear = clear  # type: ignore[method-assign]

    patch.setattr(LowerTiers, "rename", rename)


@found_by("secret")
def the_disk_goes_on_under_the_old_secret(patch: pytest.MonkeyPatch) -> None:
    whole = CoreTiers.rename

    def rename(self: CoreTiers, secret_id: bytes) -> None:
        whole(self, secret_id)
        self._secret, self.lower._tiers.disk_paused = None, False

    patch.setattr(CoreTiers, "rename", rename)


@found_by("private")
def private_blocks_are_stored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cleaner, "_wants", lambda self, name: self._tiers.wants(name))


@found_by("private")
def a_block_that_came_back_is_not_private(patch: pytest.MonkeyPatch) -> None:
    def follow(self: Cleaner, events: Any) -> None:
        for event in events:
            if isinstance(event, BlockRemoved):
                for name in event.hashes:
                    self._uses.pop(name, None)
            elif isinstance(event, PoolCleared):
                self._uses.clear()

    patch.setattr(Cleaner, "follow", follow)


@found_by("private")
def a_fetched_block_is_not_private(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cleaner, "came", lambda self, hashes, use: None)


# ------------------------------------------------------------------ layer groups


@found_by("content", "tokens")
def a_step_waits_for_the_group_before(patch: pytest.MonkeyPatch) -> None:
    """The last group is read when the one before it has come."""
    whole = LowerTiers.wait_copied
    patch.setattr(
        LowerTiers,
        "wait_copied",
        lambda self, fetch, group, seconds: group == 1 or whole(self, fetch, group - 1, seconds),
    )


@found_by("content", "tokens")
def a_step_waits_for_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepGate, "__call__", lambda self, layer: None)


@found_by("content", "tokens")
def what_came_late_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EarlyStarts, "_give_up", lambda self, early, is_late: None)


@found_by("content", "tokens")
def what_comes_after_the_wait_is_not_late(patch: pytest.MonkeyPatch) -> None:
    whole = LowerTiers.wait_copied

    def wait(self: LowerTiers, fetch: int, group: int, seconds: float) -> bool:
        whole(self, fetch, group, seconds)
        return True

    patch.setattr(LowerTiers, "wait_copied", wait)


@found_by("content", "tokens", "books")
def layers_that_failed_count(patch: pytest.MonkeyPatch) -> None:
    over = EarlyStarts.over
    patch.setattr(EarlyStarts, "over", lambda self, fetch, *, whole: over(self, fetch, whole=True))


@found_by("content", "tokens", "events")
def blocks_have_names_when_their_first_layers_have_come(patch: pytest.MonkeyPatch) -> None:
    place = Scheduler._place

    def named(self: Scheduler, sequence: Any) -> bool:
        placed = place(self, sequence)
        if placed and sequence.early is not None:
            self._commit(sequence)
        return placed

    patch.setattr(Scheduler, "_place", named)


@found_by("places", "content", "books")
def frames_are_let_go_with_the_first_group(patch: pytest.MonkeyPatch) -> None:
    whole = Fetching.copied_in

    def copied_in(self: Fetching, done: JobDone, job: CopyIn, now: float) -> None:
        if not job.last:
            self._let_go(self._fetches[job.fetch], job.first, job.first + len(job.frames), now)
        whole(self, done, job, now)

    patch.setattr(Fetching, "copied_in", copied_in)


# ------------------------------------------------------------------ the tests


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The bug is there."""
    with pytest.MonkeyPatch.context() as patch:
        BUGS[name].plant(patch)
        yield


def first_finding(name: str) -> OracleError | None:
    """What the first life says that notices the bug."""
    with planted(name):
        for seed in range(LIVES):
            try:
                TieredLife(seed).run()
            except OracleError as error:
                return error
    return None


@pytest.mark.long(one_in=3)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    found = first_finding(name)
    assert found is not None, f"{LIVES} lives have not noticed it"
    assert found.oracle in BUGS[name].oracles, str(found)


def test_a_bug_is_gone_afterwards() -> None:
    before = Storing.stored
    with planted("failed_copies_out_count"):
        assert Storing.stored is not before
    assert Storing.stored is before
