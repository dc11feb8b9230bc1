"""Bugs of sources and of predictions with tiers, planted one at a time: a test must find each.

Every test passes without the bug; its own file runs it so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace as replaced

from pdserve.kv.tiers.lanes import LaneEstimate
from pdserve.kv.tiers.layer_groups import most_groups
from pdserve.messages.tiers import KvSource
from pdserve.router import kv_sources, onboarding, worker_table
from pdserve.router.bookings import Bookings, _Account
from pdserve.router.core import RouterCore
from pdserve.router.onboarding import BlocksBySource
from pdserve.router.policies.base import RoutingState
from pdserve.router.prefix_index.index import PrefixIndex
from tests.router import test_bookings_work as bookings
from tests.router import test_core_tiers as decisions
from tests.router import test_kv_sources as sources
from tests.router import test_onboarding as plans
from tests.support.records import replace

Plant = Callable[[pytest.MonkeyPatch], None]


def any_cluster() -> None:
    sources.test_sources_of_any_cluster(0, 1)


def reported() -> None:
    ledger = bookings.Ledger()
    bookings.test_bytes_count_from_the_decision_to_the_report_that_contains_them(ledger)


def ended() -> None:
    bookings.test_bytes_do_not_outlive_their_booking_nor_its_first_token(bookings.Ledger())


def all_points() -> None:
    for number in range(2):
        plans.test_no_other_point_is_sooner(number, 1)


def same_as_workers() -> None:
    plans.test_it_is_what_the_workers_own_planner_predicts(2)


# ---------------------------------------------------------------------- sources


def the_chosen_worker_is_its_own_source(patch: pytest.MonkeyPatch) -> None:
    """It is asked for what only a lower tier of its own has."""
    patch.setattr(kv_sources, "reachable", lambda worker, holder: True)
    patch.setattr(RoutingState, "own_blocks", lambda self, node: self.overlaps.get(node, 0))


def only_the_device_of_the_chosen_worker_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoutingState, "own_blocks", lambda self, node: self.overlaps.get(node, 0))


def only_the_devices_of_others_count(patch: pytest.MonkeyPatch) -> None:
    whole = PrefixIndex.holders

    def holders(self: PrefixIndex, *asked: bytes) -> Any:
        return {life: (device, device) for life, (device, _) in whole(self, *asked).items()}

    patch.setattr(PrefixIndex, "holders", holders)


def excluded_workers_are_sources(patch: pytest.MonkeyPatch) -> None:
    whole = RouterCore._holders
    patch.setattr(
        RouterCore, "_holders", lambda self, asked: whole(self, replaced(asked, excluded=()))
    )


def workers_in_doubt_are_sources(patch: pytest.MonkeyPatch) -> None:
    def sends(self: Any) -> bool:
        return self.facts.draining or self.load is None or self.load.ready

    patch.setattr(worker_table._Worker, "sends", property(sends))


def workers_that_do_not_answer_are_sources(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        worker_table._Worker,
        "sends",
        property(lambda self: not self.facts.suspect and self.facts.reachable),
    )


def draining_workers_are_no_sources(patch: pytest.MonkeyPatch) -> None:
    def sends(self: Any) -> bool:
        facts, load = self.facts, self.load
        sound = facts.reachable and not facts.suspect and not facts.draining
        return sound and (load is None or load.ready)

    patch.setattr(worker_table._Worker, "sends", property(sends))


def every_source_is_a_first_life(patch: pytest.MonkeyPatch) -> None:
    made = "pdserve.router.kv_sources.KvSource"
    patch.setattr(made, lambda node, epoch, *counts: KvSource(node, 1, *counts))


def the_shortest_come_first(patch: pytest.MonkeyPatch) -> None:
    whole = kv_sources.kv_sources
    patch.setattr("pdserve.router.core.kv_sources", lambda *asked: tuple(reversed(whole(*asked))))


def all_are_named(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kv_sources, "MOST_SOURCES", 99)


def what_was_only_sent_is_a_source(patch: pytest.MonkeyPatch) -> None:
    def holders(self: PrefixIndex, names: bytes, names_id: bytes = b"") -> Any:
        found = self.find(0.0, names, names_id)
        return {
            life: (found.overlaps.get(life.node, 0), found.own_blocks(life.node))
            for life in self.lives
        }

    patch.setattr(PrefixIndex, "holders", holders)


# ---------------------------------------------------------------------- predictions


def a_backlog_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LaneEstimate, "seconds", lambda self, size: self.latency + size / self.bandwidth)


def lanes_work_one_after_the_other(patch: pytest.MonkeyPatch) -> None:
    def times(blocks: BlocksBySource, lanes: Any, size: int, groups: int) -> Any:
        sizes = blocks.sizes(size)
        if not sizes.keys() <= lanes.keys():
            return None
        return (sum(lanes[name].seconds(each) for name, each in sizes.items()),) * 2

    patch.setattr(onboarding, "_times", times)


def disk_blocks_skip_the_host(patch: pytest.MonkeyPatch) -> None:
    def sizes(self: BlocksBySource, size: int) -> dict[str, int]:
        found = {"h2d": self.host, "disk_read": self.disk, "fetch": self.peer}
        return {lane: count * size for lane, count in found.items() if count}

    patch.setattr(BlocksBySource, "sizes", sizes)


def the_longest_prefix_is_always_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(onboarding, "_finish", lambda wait, first, whole, compute, groups: compute)


def layers_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(onboarding, "_groups", lambda blocks, size, layers: 1)


def blocks_of_the_disk_come_in_groups(patch: pytest.MonkeyPatch) -> None:
    def groups(blocks: BlocksBySource, size: int, layers: int) -> int:
        return most_groups((blocks.host + blocks.disk) * size, size, layers)

    patch.setattr(onboarding, "_groups", groups)


def a_slow_worker_computes_as_fast_as_others(patch: pytest.MonkeyPatch) -> None:
    whole = onboarding._soonest

    def soonest(asked: Any, worker: Any, *rest: Any) -> Any:
        return whole(asked, replace(worker, speed=1.0), *rest)

    patch.setattr(onboarding, "_soonest", soonest)


def a_plan_is_no_load(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Bookings, "reserved", lambda self, node: Counter())


def a_report_leaves_the_bytes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Account, "_unreserve", lambda self, booking: None)


def any_report_takes_the_bytes(patch: pytest.MonkeyPatch) -> None:
    whole = _Account.report

    def report(self: _Account) -> None:
        whole(self)
        for id in tuple(self.reserving):
            self._unreserve(self.open[id])

    patch.setattr(_Account, "report", report)


def tier_hits_are_free(patch: pytest.MonkeyPatch) -> None:
    """Work counts as if the whole prompt were on the device."""
    whole = RouterCore._place

    def place(self: RouterCore, now: Any, frontend: Any, asked: Any, state: Any, *rest: Any) -> Any:
        free = {node: replace(plan, compute=0.0) for node, plan in state.onboarding.items()}
        return whole(self, now, frontend, asked, replace(state, onboarding=free), *rest)

    patch.setattr(RouterCore, "_place", place)


BUGS: list[tuple[Plant, Callable[[], None]]] = [
    (the_chosen_worker_is_its_own_source, any_cluster),
    (only_the_device_of_the_chosen_worker_counts, any_cluster),
    (only_the_devices_of_others_count, any_cluster),
    (excluded_workers_are_sources, any_cluster),
    (workers_in_doubt_are_sources, any_cluster),
    (workers_that_do_not_answer_are_sources, any_cluster),
    (draining_workers_are_no_sources, any_cluster),
    (every_source_is_a_first_life, any_cluster),
    (the_shortest_come_first, any_cluster),
    (all_are_named, any_cluster),
    (what_was_only_sent_is_a_source, sources.test_what_was_only_sent_there_is_no_source),
    (a_backlog_is_not_waited_for, plans.test_a_backlog_makes_recomputing_sooner),
    (lanes_work_one_after_the_other, all_points),
    (disk_blocks_skip_the_host, all_points),
    (the_longest_prefix_is_always_taken, plans.test_a_lane_that_is_too_slow_is_left_out),
    (layers_are_not_counted, all_points),
    (layers_are_not_counted, same_as_workers),
    (blocks_of_the_disk_come_in_groups, all_points),
    (blocks_of_the_disk_come_in_groups, same_as_workers),
    (a_slow_worker_computes_as_fast_as_others, all_points),
    (a_plan_is_no_load, decisions.test_bytes_of_a_decision_count_for_the_next_one_at_once),
    (a_report_leaves_the_bytes, reported),
    (a_report_leaves_the_bytes, ended),
    (any_report_takes_the_bytes, reported),
    (tier_hits_are_free, decisions.test_what_a_tier_saves_is_no_work_but_its_way_up_is_bytes),
]


@pytest.mark.parametrize(("plant", "check"), BUGS, ids=lambda one: one.__name__)
def test_each_bug_is_found(
    plant: Plant, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    check()
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        check()
