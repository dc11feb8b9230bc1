"""What goes wrong with a pull, one thing at a time: one reason, and nothing is held afterwards."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.engine_core.kv_fetch.ports import REASONS
from pdserve.engine_core.kv_fetch.server import SLACK
from pdserve.engine_core.kv_transfer.connector import AttemptBroken
from pdserve.errors import NotReady
from pdserve.messages.engine import KvPullAnswer
from pdserve.messages.kv_pull import KvPullGrant
from pdserve.messages.tiers import KvSource
from tests.engine_core.kv_fetch.pair import (
    BLOCK,
    FetchPair,
    Wanted,
    evict,
    fetch_pair,
    puller_of,
    server_of,
)
from tests.engine_core.kv_fetch.test_fetches import check_reused, known, small_parts
from tests.engine_core.kv_transfer.test_handoff import prompt_of, reference, request

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT = 8
LENGTH = COUNT * BLOCK + 1


def started() -> tuple[FetchPair, list[int], Wanted]:
    """A pull of eight blocks, in eight parts, that has just begun."""
    both = fetch_pair()
    server_of(both.o)._limits = small_parts(both)
    prompt = known(both, LENGTH)
    return both, prompt, both.pull(prompt[:-1])


def finish(both: FetchPair, prompt: list[int]) -> None:
    """The next pull works, and gives the same tokens."""
    both.lose_answers, both.alter, both.net.faults, both.r.mover.refuse = False, None, [], ""
    both.run()
    both.check_idle()
    again = both.pull(prompt[:-1])
    both.run()
    assert again.ended == (COUNT, "")
    check_reused(both, request(prompt), COUNT * BLOCK)
    both.run()
    both.check_idle()
    both.close()


def held(both: FetchPair) -> tuple[int, int]:
    counts = both.r.core.pool.counts()
    return counts.used, counts.quarantined


# ------------------------------------------------------------------ what the owner has


@pytest.mark.parametrize("left", [0, 1, 5])
def test_only_the_leading_blocks_that_the_owner_has_count(left: int):
    both, prompt, one = started()
    evict(both.o, COUNT - left)
    both.run()
    assert one.ended == (left, "" if left else "absent")
    assert one.fences == 1
    assert both.ended[0].blocks == left
    check_reused(both, request(prompt), left * BLOCK)
    both.generate(both.o, request(prompt, max_tokens=1))
    both.run()
    both.check_idle()
    both.close()


def revoked(count: int) -> tuple[FetchPair, Wanted]:
    """A pull that has brought `count` blocks, just before the fence of the others."""
    both, _, one = started()
    evict(both.o, COUNT - count)
    while not puller_of(both.r)._closing:
        both.step_o()
        both.net.step()
        both.step_r()
    assert both.net.closing(both.r.mover) == set(one.blocks)
    return both, one


def test_blocks_of_a_short_grant_are_not_used_before_the_fence():
    both, one = revoked(3)
    assert one.ended is None
    assert held(both) == (COUNT, 0)
    both.die(both.o)
    assert one.ended is None
    both.run()
    assert both.wanted[0].ended == (3, "")
    assert one.fences == 1
    assert held(both) == (0, 0)
    both.close()


def test_a_fence_that_is_late_costs_the_blocks_that_have_come():
    both, one = revoked(3)
    under_way, both.net.under_way = both.net.under_way, []
    both.sleep(10.0)
    assert (one.ended, one.fences) == ((0, "deadline"), 0)
    assert held(both) == (0, COUNT)
    both.net.under_way = under_way
    both.run()
    assert one.fences == 1
    both.check_idle()
    both.close()


def test_a_pull_can_be_cancelled_before_the_fence():
    both, one = revoked(3)
    one.cancel()
    assert held(both) == (0, COUNT)
    both.run()
    assert one.fences == 1
    both.check_idle()
    both.close()


def test_an_owner_that_serves_enough_is_busy():
    both, prompt, one = started()
    limits = small_parts(both)
    server_of(both.o)._limits = dataclasses.replace(limits, share=COUNT / 100)
    two = both.pull(prompt[:-1])
    both.step_r()
    for _ in range(4):
        both.net.step()
        both.step_r()
    both.run()
    assert [one.ended, two.ended] == [(COUNT, ""), (0, "busy")]
    finish(both, prompt)


# ------------------------------------------------------------------ wrong bytes, wrong answers


@pytest.mark.parametrize("place", range(COUNT))
def test_a_changed_byte_is_never_used(place: int):
    both, prompt, one = started()
    both.net.faults = [""] * place + ["corrupt"]
    both.run()
    assert one.ended is not None
    good, error = one.ended
    assert error == "corrupt"
    assert both.net.counts["corrupted"] == 1
    assert good < COUNT
    assert one.fences == 1
    check_reused(both, request(prompt), good * BLOCK)
    both.run()
    both.check_idle()
    both.close()


MISFITS: dict[str, Callable[[KvPullGrant], KvPullGrant]] = {
    "more blocks than asked for": lambda grant: msgspec.structs.replace(
        grant, granted=9, checksums=(*grant.checksums, 1)
    ),
    "a checksum is missing": lambda grant: msgspec.structs.replace(
        grant, checksums=grant.checksums[:-1]
    ),
    "fewer blocks than have come": lambda grant: msgspec.structs.replace(
        grant, granted=7, checksums=grant.checksums[:7]
    ),
    "no parts": lambda grant: msgspec.structs.replace(grant, parts=0),
    "a reason that nobody knows": lambda grant: KvPullGrant(refused="because"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_an_answer_that_does_not_fit_ends_the_pull(name: str):
    both, prompt, one = started()
    both.alter = MISFITS[name]
    both.run()
    assert one.ended == (0, "misfit")
    finish(both, prompt)


def test_an_answer_with_too_few_parts_ends_the_pull():
    both, prompt, one = started()
    both.alter = lambda grant: msgspec.structs.replace(grant, parts=grant.parts - 1)
    both.run()
    assert one.ended == (0, "misfit")
    finish(both, prompt)


def test_a_second_answer_changes_nothing():
    both, prompt, one = started()
    while not both.grants:
        both.turn()
    both.run()
    both.r.core.handle(KvPullAnswer(both.asked[0].number, KvPullGrant(refused="busy")))
    both.r.core.handle(KvPullAnswer(77, KvPullGrant(refused="busy")))
    both.run()
    assert one.ended == (COUNT, "")
    finish(both, prompt)


# ------------------------------------------------------------------ time and death


def test_a_pull_that_is_late_ends_and_the_owner_gives_back_its_blocks():
    both, prompt, one = started()
    both.lose_answers = True
    both.run()
    assert one.ended is None
    both.sleep(10.0)
    both.run()
    assert one.ended == (0, "deadline")
    assert one.fences == 1
    finish(both, prompt)


def test_an_owner_waits_no_longer_than_the_deadline_and_some_slack():
    """Its requester is silent: no stop, no news of its death, and no byte moves any more."""
    both, prompt, one = started()
    while not server_of(both.o).serving:
        both.turn()
    both.step_o()
    assert both.o.core.pool.counts().used
    stuck, both.net.under_way = both.net.under_way, []
    due = both.o.core.wake_at()
    assert due is not None
    assert due <= both.o.clock.now() + 10.0 + SLACK
    both.o.clock.advance(due - both.o.clock.now())
    both.step_o()
    assert both.grants[-1].refused == "deadline"
    both.net.under_way = stuck
    both.sleep(10.0)
    both.run()
    assert one.ended == (0, "deadline")
    finish(both, prompt)


@pytest.mark.parametrize("turns", range(0, 20, 3))
def test_the_owner_dies(turns: int):
    both, _, one = started()
    for _ in range(turns):
        both.turn()
    if one.ended is None:
        both.die(both.o)
        assert one.ended == (0, "gone")
    both.run()
    assert one.over
    both.sleep(10.0 + SLACK)
    both.run()
    both.check_idle()
    both.close()


@pytest.mark.parametrize("turns", range(0, 20, 3))
def test_the_requester_dies(turns: int):
    """Its core says nothing more; what it was sent ends by the path, or with its life."""
    both, prompt, one = started()
    for _ in range(turns):
        both.turn()
    both.r.core.close()
    both.die(both.r)
    for _ in range(50):
        both.step_o()
        both.net.step()
    assert one.over
    assert server_of(both.o).serving == 0
    assert both.o.core.pool.counts().used == 0
    wanted = request(prompt)
    assert both.o.engine.generate([wanted]) == [reference(wanted)]
    assert both.o.engine.close() == 0


def test_no_path_is_a_reason():
    both, prompt, one = started()
    both.r.mover.refuse = "no cable"
    both.run()
    assert one.ended == (0, "gone")
    finish(both, prompt)


def test_transports_that_are_not_ready_are_a_reason():
    both, prompt, one = started()
    (key,) = puller_of(both.r)._keys
    both.r.mover.say(AttemptBroken(key, NotReady("later")))
    both.run()
    assert one.ended == (0, "unready")
    finish(both, prompt)


@pytest.mark.parametrize("fault", ["lost", "late"])
@pytest.mark.parametrize("place", [0, 4, 7])
def test_a_part_that_is_lost_ends_the_pull(fault: str, place: int):
    both, prompt, one = started()
    both.net.faults = [""] * place + [fault]
    both.run()
    assert one.ended == (0, "gone")
    assert one.fences == 1
    finish(both, prompt)


def test_bytes_that_land_late_land_in_quarantine():
    both, prompt, one = started()
    both.net.faults = ["late"]
    while one.ended is None:
        both.turn()
    assert held(both) == (0, COUNT)
    both.net.under_way.sort(key=lambda action: "_close" in action.__code__.co_names)
    both.run()
    assert both.net.counts["landed_late"] == 1
    finish(both, prompt)


@pytest.mark.parametrize("reason", sorted(REASONS - {"cancelled", "closed", "deadline"}))
def test_the_owners_reason_is_the_pulls(reason: str):
    both, prompt, one = started()
    both.alter = lambda grant: KvPullGrant(refused=reason)
    both.run()
    assert one.ended == (0, reason)
    assert puller_of(both.r).ended == {reason: 1}
    finish(both, prompt)


def test_a_pull_without_a_future_asks_and_ends_at_once():
    both = fetch_pair()
    prompt = known(both, LENGTH)
    one = both.pull(prompt[:-1], timeout=0.0)
    both.run()
    assert one.ended == (0, "deadline")
    finish(both, prompt)


# ------------------------------------------------------------------ cancelled, closed


@pytest.mark.parametrize("turns", range(24))
def test_a_pull_can_be_cancelled_at_any_time(turns: int):
    both, prompt, one = started()
    for _ in range(turns):
        both.turn()
    one.cancel()
    both.run()
    assert one.over
    finish(both, prompt)


@pytest.mark.parametrize("turns", range(0, 24, 2))
@pytest.mark.parametrize("order", ["r", "o"])
def test_either_core_can_close_at_any_time(turns: int, order: str):
    both, _, one = started()
    both.absorb(prompt_of(20, seed=7))
    for _ in range(turns):
        both.turn()
    first, second = (both.r, both.o) if order == "r" else (both.o, both.r)
    assert first.engine.close() == 0
    both.lose_answers = True
    both.die(first)
    for _ in range(30):
        both.net.step()
        second.step()
    if second is both.r:
        second.clock.advance(10.0)
        second.step()
        both.net.run()
        second.step()
    assert second.engine.close() == 0
    assert one.over
    for end in (both.r, both.o):
        counts = end.core.pool.counts()
        assert counts.used == counts.quarantined == 0


@pytest.mark.parametrize("how", ["deadline", "gone", "closed"])
def test_the_end_of_one_pull_may_cancel_another(how: str):
    both, prompt, one = started()
    two = both.pull(prompt[:-1])
    tell = one.on_pulled

    def tell_and_cancel(number: int, blocks_ok: int, error: str) -> None:
        tell(number, blocks_ok, error)
        two.cancel()

    one.on_pulled = tell_and_cancel  # type: ignore[method-assign]
    both.lose_answers = True
    both.run()
    match how:
        case "deadline":
            both.sleep(10.0)
        case "gone":
            both.die(both.o)
        case "closed":
            both.close()
    assert (one.ended, two.ended) == ((0, how), (0, "cancelled"))
    if how != "closed":
        finish(both, prompt)


def test_a_number_has_one_pull_at_a_time():
    both, prompt, one = started()
    with pytest.raises(ValueError, match="pull 1 "):
        puller_of(both.r).pull(
            1, KvSource("p", 1, 8), one.hashes, one.blocks, 0, 1.0, now=0.0, listener=one
        )
    with pytest.raises(ValueError, match="pull 9 of 0 hashes"):
        puller_of(both.r).pull(9, KvSource("p", 1, 8), [], [], 0, 1.0, now=0.0, listener=one)
    both.run()
    finish(both, prompt)
