"""Plans from where a prompt's cached prefix comes: host, disk, another worker, or recompute.

    O  seconds until all fetched blocks are on the device: the slowest of the lanes that they use
    P  seconds to prefill the rest of the prompt
    W  seconds that the prompt waits for the device; loading begins at once

    finish = max( max(W, O_first) + P, max(W, O) + P / G )

The model runs in G layer groups: a group starts when its part of every fetched block is there, and
O_first is when that holds for the first one. Only blocks of host memory come in groups, those
behind the last block of the disk; G is what `layer_groups` makes of them. All others come whole.
The finish is exact for a lane that sends the groups one after the other, and for a rest of the
prompt that is computed in one step.

Every plan is a prefix of what the sources have: whole local runs, and after them at most one other
worker. The last run may be cut where its blocks begin to cost time. The plan that finishes first
wins; to compute everything is always one of them.

Pure and stateless. It starts nothing, and does not know whether a source still has its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Protocol

from pdserve.kv.tiers.layer_groups import most_groups

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pdserve.ids import Bytes, Seconds
    from pdserve.kv.tiers.lanes import LaneEstimate
    from pdserve.messages.tiers import KvFetchMode, LaneName, SourceName

__all__ = [
    "Alternative",
    "Plan",
    "PlannedSegment",
    "PlannerConfig",
    "PrefillCost",
    "PromptSources",
    "Run",
    "plan",
]

_LANES: Final[dict[SourceName, tuple[LaneName, ...]]] = {
    "host": ("h2d",),
    "disk": ("disk_read", "h2d"),
    "peer": ("fetch",),
}
"""The lanes that a source's blocks go through. They work at the same time on different blocks."""


class PrefillCost(Protocol):
    """Predicts the time of a prefill; `perf_model.latency_model` has one."""

    def prefill(self, length: int, cached: int = 0) -> Seconds:
        """Seconds to prefill `length` tokens, of which the first `cached` need no computing."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of a prompt that one source has."""

    source: SourceName
    first: int
    """Number of the first block in the prompt."""
    count: int
    node: str = ""
    """The other worker, for `peer`."""

    @property
    def end(self) -> int:
        return self.first + self.count


@dataclass(frozen=True, slots=True)
class PromptSources:
    """A prompt, and who has which of its leading blocks."""

    tokens: int
    device: int = 0
    """Leading blocks that are on the device."""
    local: Sequence[Run] = ()
    """Runs of host and disk after those, without a gap."""
    peers: Sequence[tuple[str, int]] = ()
    """Other workers, with the number of leading blocks that each has; best first."""
    wait: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """What a planner assumes of its worker."""

    block_tokens: int
    block_bytes: Bytes
    layers: int = 0
    """The model's layers, if blocks come from host memory in groups of them; 0: they come whole."""
    fetch: KvFetchMode = "auto"
    """Whether blocks come from other workers: if it is sooner, whenever this worker does not have
    them, or never."""
    min_gain: Seconds = 0.002
    """Seconds that each source of a plan has to gain: predictions are not more exact than that."""
    most_points: int = 8
    """Most ends of local runs that are compared."""
    slack: float = 1.5
    margin: Seconds = 0.02
    """A segment's deadline is at least `slack` times its predicted time, plus `margin`."""
    longest_wait: Seconds = 5.0
    """Latest deadline of a segment, from now; with `always` it is that of each."""


@dataclass(frozen=True, slots=True)
class PlannedSegment:
    """A run that is fetched. Times count from the plan's."""

    run: Run
    eta: Seconds
    """When its last block is predicted to be on the device."""
    deadline: Seconds
    """When its blocks are given up and computed instead."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of the plans that were compared, to explain the choice."""

    runs: tuple[Run, ...]
    """Empty: recompute."""
    finish: Seconds


@dataclass(frozen=True, slots=True)
class Plan:
    """What to fetch; the rest of the prompt is computed."""

    segments: tuple[PlannedSegment, ...]
    finish: Seconds
    """Predicted time to the end of the prefill, the wait included."""
    recompute: Seconds
    """The same if nothing were fetched."""
    alternatives: tuple[Alternative, ...] = field(default=(), compare=False)
    """All that were compared, the soonest first."""

    @property
    def blocks(self) -> int:
        """Number of blocks that are fetched."""
        return sum(segment.run.count for segment in self.segments)


def plan(
    prompt: PromptSources,
    lanes: Mapping[LaneName, LaneEstimate],
    cost: PrefillCost,
    config: PlannerConfig,
) -> Plan:
    """The plan that is predicted to finish first. `lanes` has those of the sources named."""
    judge = _Judge(prompt, lanes, cost, config)
    compared = [Alternative(runs, judge.finish(runs)) for runs in _candidates(prompt, judge)]
    recompute = compared[0].finish
    allowed = _allowed(compared, prompt, config)
    best = min(allowed, key=lambda one: one.finish + config.min_gain * _sources(one.runs))
    return Plan(
        judge.segments(best.runs, recompute - best.finish),
        best.finish,
        recompute,
        tuple(sorted(compared, key=lambda one: one.finish)),
    )


def _sources(runs: Iterable[Run]) -> int:
    return len({(run.source, run.node) for run in runs})


def _allowed(
    compared: list[Alternative], prompt: PromptSources, config: PlannerConfig
) -> list[Alternative]:
    """All of them; if fetching is forced, those that reach furthest thanks to another worker."""
    local_end = prompt.local[-1].end if prompt.local else prompt.device
    reach = max((one.runs[-1].end for one in compared if one.runs), default=0)
    if config.fetch != "always" or reach <= local_end:
        return compared
    return [one for one in compared if one.runs and one.runs[-1].end == reach]


class _Judge:
    """Predicts plans for one prompt."""

    def __init__(
        self,
        prompt: PromptSources,
        lanes: Mapping[LaneName, LaneEstimate],
        cost: PrefillCost,
        config: PlannerConfig,
    ) -> None:
        self.config = config
        self._prompt = prompt
        self._lanes = lanes
        self._cost = cost
        # An engine computes at least one token, to sample from.
        self.last = max(prompt.device, (prompt.tokens - 1) // config.block_tokens)

    def finish(self, runs: Sequence[Run]) -> Seconds:
        """Seconds until the prefill ends, if these runs are fetched."""
        config, wait = self.config, self._prompt.wait
        cached = runs[-1].end if runs else self._prompt.device
        work = self._cost.prefill(self._prompt.tokens, cached * config.block_tokens)
        sizes = self._sizes(runs)
        whole = self._whole(sizes)
        divided = self._divided(runs)
        groups = most_groups(divided, config.block_bytes, config.layers)
        if groups > 1:
            sizes["h2d"] -= divided - divided // groups
        return max(max(wait, self._whole(sizes)) + work, max(wait, whole) + work / groups)

    def segments(self, runs: Sequence[Run], gain: Seconds) -> tuple[PlannedSegment, ...]:
        """The runs with their times; a lane serves them in order. `gain`: how much sooner this is
        than to compute everything."""
        segments = []
        for index, run in enumerate(runs):
            sizes = self._sizes(runs[: index + 1])
            eta = self._whole({lane: sizes[lane] for lane in _LANES[run.source]})
            segments.append(PlannedSegment(run, eta, self._deadline(eta, gain)))
        return tuple(segments)

    def _deadline(self, eta: Seconds, gain: Seconds) -> Seconds:
        """When blocks that are predicted at `eta` are given up: not before they would have been
        computed. So a wait in vain costs at most as much again as to compute them at once."""
        config = self.config
        if config.fetch == "always":
            return config.longest_wait
        late = max(config.slack * eta + config.margin, eta + gain)
        return min(late, config.longest_wait)

    def hidden(self, before: Sequence[Run], run: Run) -> int:
        """How many of the run's blocks come at no cost, after the runs before it: while the prompt
        waits for the device, or while slower lanes are busy with those."""
        sizes = self._sizes(before)
        free_until = max(self._prompt.wait, self._whole(sizes))
        fitting = run.count
        for name in _LANES[run.source]:
            lane = self._lanes[name]
            room = (free_until - lane.latency) * lane.bandwidth - lane.backlog - sizes.get(name, 0)
            fitting = min(fitting, int(room // self.config.block_bytes))
        return max(0, fitting)

    def _sizes(self, runs: Sequence[Run]) -> dict[LaneName, Bytes]:
        sizes: dict[LaneName, Bytes] = {}
        for run in runs:
            for lane in _LANES[run.source]:
                sizes[lane] = sizes.get(lane, 0) + run.count * self.config.block_bytes
        return sizes

    def _whole(self, sizes: Mapping[LaneName, Bytes]) -> Seconds:
        return max((self._lanes[lane].seconds(size) for lane, size in sizes.items()), default=0.0)

    def _divided(self, runs: Sequence[Run]) -> Bytes:
        """Bytes that come in layer groups: those of the host's blocks behind the disk's."""
        blocks = 0
        for run in runs:
            if run.source != "peer":
                blocks = blocks + run.count if run.source == "host" else 0
        return blocks * self.config.block_bytes


def _candidates(prompt: PromptSources, judge: _Judge) -> Iterator[tuple[Run, ...]]:
    """The plans to compare; the first one is recompute."""
    local = tuple(_cut(prompt.local, judge.last))
    ends = _points(local, judge.config.most_points)
    yield ()
    for end in ends:
        yield from _with_shorter(local[:end], judge)
    if judge.config.fetch == "never":
        return
    for node, blocks in prompt.peers:
        for end in (0, *ends):
            first = local[end - 1].end if end else prompt.device
            count = min(blocks, judge.last) - first
            if count > 0:
                run = Run("peer", first, count, node)
                yield from _with_shorter((*local[:end], run), judge)


def _with_shorter(runs: tuple[Run, ...], judge: _Judge) -> Iterator[tuple[Run, ...]]:
    """The plan, and the one whose last run ends where its blocks begin to cost time."""
    yield runs
    before, last = runs[:-1], runs[-1]
    count = judge.hidden(before, last)
    if 0 < count < last.count:
        yield (*before, replace(last, count=count))


def _cut(runs: Iterable[Run], end: int) -> Iterator[Run]:
    """The runs up to block `end`."""
    for run in runs:
        count = min(run.count, end - run.first)
        if count > 0:
            yield replace(run, count=count)


def _points(runs: Sequence[Run], most: int) -> list[int]:
    """Numbers of leading runs that are worth comparing: all of them, and those that end with a long
    run."""
    longest = sorted(range(1, len(runs)), key=lambda end: -runs[end - 1].count)
    return sorted([*longest[: most - 1], *([len(runs)] if runs else [])])
