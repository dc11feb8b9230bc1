"""What tiers take in: by retention, by second use, and within a budget of writes."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from pdserve.kv.tiers.admission import (
    ENOUGH_RETENTION,
    DiskAdmission,
    GhostList,
    HostAdmission,
    Retention,
    WriteBudget,
)
from pdserve.kv.tiers.block import TierBlock

if TYPE_CHECKING:
    from pdserve.kv.tiers.admission import AdmissionMode

DAY = 86_400.0


def name(number: int) -> bytes:
    """Ghosts keep the first bytes of a hash, so these differ there."""
    return number.to_bytes(8, "big") * 2


def block(number: int, turns: int = 1, pin_until: float = 0.0) -> TierBlock:
    return TierBlock(name(number), bytes(16), turns, pin_until=pin_until)


# ---------------------------------------------------------------- ghosts


def test_ghosts_are_bounded_and_the_oldest_is_forgotten() -> None:
    ghosts = GhostList(3)
    for number in (1, 2, 3):
        ghosts.add(name(number), float(number))
    ghosts.add(name(1), 4.0)
    ghosts.add(name(4), 5.0)
    assert len(ghosts) == 3
    assert [ghosts.time(name(number)) for number in (1, 2, 3, 4)] == [4.0, None, 3.0, 5.0]
    assert name(2) not in ghosts
    ghosts.forget(name(3))
    assert name(3) not in ghosts
    ghosts.clear()
    assert len(ghosts) == 0


# ---------------------------------------------------------------- retention


def test_retention_is_the_age_of_what_is_evicted() -> None:
    retention = Retention()
    assert retention.seconds(50.0) is None
    retention.evicted(40.0, 100.0)
    assert retention.seconds(100.0) == 40.0
    for _ in range(300):
        retention.evicted(10.0, 101.0)
    assert retention.seconds(101.0) == pytest.approx(10.0, abs=0.2)


def test_a_tier_that_evicts_nothing_keeps_blocks() -> None:
    retention = Retention()
    retention.evicted(5.0, 100.0)
    assert retention.seconds(103.0) == 5.0
    assert retention.seconds(400.0) == 300.0


# ---------------------------------------------------------------- write budget


def test_a_day_can_be_spent_at_once_and_comes_back_evenly() -> None:
    budget = WriteBudget(1000, now=0.0)
    assert budget.take(600, 0.0)
    assert not budget.take(401, 0.0)
    assert budget.take(400, 0.0)
    assert budget.share(0.0) == 0.0
    assert not budget.take(1, 0.0)
    assert budget.share(DAY / 4) == pytest.approx(0.25)
    assert budget.share(10 * DAY) == 1.0
    assert not budget.take(1001, 10 * DAY)


def test_bytes_that_were_not_written_come_back() -> None:
    budget = WriteBudget(1000, now=0.0)
    budget.take(300, 0.0)
    budget.refund(200)
    assert budget.share(0.0) == pytest.approx(0.9)
    budget.refund(10_000)
    assert budget.share(0.0) == 1.0


def test_no_time_is_earned_twice() -> None:
    budget = WriteBudget(1000, now=0.0)
    budget.take(1000, DAY)
    for now in (DAY, DAY / 2, 1.25 * DAY, DAY, 1.25 * DAY):
        share = budget.share(now)
    assert share == pytest.approx(0.25)


def test_the_credit_is_never_negative_and_no_more_is_spent_than_was_earned(seed: int) -> None:
    random, now, spent = Random(seed), 0.0, 0
    budget = WriteBudget(10_000, now)
    for _ in range(3000):
        now += random.random() * 400 - 10  # the clock of a caller may jump back a little
        size = random.randint(0, 3000)
        if budget.take(size, now):
            spent += size
        assert 0.0 <= budget.share(now) <= 1.0
    assert spent <= 10_000 * (1 + now / DAY) * 1.05
    assert spent > 5_000 * now / DAY


def test_without_a_budget_nothing_is_written() -> None:
    budget = WriteBudget(0, now=0.0)
    assert budget.share(DAY) == 0.0
    assert not budget.take(1, DAY)


# ---------------------------------------------------------------- host


def evictions(admission: HostAdmission, age: float, now: float) -> None:
    for number in range(400):
        admission.evicted(name(10**6 + number), age, now)


def test_a_host_takes_everything_until_it_is_known_to_be_short() -> None:
    admission = HostAdmission("auto", frames=100)
    assert admission.admits(block(1), 0.0)
    evictions(admission, ENOUGH_RETENTION + 1.0, 10.0)
    assert admission.admits(block(2), 10.0)
    evictions(admission, 20.0, 11.0)
    assert not admission.admits(block(3), 11.0)
    assert (admission.admitted, admission.refused) == (2, 1)


def test_a_short_host_takes_what_is_used_again() -> None:
    admission = HostAdmission("auto", frames=1000)
    evictions(admission, 20.0, 10.0)
    assert admission.admits(block(1, turns=2), 10.0)
    assert admission.admits(block(2, pin_until=11.0), 10.0)
    assert not admission.admits(block(3, pin_until=9.0), 10.0)
    assert admission.admits(block(4), 10.0, reused=True)
    assert admission.admits(block(10**6), 10.0), "it was evicted before"
    refused = block(77)
    assert not admission.admits(refused, 10.0)
    assert admission.admits(refused, 11.0), "it was refused before, and came again"
    assert refused.hash not in admission.ghosts


def test_the_modes_leave_no_choice() -> None:
    everything, reused = HostAdmission("all", 10), HostAdmission("reused", 10)
    evictions(everything, 1.0, 0.0)
    assert everything.admits(block(1), 0.0)
    assert not reused.admits(block(1), 0.0)
    assert reused.admits(block(2, turns=2), 0.0)


def retention_with(admission: HostAdmission, offered: float, frames: int) -> list[bool]:
    """Offers new blocks at a rate, for an hour, to a first-in first-out tier of so many frames.

    Returns the verdicts of its last half.
    """
    stored: list[tuple[bytes, float]] = []
    verdicts = []
    for number in range(int(3600 * offered)):
        now = number / offered
        one = block(number)
        verdict = admission.admits(one, now)
        if verdict:
            stored.append((one.hash, now))
        if len(stored) > frames:
            old, since = stored.pop(0)
            admission.evicted(old, now - since, now)
        verdicts.append(verdict)
    return verdicts[len(verdicts) // 2 :]


def test_the_verdict_does_not_flip_because_it_took_effect() -> None:
    """A host that refuses most blocks keeps the others for long; it would not, if it took all."""
    short = retention_with(HostAdmission("auto", 300), offered=10.0, frames=300)  # 30 s of all
    assert sum(short) < 0.1 * len(short)
    long = retention_with(HostAdmission("auto", 3000), offered=10.0, frames=3000)  # 300 s
    assert all(long)


# ---------------------------------------------------------------- disk


def disk(mode: AdmissionMode = "auto", per_day: int = 1000) -> DiskAdmission:
    return DiskAdmission(mode, 100, WriteBudget(per_day, now=0.0))


def test_a_disk_keeps_part_of_its_writes_for_reused_blocks() -> None:
    admission = disk()
    verdicts = [admission.admits(block(number), 10, 0.0) for number in range(100)]
    assert verdicts == [True] * 75 + [False] * 25
    assert [admission.admits(block(n, turns=2), 10, 0.0) for n in range(200, 226)] == [
        *[True] * 25,
        False,
    ]
    assert admission.budget.share(0.0) == 0.0
    assert (admission.admitted, admission.refused) == (100, 26)
    assert admission.admits(block(300), 10, DAY / 2), "half a day's writes came back"


def test_even_all_stays_within_the_budget() -> None:
    admission = disk("all", per_day=25)
    assert [admission.admits(block(n), 10, 0.0) for n in range(3)] == [True, True, False]


def test_a_disk_for_reused_blocks_takes_no_others() -> None:
    admission = disk("reused")
    one = block(1)
    assert not admission.admits(one, 10, 0.0)
    assert admission.budget.share(0.0) == 1.0
    assert admission.admits(one, 10, 1.0), "it came again"
    admission.evicted(name(2), 30.0, 2.0)
    assert admission.admits(block(2), 10, 2.0)
    assert admission.retention.seconds(2.0) == 30.0
