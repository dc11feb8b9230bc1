"""Bugs of the tiers' decisions, planted one at a time: a test must find each.

Every test passes without the bug; its own file runs it so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from pdserve.kv.tiers import admission, lanes, planner, turns
from pdserve.kv.tiers.admission import DiskAdmission, GhostList, HostAdmission, WriteBudget
from pdserve.kv.tiers.change_log import ChangeLog
from pdserve.kv.tiers.eviction import EvictionOrder, EvictionQueue
from pdserve.kv.tiers.host_index import HostIndex
from pdserve.kv.tiers.lanes import Lane, LaneEstimate
from pdserve.kv.tiers.moves.fetching import Fetching
from pdserve.kv.tiers.moves.storing import Storing
from tests.kv.tiers import test_admission as admissions
from tests.kv.tiers import test_eviction as orders
from tests.kv.tiers import test_host_index as frames
from tests.kv.tiers import test_lanes as speeds
from tests.kv.tiers import test_lower_tiers as works
from tests.kv.tiers import test_oracles as oracles
from tests.kv.tiers import test_planner as plans
from tests.kv.tiers import test_turns as conversations

Plant = Callable[[pytest.MonkeyPatch], None]
Check = Callable[[], None]


def host_before_disk() -> None:
    runs = [planner.Run("host", 0, 45), planner.Run("disk", 45, 45)]
    plans.test_the_hosts_last_blocks_come_in_groups(runs, 32, 1)


def queue_of_few() -> None:
    orders.test_the_queue_is_a_sorted_dictionary(0, 0)


def one_lru_list() -> None:
    prompts = oracles.conversations(Random(1), 300)
    oracles.test_exclusive_tiers_are_one_lru_list_of_the_sum(prompts, 30, 60)


def credit() -> None:
    admissions.test_the_credit_is_never_negative_and_no_more_is_spent_than_was_earned(1)


def random_work() -> None:
    for number in range(6):
        works.test_what_comes_back_is_what_went_down(number, 0.04, long=False)


# ---------------------------------------------------------------------- frames


def claimed_blocks_are_victims(patch: pytest.MonkeyPatch) -> None:
    whole = HostIndex.claim

    def claim(self: HostIndex, frame: int) -> None:
        whole(self, frame)
        resident = self._by_frame[frame]
        self._queue.put(resident.block.hash, self._key(resident))

    patch.setattr(HostIndex, "claim", claim)


def the_first_release_ends_all_claims(patch: pytest.MonkeyPatch) -> None:
    whole = HostIndex.release

    def release(self: HostIndex, frame: int) -> None:
        self._by_frame[frame].claims = min(1, self._by_frame[frame].claims)
        whole(self, frame)

    patch.setattr(HostIndex, "release", release)


def a_dropped_frame_is_free_while_it_is_read(patch: pytest.MonkeyPatch) -> None:
    whole = HostIndex._remove

    def remove(self: HostIndex, resident: Any) -> None:
        whole(self, resident)
        if resident.claims:
            self._free.append(resident.frame)

    patch.setattr(HostIndex, "_remove", remove)


def a_block_is_stored_before_it_is_whole(patch: pytest.MonkeyPatch) -> None:
    whole = HostIndex.abandon

    def abandon(self: HostIndex, frame: int) -> None:
        self._changes.stored(frames.block(1))
        whole(self, frame)

    patch.setattr(HostIndex, "abandon", abandon)


def removals_are_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ChangeLog, "removed", lambda self, block_hash: None)


def a_block_is_told_twice(patch: pytest.MonkeyPatch) -> None:
    whole = HostIndex.commit

    def commit(self: HostIndex, frame: int, block: Any, now: float) -> bool:
        fresh = whole(self, frame, block, now)
        if not fresh:
            self._changes.stored(block)
        return fresh

    patch.setattr(HostIndex, "commit", commit)


def pins_have_no_bound(patch: pytest.MonkeyPatch) -> None:
    whole = HostIndex.__init__
    patch.setattr(
        HostIndex,
        "__init__",
        lambda self, count, *, order, pin_max_share: whole(
            self, count, order=order, pin_max_share=1.0
        ),
    )


def pins_never_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostIndex, "_expire_pins", lambda self, now: None)


def a_use_makes_a_pinned_block_a_victim(patch: pytest.MonkeyPatch) -> None:
    def place(self: HostIndex, resident: Any) -> None:
        if not resident.claims:
            self._queue.put(resident.block.hash, self._key(resident))

    patch.setattr(HostIndex, "_place", place)


def what_the_device_has_stays(patch: pytest.MonkeyPatch) -> None:
    whole = HostIndex._key
    patch.setattr(HostIndex, "_key", lambda self, one: (1, *whole(self, one)[1:]))


# ---------------------------------------------------------------------- order


def roots_go_before_leaves(patch: pytest.MonkeyPatch) -> None:
    whole = HostIndex._key

    def key(self: HostIndex, resident: Any) -> Any:
        rank, score, number = whole(self, resident)
        return rank, score, -number

    patch.setattr(HostIndex, "_key", key)


def the_newest_goes_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EvictionOrder, "score", lambda self, last_use, turns: -last_use)


def turns_have_no_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EvictionOrder, "score", lambda self, last_use, turns: last_use + 60 * (turns - 1))


def stale_entries_count(patch: pytest.MonkeyPatch) -> None:
    def first(self: EvictionQueue, count: int) -> list[bytes]:
        return [name for _, name in sorted(self._heap)][:count]

    patch.setattr(EvictionQueue, "first", first)


def looking_removes(patch: pytest.MonkeyPatch) -> None:
    whole = EvictionQueue.first

    def first(self: EvictionQueue, count: int) -> list[bytes]:
        found = whole(self, count)
        for name in found:
            self.remove(name)
        return found

    patch.setattr(EvictionQueue, "first", first)


# ---------------------------------------------------------------------- lanes


def bytes_of_failed_jobs_stay(patch: pytest.MonkeyPatch) -> None:
    whole = Lane.failed

    def failed(self: Lane, size: int, now: float) -> None:
        whole(self, size, now)
        self.lost -= size

    patch.setattr(Lane, "failed", failed)


def failed_jobs_count_as_fast_ones(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lane, "failed", lambda self, size, now: self.done(size, now, 1e-6))


def idle_time_counts(patch: pytest.MonkeyPatch) -> None:
    whole = Lane.submit

    def submit(self: Lane, size: int, now: float) -> None:
        since = self._until
        whole(self, size, now)
        if self._jobs == 1:
            self._since = since

    patch.setattr(Lane, "submit", submit)
    whole_done = Lane.done
    patch.setattr(Lane, "done", lambda self, size, now, _: whole_done(self, size, now, 1e9))


def only_the_clock_counts(patch: pytest.MonkeyPatch) -> None:
    whole = Lane.done
    patch.setattr(Lane, "done", lambda self, size, now, _: whole(self, size, now, 1e9))


def bytes_ahead_do_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LaneEstimate, "seconds", lambda self, size: self.latency + size / self.bandwidth)


def small_jobs_teach_the_bandwidth(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lanes, "_SMALL", 0)


# ---------------------------------------------------------------------- plans


def the_last_token_is_fetched(patch: pytest.MonkeyPatch) -> None:
    whole = planner._Judge.__init__

    def init(self: Any, prompt: Any, *others: Any) -> None:
        whole(self, replace(prompt, tokens=prompt.tokens + 1), *others)
        self._prompt = prompt

    patch.setattr(planner._Judge, "__init__", init)


def the_first_loss_ends_the_search(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planner, "_points", lambda runs, most: [1] if runs else [])


def only_whole_runs_are_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planner._Judge, "hidden", lambda self, before, run: 0)


def deadlines_have_no_bound(patch: pytest.MonkeyPatch) -> None:
    whole = planner._Judge.__init__

    def init(self: Any, prompt: Any, lanes: Any, cost: Any, config: Any) -> None:
        whole(self, prompt, lanes, cost, replace(config, longest_wait=1e9))

    patch.setattr(planner._Judge, "__init__", init)


def fetches_that_are_forbidden_are_compared(patch: pytest.MonkeyPatch) -> None:
    whole = planner._candidates

    def candidates(prompt: Any, judge: Any) -> Any:
        judge.config = replace(judge.config, fetch="auto")
        return whole(prompt, judge)

    patch.setattr(planner, "_candidates", candidates)


def fetches_that_are_forced_are_judged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planner, "_allowed", lambda compared, prompt, config: compared)


def blocks_before_those_of_the_disk_come_in_groups(patch: pytest.MonkeyPatch) -> None:
    def divided(self: Any, runs: Any) -> int:
        blocks: int = sum(run.count for run in runs if run.source == "host")
        return blocks * self.config.block_bytes

    patch.setattr(planner._Judge, "_divided", divided)


def tiny_gains_are_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planner, "_sources", lambda runs: 0)


# ---------------------------------------------------------------------- admission


def the_write_budget_may_be_overdrawn(patch: pytest.MonkeyPatch) -> None:
    def take(self: WriteBudget, size: int, now: float) -> bool:
        allowed = self.share(now) > 0.0
        if allowed:
            self._credit -= size
        return allowed

    patch.setattr(WriteBudget, "take", take)


def credit_grows_without_bound(patch: pytest.MonkeyPatch) -> None:
    def refill(self: WriteBudget, now: float) -> None:
        self._credit += self._per_day * max(0.0, now - self._at) / 86_400.0
        self._at = max(self._at, now)

    patch.setattr(WriteBudget, "_refill", refill)


def time_that_jumps_back_earns_twice(patch: pytest.MonkeyPatch) -> None:
    def refill(self: WriteBudget, now: float) -> None:
        earned = self._per_day * max(0.0, now - self._at) / 86_400.0
        self._credit = min(float(self._per_day), self._credit + earned)
        self._at = now

    patch.setattr(WriteBudget, "_refill", refill)


def ghosts_have_no_bound(patch: pytest.MonkeyPatch) -> None:
    whole = GhostList.__init__
    patch.setattr(GhostList, "__init__", lambda self, most: whole(self, 10**9))


def refused_blocks_are_not_remembered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GhostList, "add", lambda self, block_hash, now: None)


def retention_is_that_of_what_was_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission, "_VERDICT_WEIGHT", 0.0)


def nothing_is_kept_for_reused_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DiskAdmission, "_takes_all", lambda self, now: self._mode != "reused")


def old_pins_count(patch: pytest.MonkeyPatch) -> None:
    whole = HostAdmission.admits
    patch.setattr(
        HostAdmission,
        "admits",
        lambda self, block, now, *, reused=False: whole(
            self, block, now, reused=reused or block.pin_until > 0
        ),
    )


def a_system_prompt_is_a_conversation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(turns, "_BRANCHES", 10**9)


# ---------------------------------------------------------------------- copies and reads


def a_block_that_changed_while_it_was_copied_counts(patch: pytest.MonkeyPatch) -> None:
    whole = Storing.stored

    def stored(self: Storing, job: Any, error: str, now: float) -> None:
        present = [self._device.generation(block) for block in job.blocks]
        whole(self, replace(job, generations=present), error, now)

    patch.setattr(Storing, "stored", stored)


def a_copy_that_failed_counts(patch: pytest.MonkeyPatch) -> None:
    whole = Fetching.copied_in
    patch.setattr(
        Fetching,
        "copied_in",
        lambda self, done, job, now: whole(self, replace(done, error=""), job, now),
    )


def a_read_that_failed_counts(patch: pytest.MonkeyPatch) -> None:
    whole = Fetching.filled
    patch.setattr(
        Fetching,
        "filled",
        lambda self, done, job, now: whole(self, replace(done, error=""), job, now),
    )


def a_fetch_lets_its_frames_go_too_early(patch: pytest.MonkeyPatch) -> None:
    def claimed(self: Fetching, block_hash: bytes) -> int:
        frame = self._host.frame(block_hash)
        assert frame is not None
        return frame

    patch.setattr(Fetching, "_claimed", claimed)
    patch.setattr(HostIndex, "release", lambda self, frame: None)


BUGS: list[tuple[Plant, Check]] = [
    (claimed_blocks_are_victims, frames.test_a_claimed_block_is_no_victim_until_the_last_release),
    (
        the_first_release_ends_all_claims,
        frames.test_a_claimed_block_is_no_victim_until_the_last_release,
    ),
    (
        a_dropped_frame_is_free_while_it_is_read,
        frames.test_a_dropped_block_is_not_found_but_its_readers_keep_the_frame,
    ),
    (
        a_block_is_stored_before_it_is_whole,
        frames.test_an_abandoned_frame_is_free_again_and_nothing_is_told,
    ),
    (removals_are_not_told, frames.test_events_name_parents_and_only_real_changes),
    (a_block_is_told_twice, frames.test_a_block_is_not_stored_twice),
    (pins_have_no_bound, frames.test_a_pin_holds_until_its_time_and_pins_are_bounded),
    (pins_never_end, frames.test_a_pin_holds_until_its_time_and_pins_are_bounded),
    (a_use_makes_a_pinned_block_a_victim, frames.test_a_use_leaves_a_pinned_block_where_it_is),
    (what_the_device_has_stays, frames.test_what_the_device_has_too_goes_first),
    (roots_go_before_leaves, one_lru_list),
    (the_newest_goes_first, one_lru_list),
    (turns_have_no_bound, orders.test_earlier_turns_make_a_block_younger_up_to_a_bound),
    (stale_entries_count, queue_of_few),
    (looking_removes, queue_of_few),
    (bytes_of_failed_jobs_stay, speeds.test_a_failed_job_says_nothing_of_the_speed),
    (failed_jobs_count_as_fast_ones, speeds.test_a_failed_job_says_nothing_of_the_speed),
    (idle_time_counts, speeds.test_idle_time_does_not_count),
    (
        only_the_clock_counts,
        speeds.test_a_result_that_is_noticed_late_does_not_slow_the_lane_down,
    ),
    (bytes_ahead_do_not_count, plans.test_a_lane_with_a_long_queue_is_left_alone),
    (small_jobs_teach_the_bandwidth, speeds.test_bandwidth_and_latency_are_learnt_apart),
    (the_last_token_is_fetched, plans.test_the_last_token_is_computed),
    (
        the_first_loss_ends_the_search,
        plans.test_a_short_loss_is_accepted_for_a_long_segment_behind_it,
    ),
    (only_whole_runs_are_compared, plans.test_a_slow_disk_is_used_as_far_as_the_wait_hides_it),
    (deadlines_have_no_bound, plans.test_a_deadline_has_a_bound),
    (
        fetches_that_are_forbidden_are_compared,
        plans.test_other_workers_are_never_asked_or_always,
    ),
    (fetches_that_are_forced_are_judged, plans.test_other_workers_are_never_asked_or_always),
    (blocks_before_those_of_the_disk_come_in_groups, host_before_disk),
    (tiny_gains_are_taken, plans.test_each_source_has_to_gain_something),
    (the_write_budget_may_be_overdrawn, credit),
    (credit_grows_without_bound, admissions.test_a_day_can_be_spent_at_once_and_comes_back_evenly),
    (time_that_jumps_back_earns_twice, admissions.test_no_time_is_earned_twice),
    (ghosts_have_no_bound, admissions.test_ghosts_are_bounded_and_the_oldest_is_forgotten),
    (refused_blocks_are_not_remembered, admissions.test_a_short_host_takes_what_is_used_again),
    (
        retention_is_that_of_what_was_taken,
        admissions.test_the_verdict_does_not_flip_because_it_took_effect,
    ),
    (
        nothing_is_kept_for_reused_blocks,
        admissions.test_a_disk_keeps_part_of_its_writes_for_reused_blocks,
    ),
    (old_pins_count, admissions.test_a_short_host_takes_what_is_used_again),
    (
        a_system_prompt_is_a_conversation,
        conversations.test_a_prompt_that_many_continue_is_no_conversation,
    ),
    (a_block_that_changed_while_it_was_copied_counts, random_work),
    (a_copy_that_failed_counts, random_work),
    (a_read_that_failed_counts, random_work),
    (a_fetch_lets_its_frames_go_too_early, random_work),
]


@pytest.mark.parametrize(("plant", "check"), BUGS, ids=[plant.__name__ for plant, _ in BUGS])
def test_the_bug_is_found(plant: Plant, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        check()
