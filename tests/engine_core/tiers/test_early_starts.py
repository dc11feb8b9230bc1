"""Sequences that run before all layers of their blocks are on the device: right, or again."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pdserve.clock import ManualClock
from pdserve.engine_core.core import EngineCore
from pdserve.kv.tiers.jobs import CopyIn
from pdserve.kv.tiers.lanes import LaneEstimate
from pdserve.kv.tiers.layer_groups import LayerGroups
from pdserve.kv.tiers.virtual_io import LaneRate
from pdserve.messages.kv_events import BlockStored
from pdserve.messages.request import SamplingParams
from pdserve.messages.tiers import TierSpec
from pdserve.testing.scripted import ScriptedExecutor, reference_tokens
from tests.engine_core.test_tiers import BLOCK, BLOCK_BYTES, SPEC, Bench, prompt, request

if TYPE_CHECKING:
    from pdserve.engine_core.tiers.early_starts import EarlyStarts
    from pdserve.kv.tiers.jobs import TierJob
    from pdserve.kv.tiers.lower_tiers import LayersCome
    from pdserve.messages.request import GenerateRequest
    from pdserve.testing.output_checker import OutputChecker

EACH = 0.001
"""What a copy takes: long enough that steps run meanwhile."""


class Slow(Bench):
    """A core whose blocks come back in groups, and slowly."""

    def __init__(self, groups: int, **changes: object) -> None:
        super().__init__(**changes)
        self.lower.layers = LayerGroups(4, BLOCK_BYTES, groups)
        self.io._rates = dict.fromkeys(
            ("d2h", "h2d", "disk_read", "disk_write"), LaneRate(1e12, EACH)
        )
        assert self.core._onboarder is not None
        # A fetch has to be worth it, and may take a while.
        self.core._step_cost.prefill = lambda length, cached=0: float(length - cached)  # type: ignore[method-assign]

    @property
    def early(self) -> EarlyStarts:
        assert self.core._early is not None
        return self.core._early

    def cold(self, first: GenerateRequest) -> None:
        """Compute a request, and let others evict what it leaves."""
        self.run(first)
        for start in (20, 40, 60):
            self.run(request(prompt(start)))

    def warm(self, again: GenerateRequest) -> OutputChecker:
        """Run it in steps so short that each layer group is seen."""
        found = self.engine.submit(again)
        for _ in range(1000):
            self.engine.step()
            self.core.pool.check()
            self.lower.check()
            self.clock.advance(EACH / 2)
            if found.done and self.core.wake_at() is None:
                break
        assert found.done
        return found


def right(found: OutputChecker) -> bool:
    wanted = [reference_tokens(found.request, choice) for choice in range(found.request.n)]
    return found.tokens == wanted


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("extra", [1, 2, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("batch", [8, 64])
def test_a_sequence_runs_while_its_last_layers_come(
    groups: int, extra: int, choices: int, batch: int
) -> None:
    with Slow(groups, max_batch_tokens=batch) as bench:
        bench.cold(request(prompt(0)))
        found = bench.warm(
            replace(request(prompt(0)[:-1] + [7] * extra), request_id="again", n=choices)
        )
        assert right(found)
        assert bench.early.started == 1
        assert bench.early.failed == 0
        host = bench.core.stats().tiers[0]
        assert (host.early_starts, host.early_failed) == (1, 0)
        assert bench.sources(found)["host"] >= 4 * BLOCK
        assert bench.core.stats().prompt_tokens == 4 * (8 * BLOCK + 1) + 8 * BLOCK + extra


@pytest.mark.parametrize(("sent", "started"), [(False, 1), (True, 0)])
def test_only_what_may_begin_early_is_planned_so(sent: bool, started: int) -> None:
    """Blocks of a prompt that is prefilled for another worker are sent at once."""
    with Slow(4) as bench:
        bench.cold(request(prompt(0)))
        bench.early.is_sent = lambda handle: sent
        assert bench.core._onboarder is not None
        planner: Any = bench.core._onboarder._planner
        planned, usual = [], planner.choose

        def choose(*known: Any, early: bool = False) -> Any:
            planned.append(early)
            return usual(*known, early=early)

        planner.choose = choose
        assert right(bench.warm(request(prompt(0))))
        assert planned == [not sent]
        assert bench.early.started == started


@pytest.mark.parametrize(
    ("able", "tiers", "layers"),
    [(True, SPEC.tiers, 1), (False, SPEC.tiers, 0), (True, None, 0), (True, TierSpec(), 0)],
)
def test_an_engine_says_whether_its_blocks_come_in_groups(
    able: bool, tiers: TierSpec | None, layers: int
) -> None:
    executor = ScriptedExecutor()
    executor.loads_layers = able  # type: ignore[attr-defined]
    core = EngineCore(executor, ManualClock())
    assert core.load(replace(SPEC, tiers=tiers), lambda progress: None).kv_layers == layers
    assert core.close() == 0


def test_blocks_are_told_of_when_their_last_layers_have_come() -> None:
    with Slow(4) as bench:
        first = request(prompt(0))
        bench.cold(first)
        names = {*bench.hashes(first)} - bench.core.pool.names().keys()
        found = bench.engine.submit(first)
        while not bench.early.started:
            bench.clock.advance(EACH / 2)
            bench.core._advance_tiers(bench.clock.now())
            if not bench.core._onboarder:
                bench.engine.step()
        assert not found.done
        assert not names & bench.core.pool.names().keys()
        bench.engine.kv_events.clear()
        bench.engine.step()
        told = [each for each in bench.engine.kv_events if isinstance(each, BlockStored)]
        assert names <= {name for each in told if each.tier == "device" for name in each.hashes}


@pytest.mark.parametrize("group", [0, 1, 2, 3])
def test_a_copy_that_fails_is_computed(group: int) -> None:
    with Slow(4) as bench:
        bench.cold(request(prompt(0)))

        def fault(job: TierJob) -> tuple[str, str, int] | None:
            fails = isinstance(job, CopyIn) and job.group == group
            return ("the bus is broken", "io", 5) if fails else None

        bench.io.fault = fault  # type: ignore[assignment]
        found = bench.warm(request(prompt(0)))
        assert right(found)
        assert bench.early.failed == bench.early.started == (group > 0)
        host = bench.core.stats().tiers[0]
        assert host.early_failed == host.early_starts == (group > 0)
        assert bench.core.stats().prompt_tokens == 5 * (8 * BLOCK + 1)


def test_a_step_does_not_wait_for_ever() -> None:
    with Slow(4, options={"blocks": "24"}) as bench:
        bench.cold(request(prompt(0)))
        usual = bench.io.submit

        def submit(job: TierJob) -> None:
            slow = isinstance(job, CopyIn) and job.group == 2
            rate = LaneRate(1e12, 30.0 if slow else EACH)
            bench.io._rates = dict.fromkeys(bench.io._rates, rate)
            usual(job)

        bench.io.submit = submit  # type: ignore[method-assign]
        found = bench.engine.submit(request(prompt(0)))
        for _ in range(100):
            bench.engine.step()
            bench.clock.advance(EACH)
        assert right(found), "it is computed long before the copies end"
        assert bench.early.failed == bench.early.started == 1
        assert bench.core.stats().tiers[0].failed == 1
        bench.warm(request([3] * BLOCK))
        bench.clock.advance(60.0)
        bench.warm(request([3] * BLOCK))


def test_a_client_turns_away_while_the_layers_come() -> None:
    with Slow(4) as bench:
        bench.cold(request(prompt(0)))
        found = bench.engine.submit(request(prompt(0)))
        bench.engine.step()
        while not bench.early.started:
            bench.clock.advance(EACH / 2)
            bench.core._advance_tiers(bench.clock.now())
        bench.engine.abort(found)
        bench.warm(request(prompt(0)[:-3]))
        assert bench.core.pool.counts().used == 0


def test_one_that_would_only_wait_leaves_when_others_run_with_it() -> None:
    with Slow(4) as bench:
        bench.cold(request(prompt(0)))
        talk = SamplingParams(max_tokens=60, ignore_eos=True)
        bench.engine.submit(replace(request([5]), sampling=talk))
        bench.engine.step()
        found = bench.engine.submit(request(prompt(0)))
        bench.engine.step()
        assert bench.core._onboarder
        slow = LaneEstimate(bandwidth=1.0, latency=0.0, backlog=10**6)
        bench.lower.lane_estimates = lambda: {"h2d": slow}  # type: ignore[method-assign]
        for _ in range(60):
            bench.engine.step()
            bench.clock.advance(EACH / 2)
        assert right(found)
        assert not bench.early.started


@pytest.mark.parametrize("groups", [2, 4])
def test_a_group_has_come_when_its_last_copy_has(groups: int) -> None:
    with Slow(groups) as bench:
        bench.lower._jobs.copy_blocks = 1  # so that a group takes several copies
        bench.cold(request(prompt(0)))
        ended: Counter[int] = Counter()
        told: list[tuple[int, int]] = []
        onboarder = bench.core._onboarder
        assert onboarder is not None
        usual = onboarder.layers

        def fault(job: TierJob) -> None:
            if isinstance(job, CopyIn):
                ended[job.group] += len(job.frames)

        def layers(come: LayersCome, now: float) -> None:
            told.append((come.group, ended[come.group]))
            usual(come, now)

        bench.io.fault = fault
        onboarder.layers = layers  # type: ignore[method-assign]
        assert right(bench.warm(request(prompt(0))))
        assert ended[0] > groups, "more than one copy brings it"
        assert told == [(group, ended[0]) for group in range(groups)]
