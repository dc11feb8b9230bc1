"""Bugs planted into changes of a mode, each of which a scenario must find."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pdserve.worker.agent import WorkerAgent
from pdserve.worker.disagg.decode_handler import DecodeHandler
from pdserve.worker.disagg.queue.claims import QueueClaimSource
from pdserve.worker.mode import switch as driver
from pdserve.worker.mode.jobs import undone_without
from pdserve.worker.mode.switch import ModeSwitch
from pdserve.worker.service import WorkerService
from tests.worker.mode import test_switch as scenarios

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.messages.handoff import ItemClaimed

Patch = pytest.MonkeyPatch


def _nobody_is_needed(patch: Patch) -> None:
    patch.setattr(driver, "undone_without", lambda *args, **words: "")


def _queue_client_stays(patch: Patch) -> None:
    use_queue = DecodeHandler.use_queue

    def only_once(self: DecodeHandler, queue: Any, generation: int) -> None:
        if generation == 1:
            use_queue(self, queue, generation)

    patch.setattr(DecodeHandler, "use_queue", only_once)


def _any_claim_is_good(patch: Patch) -> None:
    claimed = QueueClaimSource._claimed

    def whatever_it_says(self: QueueClaimSource, router: Any, message: ItemClaimed) -> None:
        claimed(self, router, replace(message, generation=0))

    patch.setattr(QueueClaimSource, "_claimed", whatever_it_says)


def _cache_is_dropped(patch: Patch) -> None:
    flip = ModeSwitch._flip

    def and_forget(self: ModeSwitch, mode: Any, share: float) -> Any:
        self._service.rekey(b"another secret of this length..."[:32])
        return flip(self, mode, share)

    patch.setattr(ModeSwitch, "_flip", and_forget)


def _quarantine_is_dropped(patch: Patch) -> None:
    flip = ModeSwitch._flip

    def and_free(self: ModeSwitch, mode: Any, share: float) -> Any:
        pool = self._service.engine.core.pool  # type: ignore[attr-defined]
        pool.unquarantine(sorted(pool._quarantined))
        return flip(self, mode, share)

    patch.setattr(ModeSwitch, "_flip", and_free)


def _card_comes_first(patch: Patch) -> None:
    flip = ModeSwitch._flip

    def told_before(self: ModeSwitch, mode: Any, share: float) -> Any:
        former, self._service.mode = self._service.mode, mode
        self._parts.tell()
        self._service.mode = former
        return flip(self, mode, share)

    patch.setattr(ModeSwitch, "_flip", told_before)


def _requests_are_taken_meanwhile(patch: Patch) -> None:
    patch.setattr(WorkerService, "check_accepts", lambda self: None)


def _prompts_go_elsewhere_meanwhile(patch: Patch) -> None:
    patch.setattr(WorkerAgent, "pause_queues", lambda self, paused: None)


def _requests_are_refused_meanwhile(patch: Patch) -> None:
    tell = ModeSwitch._tell

    def as_if_none_were_kept(self: ModeSwitch) -> None:
        self._keeps = False
        tell(self)

    patch.setattr(ModeSwitch, "_tell", as_if_none_were_kept)


def _who_leaves_counts(patch: Patch) -> None:
    def never_sure(*args: Any, sure: bool) -> str:
        return undone_without(*args)

    patch.setattr(driver, "undone_without", never_sure)


def _no_look_at_what_is_left(patch: Patch) -> None:
    patch.setattr(WorkerAgent, "left_for", lambda self, mode: 0)
    patch.setattr(driver, "_SEEN", 0.0)


def _no_way_back(patch: Patch) -> None:
    def stays(self: ModeSwitch, former: Any, share: float, why: str) -> None:
        self._serve()
        self._ended("failed", why)

    patch.setattr(ModeSwitch, "_return", stays)


BUGS: dict[str, tuple[Callable[[Patch], None], Callable[[], None]]] = {
    "nobody is needed": (_nobody_is_needed, scenarios.test_a_worker_that_is_needed_refuses),
    "two leave together": (
        lambda patch: patch.setattr(driver, "_SEEN", 0.0),
        scenarios.test_of_two_that_leave_together_one_stays,
    ),
    "the queue's client stays": (
        _queue_client_stays,
        scenarios.test_streams_stay_where_both_modes_take_requests,
    ),
    "a stale claim is obeyed": (
        _any_claim_is_good,
        scenarios.test_claims_and_attempts_of_another_generation_are_stale,
    ),
    "the cache is dropped": (
        _cache_is_dropped,
        scenarios.test_the_prefix_cache_stays_and_its_blocks_are_used_in_the_new_mode,
    ),
    "a quarantine is dropped": (
        _quarantine_is_dropped,
        scenarios.test_blocks_in_quarantine_stay_there,
    ),
    "a card is told before its parts are attached": (
        _card_comes_first,
        scenarios.test_queue_clients_that_cannot_be_made_are_no_end,
    ),
    "requests are taken meanwhile": (
        _requests_are_taken_meanwhile,
        scenarios.test_who_will_take_no_requests_takes_none_meanwhile,
    ),
    "requests are refused meanwhile": (
        _requests_are_refused_meanwhile,
        scenarios.test_a_change_waits_for_prompts_on_their_way,
    ),
    "prompts go elsewhere meanwhile": (
        _prompts_go_elsewhere_meanwhile,
        scenarios.test_a_change_waits_for_prompts_on_their_way,
    ),
    "who leaves for sure counts": (
        _who_leaves_counts,
        scenarios.test_nobody_counts_on_a_worker_that_leaves_for_sure,
    ),
    "nothing is waited for": (
        _no_look_at_what_is_left,
        scenarios.test_a_change_waits_for_prompts_on_their_way,
    ),
    "no way back": (_no_way_back, scenarios.test_a_mode_that_does_not_work_is_given_up),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_scenario_finds_the_bug(bug: str, monkeypatch: Patch) -> None:
    plant, scenario = BUGS[bug]
    plant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        scenario()
