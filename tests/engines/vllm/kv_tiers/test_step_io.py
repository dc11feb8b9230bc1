"""Copies of lower tiers in vLLM's steps, and the ranks' reports of them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from pdserve.kv.tiers.block import TierBlock
from pdserve.kv.tiers.jobs import CopyIn, CopyOut, Fill
from pdserve_engines.vllm.kv_tiers.step_io import STEP_BYTES, RankReport, StepIo
from pdserve_engines.vllm.kv_tiers.tier_copier import TierCopier

if TYPE_CHECKING:
    from collections.abc import Sequence


def out(*blocks: int) -> CopyOut:
    contents = [TierBlock(bytes([block]) * 16, b"") for block in blocks]
    return CopyOut(blocks, [100 + block for block in blocks], contents, [0] * len(blocks))


def into(*blocks: int) -> CopyIn:
    return CopyIn(1, 0, [100 + block for block in blocks], blocks)


class World:
    """An engine whose pool keeps every block that is not in `gone`."""

    def __init__(self, ranks: int = 1, block_bytes: int = 1) -> None:
        self.gone: set[int] = set()
        self.wakes = 0
        self.files = Files()
        self.io = StepIo(self.files, ranks, block_bytes, self.kept)
        self.io.start(self.wake)

    def kept(self, blocks: Sequence[int]) -> bool:
        return not self.gone & set(blocks)

    def wake(self) -> None:
        self.wakes += 1


class Files:
    """The part with the threads."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.closed = False

    def start(self, wake: Any) -> None: ...

    def submit(self, job: Any) -> None:
        self.jobs.append(job)

    def poll(self) -> list[Any]:
        jobs, self.jobs = self.jobs, []
        return jobs

    def next_due(self) -> None: ...

    def wait_copied(self, fetch: int, group: int, seconds: float) -> bool:
        return True

    def copied_at(self, fetch: int, group: int) -> None: ...

    def close(self) -> None:
        self.closed = True


def test_copies_go_with_the_next_step_and_end_with_its_report() -> None:
    world = World()
    first, second, load = out(1, 2), out(3), into(7)
    for job in (first, second, load):
        world.io.submit(job)
    assert world.io.waits
    copies = world.io.take(computes=True)
    assert copies is not None
    assert copies.out == [(1, 101), (2, 102), (3, 103)]
    assert copies.into == [(7, 107)]
    assert not world.io.waits
    assert world.io.take(computes=True) is None
    assert world.io.poll() == []
    world.io.reported(RankReport(copies.number, out_seconds=3.0, in_seconds=0.5))
    assert world.wakes == 1
    done = world.io.poll()
    assert [(each.job, each.seconds, each.error) for each in done] == [
        (first, 2.0, ""),
        (second, 1.0, ""),
        (load, 0.5, ""),
    ]


def test_every_rank_reports_and_one_error_fails_the_jobs() -> None:
    world = World(ranks=3)
    world.io.submit(out(1))
    world.io.submit(into(2))
    copies = world.io.take(computes=True)
    assert copies is not None
    number = copies.number
    two = RankReport(number, out_seconds=1.0).joined(RankReport(number, out_error="no memory"))
    world.io.reported(two)
    assert world.io.poll() == []
    world.io.reported(RankReport(number, in_seconds=2.0))
    saved, loaded = world.io.poll()
    assert (saved.error, saved.seconds) == ("no memory", 1.0)
    assert (loaded.error, loaded.seconds) == ("", 2.0)


def test_ranks_may_be_at_different_steps() -> None:
    """A copy has ended when every rank has reported its own step, in whatever order."""
    world, jobs = World(ranks=2), (out(1), out(2))
    numbers: list[int] = []
    for job in jobs:
        world.io.submit(job)
        copies = world.io.take(computes=True)
        assert copies is not None
        numbers.append(copies.number)
    first, second = numbers
    world.io.reported(RankReport(second))
    world.io.reported(RankReport(first))
    assert world.io.poll() == []
    world.io.reported(RankReport(second, out_error="no memory"))
    assert [(each.job, each.error) for each in world.io.poll()] == [(jobs[1], "no memory")]
    world.io.reported(RankReport(first))
    assert [(each.job, each.error) for each in world.io.poll()] == [(jobs[0], "")]


def test_a_step_that_computes_copies_out_what_fits_and_what_is_given_away() -> None:
    world = World(block_bytes=STEP_BYTES)
    for block in (1, 2, 3):
        world.io.submit(out(block))
    world.gone.add(3)
    copies = world.io.take(computes=True)
    assert copies is not None
    assert [block for block, _ in copies.out] == [1, 3]
    assert world.io.waits
    rest = world.io.take(computes=False)
    assert rest is not None
    assert [block for block, _ in rest.out] == [2]


def test_no_order_is_lost_or_done_twice(seed: int) -> None:
    rng, world = random.Random(seed), World(block_bytes=STEP_BYTES // 2)
    ordered: list[int] = []
    copied: list[int] = []
    under_way: list[int] = []
    for block in range(60):
        if rng.random() < 0.7:
            world.io.submit(out(block))
            ordered.append(block)
        if rng.random() < 0.5:
            copies = world.io.take(computes=rng.random() < 0.8)
            if copies is not None:
                copied += [each for each, _ in copies.out]
                under_way.append(copies.number)
        if under_way and rng.random() < 0.5:
            world.io.reported(RankReport(under_way.pop(rng.randrange(len(under_way)))))
    while (copies := world.io.take(computes=True)) is not None:
        copied += [each for each, _ in copies.out]
        under_way.append(copies.number)
    for number in under_way:
        world.io.reported(RankReport(number))
    assert copied == ordered
    done = [each.job for each in world.io.poll()]
    blocks = [block for job in done if isinstance(job, CopyOut) for block in job.blocks]
    assert sorted(blocks) == ordered


def test_files_are_for_the_threads() -> None:
    world = World()
    job: Any = Fill(b"", None, 0)  # type: ignore[arg-type]
    world.io.submit(job)
    assert world.files.jobs == [job]
    assert world.io.poll() == [job]
    world.io.close()
    assert world.files.closed


class Copier:
    """A `RankCopier` that notes what it does; `broken` methods raise."""

    def __init__(self, broken: str = "") -> None:
        self.calls: list[tuple[str, Any]] = []
        self._broken = broken

    def _note(self, name: str, value: Any) -> None:
        self.calls.append((name, value))
        if name == self._broken:
            raise OSError(name)

    def map(self, arena: Any) -> None:
        self._note("map", arena)

    def save(self, pairs: Any) -> None:
        self._note("save", pairs)

    def load(self, pairs: Any) -> None:
        self._note("load", pairs)


def copied(broken: str = "") -> tuple[Copier, RankReport]:
    inner, world = Copier(broken), World()
    world.io.submit(out(1))
    world.io.submit(into(2))
    copies = world.io.take(computes=True)
    assert copies is not None
    rank: Any = inner
    arena: Any = object()
    copier = TierCopier(rank)
    copier.copy_out(copies, arena)
    copier.copy_in(copies, arena)
    report = copier.take_report()
    assert report is not None
    assert copier.take_report() is None
    return inner, report


def test_a_rank_copies_out_first() -> None:
    inner, report = copied()
    assert [name for name, _ in inner.calls] == ["map", "save", "map", "load"]
    assert (report.out_error, report.in_error) == ("", "")


def test_a_rank_reports_what_failed() -> None:
    assert copied("save")[1].out_error == "OSError: save"
    assert copied("save")[1].in_error == ""
    assert copied("load")[1].in_error == "OSError: load"
    both = copied("map")[1]
    assert (both.out_error, both.in_error) == ("OSError: map", "OSError: map")
