"""Plans by example, against every plan there is, and their formula against played-out events."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kv.tiers.lanes import LaneEstimate
from pdserve.kv.tiers.planner import Plan, PlannerConfig, PromptSources, Run, plan
from pdserve.perf_model.latency_model import LatencyModel
from tests.support.seeds import is_long

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pdserve.messages.tiers import KvFetchMode, LaneName, SourceName

MIB = 1 << 20
COST = LatencyModel(base=0.0, per_token=50e-6, per_pair=1e-9)
CONFIG = PlannerConfig(block_tokens=16, block_bytes=2 * MIB, layers=32)
FAST: dict[LaneName, LaneEstimate] = {
    "h2d": LaneEstimate(20e9, 1e-4),
    "disk_read": LaneEstimate(6e9, 2e-4),
    "fetch": LaneEstimate(10e9, 2e-3),
}


def runs_of(planned: Plan) -> list[Run]:
    return [segment.run for segment in planned.segments]


def test_nothing_cached_is_computed() -> None:
    planned = plan(PromptSources(1600, wait=0.5), FAST, COST, CONFIG)
    assert planned.segments == ()
    assert planned.blocks == 0
    assert planned.finish == planned.recompute == pytest.approx(0.5 + COST.prefill(1600))


def test_host_memory_is_worth_it() -> None:
    prompt = PromptSources(1601, device=10, local=(Run("host", 10, 90),))
    planned = plan(prompt, FAST, COST, CONFIG)
    assert runs_of(planned) == [Run("host", 10, 90)]
    assert planned.recompute == pytest.approx(COST.prefill(1601, 160))
    assert planned.finish < 0.5 * planned.recompute
    (segment,) = planned.segments
    assert segment.eta == pytest.approx(1e-4 + 90 * 2 * MIB / 20e9)


@pytest.mark.parametrize(
    ("runs", "layers", "groups"),
    [
        ([Run("host", 0, 90)], 32, 4),
        ([Run("host", 0, 90)], 2, 2),
        ([Run("host", 0, 90)], 0, 1),
        ([Run("host", 0, 9)], 32, 2),
        ([Run("host", 0, 4)], 32, 1),
        ([Run("disk", 0, 90)], 32, 1),
        ([Run("host", 0, 45), Run("disk", 45, 45)], 32, 1),
        ([Run("disk", 0, 80), Run("host", 80, 10)], 32, 4),
        ([Run("host", 0, 60), Run("disk", 60, 25), Run("host", 85, 5)], 32, 2),
        ([Run("host", 0, 90), Run("peer", 90, 10, "w2")], 32, 4),
    ],
)
def test_the_hosts_last_blocks_come_in_groups(runs: list[Run], layers: int, groups: int) -> None:
    """The first group is there when the others of these blocks are not."""
    local = tuple(run for run in runs if run.source != "peer")
    peers = tuple((run.node, run.end) for run in runs if run.source == "peer")
    lanes = FAST | {"h2d": LaneEstimate(1e9)}
    prompt = PromptSources(16001, local=local, peers=peers)
    planned = plan(prompt, lanes, COST, replace(CONFIG, layers=layers))
    found = next(one.finish for one in planned.alternatives if one.runs == tuple(runs))
    whole = 2 * MIB * sum(run.count for run in local) / 1e9
    divided = 2 * MIB * runs[len(local) - 1].count / 1e9
    first = whole - divided * (1 - 1 / groups)
    if peers:
        first = max(first, FAST["fetch"].seconds(10 * 2 * MIB))
    assert found == pytest.approx(first + COST.prefill(16001, 16 * runs[-1].end))


def test_a_prefix_is_worth_more_that_comes_while_the_rest_is_computed() -> None:
    lanes = FAST | {"h2d": LaneEstimate(2.3e9)}
    prompt = PromptSources(3201, local=(Run("host", 0, 100),))
    assert not plan(prompt, lanes, COST, replace(CONFIG, layers=0)).segments
    assert plan(prompt, lanes, COST, CONFIG).blocks == 100


def test_blocks_are_not_given_up_before_they_would_have_been_computed() -> None:
    prompt = PromptSources(1601, device=10, local=(Run("host", 10, 90),))
    planned = plan(prompt, FAST, COST, CONFIG)
    (segment,) = planned.segments
    gain = planned.recompute - planned.finish
    assert segment.deadline == pytest.approx(segment.eta + gain)
    assert segment.deadline > 1.5 * segment.eta + 0.02
    short = PromptSources(321, local=(Run("host", 0, 20),))
    (segment,) = plan(short, FAST, COST, replace(CONFIG, margin=1.0)).segments
    assert segment.deadline == pytest.approx(1.5 * segment.eta + 1.0)


def test_a_lane_with_a_long_queue_is_left_alone() -> None:
    prompt = PromptSources(1601, local=(Run("host", 0, 100),))
    lanes = FAST | {"h2d": LaneEstimate(20e9, 1e-4, backlog=10**10)}
    planned = plan(prompt, lanes, COST, CONFIG)
    assert planned.segments == ()
    assert {one.runs for one in planned.alternatives} == {(), (Run("host", 0, 100),)}


def test_a_slow_disk_is_used_as_far_as_the_wait_hides_it() -> None:
    prompt = PromptSources(1601, local=(Run("disk", 0, 100),), wait=0.1)
    lanes = FAST | {"disk_read": LaneEstimate(400e6, 0.0)}
    planned = plan(prompt, lanes, COST, CONFIG)
    assert runs_of(planned) == [Run("disk", 0, int(0.1 * 400e6 // (2 * MIB)))]
    assert planned.segments[0].eta <= 0.1


def test_a_short_loss_is_accepted_for_a_long_segment_behind_it() -> None:
    local = (Run("disk", 0, 2), Run("host", 2, 98))
    lanes = FAST | {"disk_read": LaneEstimate(6e9, 0.010)}
    planned = plan(PromptSources(1601, local=local), lanes, COST, CONFIG)
    assert runs_of(planned) == list(local)
    alone = plan(PromptSources(1601, local=local[:1]), lanes, COST, CONFIG)
    assert alone.segments == ()


def test_another_worker_gives_what_the_host_does_not_have() -> None:
    prompt = PromptSources(1601, local=(Run("host", 0, 40),), peers=(("w2", 90), ("w3", 20)))
    planned = plan(prompt, FAST, COST, CONFIG)
    assert runs_of(planned) == [Run("host", 0, 40), Run("peer", 40, 50, "w2")]


def test_another_worker_takes_the_place_of_a_slow_disk() -> None:
    prompt = PromptSources(1601, local=(Run("disk", 0, 90),), peers=(("w2", 90),))
    planned = plan(prompt, FAST | {"disk_read": LaneEstimate(300e6)}, COST, CONFIG)
    assert runs_of(planned) == [Run("peer", 0, 90, "w2")]


def test_other_workers_are_never_asked_or_always() -> None:
    prompt = PromptSources(1601, local=(Run("host", 0, 40),), peers=(("w2", 90),))
    slow = FAST | {"fetch": LaneEstimate(1e6)}
    wanted: list[tuple[KvFetchMode, list[str]]] = [
        ("auto", [""]),
        ("never", [""]),
        ("always", ["", "w2"]),
    ]
    for fetch, nodes in wanted:
        planned = plan(prompt, slow, COST, replace(CONFIG, fetch=fetch))
        assert [run.node for run in runs_of(planned)] == nodes
        compared = any("w2" in {run.node for run in one.runs} for one in planned.alternatives)
        assert compared == (fetch != "never")


def test_always_means_what_this_worker_does_not_have() -> None:
    prompt = PromptSources(1601, local=(Run("host", 0, 90),), peers=(("w2", 90),))
    planned = plan(prompt, FAST, COST, replace(CONFIG, fetch="always"))
    assert runs_of(planned) == [Run("host", 0, 90)]
    bare = plan(replace(prompt, local=()), FAST, COST, replace(CONFIG, fetch="always"))
    assert runs_of(bare) == [Run("peer", 0, 90, "w2")]


def test_the_last_token_is_computed() -> None:
    """Its block may be cached whole, but its output is not."""
    prompt = PromptSources(1600, local=(Run("host", 0, 100),), peers=(("w2", 100),))
    planned = plan(prompt, FAST, COST, CONFIG)
    assert planned.blocks == 99
    assert max(run.end for one in planned.alternatives for run in one.runs) == 99


def test_each_source_has_to_gain_something() -> None:
    prompt = PromptSources(320, local=(Run("host", 0, 8),))
    planned = plan(prompt, FAST, COST, CONFIG)
    gain = planned.recompute - planned.finish
    assert planned.segments
    assert not plan(prompt, FAST, COST, replace(CONFIG, min_gain=gain * 1.01)).segments
    assert plan(prompt, FAST, COST, replace(CONFIG, min_gain=gain * 0.99)).segments


def test_a_deadline_has_a_bound() -> None:
    prompt = PromptSources(160_001, local=(Run("host", 0, 9000),), wait=30.0)
    lanes = FAST | {"h2d": LaneEstimate(1e9)}
    (segment,) = plan(prompt, lanes, COST, CONFIG).segments
    assert segment.eta > 5.0
    assert segment.deadline == 5.0


def test_a_forced_fetch_has_the_latest_deadline() -> None:
    prompt = PromptSources(8001, peers=[("w2", 400)])
    planned = plan(prompt, FAST, COST, replace(CONFIG, fetch="always"))
    assert [segment.deadline for segment in planned.segments] == [CONFIG.longest_wait]


def test_only_some_ends_of_many_runs_are_compared() -> None:
    local = tuple(Run("host" if i % 2 else "disk", 5 * i, 5) for i in range(60))
    planned = plan(PromptSources(8000, local=local), FAST, COST, CONFIG)
    assert runs_of(planned) == list(local)
    ends = {one.runs[-1].end for one in planned.alternatives if one.runs}
    assert len(ends) <= 2 * CONFIG.most_points


# ---------------------------------------------------------------- every plan there is


@dataclass(frozen=True)
class Case:
    prompt: PromptSources
    lanes: Mapping[LaneName, LaneEstimate]
    cost: LatencyModel
    config: PlannerConfig


def play(case: Case, runs: tuple[Run, ...]) -> float:
    """Plays a plan out: the host's last blocks come group by group, and the model computes group
    by group. Returns when the last group is computed.
    """
    divided = host_blocks_at_the_end(runs)
    groups = groups_of(case.config, divided)
    arrived = [0.0] * groups
    paths: dict[LaneName, set[str]] = {
        "h2d": {"host", "disk"},
        "disk_read": {"disk"},
        "fetch": {"peer"},
    }
    for name, sources in paths.items():
        blocks = sum(run.count for run in runs if run.source in sources)
        if not blocks:
            continue
        lane, late = case.lanes[name], divided if name == "h2d" else 0
        one = case.config.block_bytes / lane.bandwidth
        clock = lane.latency + lane.backlog / lane.bandwidth + (blocks - late) * one
        for group in range(groups):
            clock += late * one / groups
            arrived[group] = max(arrived[group], clock)
    cached = runs[-1].end if runs else case.prompt.device
    work = case.cost.prefill(case.prompt.tokens, cached * case.config.block_tokens)
    clock = case.prompt.wait
    for group in range(groups):
        clock = max(clock, arrived[group]) + work / groups
    return clock


def host_blocks_at_the_end(runs: tuple[Run, ...]) -> int:
    """Blocks of host memory that no block of the disk follows."""
    local = "".join(run.source[0] * run.count for run in runs if run.source != "peer")
    return len(local) - len(local.rstrip("h"))


def groups_of(config: PlannerConfig, blocks: int) -> int:
    """The most groups that are neither small nor of short pieces."""
    fitting = min(config.layers, blocks * config.block_bytes // 5_000_000, config.block_bytes >> 18)
    return max(groups for groups in (1, 2, 4) if groups <= max(1, fitting))


def every_plan(case: Case) -> Iterator[tuple[Run, ...]]:
    """Local runs up to any block, and from there any other worker up to any block."""
    prompt = case.prompt
    last = (prompt.tokens - 1) // case.config.block_tokens
    covered = prompt.local[-1].end if prompt.local else prompt.device
    for end in range(prompt.device, min(covered, last) + 1):
        local = tuple(
            replace(run, count=min(run.count, end - run.first))
            for run in prompt.local
            if run.first < end
        )
        yield local
        for node, blocks in prompt.peers:
            for reach in range(end + 1, min(blocks, last) + 1):
                yield (*local, Run("peer", end, reach - end, node))


def at_ends(case: Case, runs: tuple[Run, ...]) -> bool:
    """Each of these runs is used as far as it goes."""
    last = (case.prompt.tokens - 1) // case.config.block_tokens
    ends = {"": {last} | {run.end for run in case.prompt.local}}
    ends |= {node: {last, blocks} for node, blocks in case.prompt.peers}
    return all(run.end in ends[run.node] for run in runs)


def price(case: Case, runs: tuple[Run, ...]) -> float:
    """What the planner makes small."""
    sources = len({(run.source, run.node) for run in runs})
    return play(case, runs) + case.config.min_gain * sources


@st.composite
def cases(draw: st.DrawFn) -> Case:
    device = draw(st.integers(0, 4))
    local: list[Run] = []
    for count in draw(st.lists(st.integers(1, 6), max_size=4)):
        source: SourceName = "host" if draw(st.booleans()) else "disk"
        local.append(Run(source, local[-1].end if local else device, count))
    peers = tuple((f"w{i}", draw(st.integers(0, 25))) for i in range(draw(st.integers(0, 2))))
    lane = st.builds(
        LaneEstimate,
        bandwidth=st.sampled_from([2e7, 1e8, 1e9, 2e10]),
        latency=st.sampled_from([0.0, 1e-4, 5e-3, 0.08]),
        backlog=st.sampled_from([0, 0, 10**6, 5 * 10**7]),
    )
    names: tuple[LaneName, ...] = ("h2d", "disk_read", "fetch")
    prompt = PromptSources(
        draw(st.integers(16 * device + 1, 500)),
        device,
        tuple(local),
        peers,
        draw(st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.4])),
    )
    config = PlannerConfig(
        block_tokens=16,
        block_bytes=draw(st.sampled_from([4096, 600 << 10, 4 << 20, 4 << 20])),
        layers=draw(st.sampled_from([0, 3, 32])),
        min_gain=draw(st.sampled_from([0.0, 0.002])),
    )
    cost = LatencyModel(0.0, draw(st.sampled_from([1e-5, 1e-4, 1e-3])), 1e-8)
    return Case(prompt, {name: draw(lane) for name in names}, cost, config)


@pytest.mark.timeout(600)
@settings(max_examples=3000 if is_long() else 150, deadline=None)
@given(cases())
def test_no_plan_at_the_ends_of_runs_is_better(case: Case) -> None:
    planned = plan(case.prompt, case.lanes, case.cost, case.config)
    runs = tuple(runs_of(planned))
    everything = list(every_plan(case))
    assert runs in everything, "contiguous from the device's blocks, and of what the sources have"
    assert planned.finish == pytest.approx(play(case, runs))
    assert planned.recompute == pytest.approx(play(case, ()))
    best = min(price(case, one) for one in everything if at_ends(case, one))
    assert price(case, runs) <= best * (1 + 1e-9)
    for one in planned.alternatives:
        assert one.finish == pytest.approx(play(case, one.runs))


@settings(max_examples=3000 if is_long() else 100, deadline=None)
@given(cases())
def test_plans_that_end_inside_a_run_are_hardly_better(case: Case) -> None:
    planned = plan(case.prompt, case.lanes, case.cost, case.config)
    best = min(price(case, one) for one in every_plan(case) if at_ends(case, one[:-1]))
    chosen = price(case, tuple(runs_of(planned)))
    assert best <= chosen * (1 + 1e-9)
    assert chosen <= 1.25 * best + case.config.min_gain


@settings(max_examples=200 if is_long() else 30, deadline=None)
@given(cases())
def test_times_of_segments_grow_and_end_with_the_plan(case: Case) -> None:
    planned = plan(case.prompt, case.lanes, case.cost, case.config)
    for segment in planned.segments:
        assert 0 < segment.eta <= planned.finish * (1 + 1e-9)
        assert segment.deadline >= min(segment.eta, case.config.longest_wait)
    assert planned.finish <= planned.recompute
