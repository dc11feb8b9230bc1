"""Decides which blocks of a prompt are fetched: what this core knows, put to `kv.tiers.planner`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pdserve.engine_core.tiers.onboarder import FetchPlan
from pdserve.kv.tiers.lanes import ASSUMED
from pdserve.kv.tiers.planner import PlannerConfig, PromptSources, Run, plan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve.ids import Bytes, Seconds
    from pdserve.kv.tiers.lanes import LaneEstimate
    from pdserve.kv.tiers.planner import Plan, PrefillCost
    from pdserve.messages.tiers import KvFetchMode, KvSource, LaneName, SourceName

__all__ = ["FetchPlanner"]


class FetchPlanner:
    """Chooses the fetches of one core. Stateless but for what it is made with."""

    def __init__(
        self,
        cost: PrefillCost,
        lanes: Callable[[], Mapping[LaneName, LaneEstimate]],
        *,
        block_tokens: int,
        block_bytes: Bytes,
        mode: KvFetchMode = "auto",
        layers: int = 0,
    ) -> None:
        """`lanes` returns the present estimates; assumed ones stand for those that it lacks.
        `layers`: as in `PlannerConfig`, for prompts that may begin early."""
        self._cost = cost
        self._lanes = lanes
        self._config = PlannerConfig(block_tokens=block_tokens, block_bytes=block_bytes, fetch=mode)
        self._early = replace(self._config, layers=layers)

    def choose(
        self,
        device: int,
        local: Sequence[SourceName],
        peers: Sequence[KvSource],
        blocks: int,
        wait: Seconds,
        *,
        early: bool = False,
    ) -> FetchPlan | None:
        """What to fetch behind the first `device` blocks of a prompt that can use `blocks` of them;
        None: nothing. `local` says where this worker has the next ones. `wait`: seconds until the
        prompt could be computed. `early`: as in `FetchChooser.choose`."""
        size = self._config.block_tokens
        sources = PromptSources(
            tokens=blocks * size + 1,
            device=device,
            local=_runs(device, local),
            peers=[(peer.node, min(peer.blocks, blocks)) for peer in peers],
            wait=wait,
        )
        config = self._early if early else self._config
        chosen = plan(sources, {**ASSUMED, **self._lanes()}, self._cost, config)
        return _fetch_plan(chosen, peers)


def _runs(first: int, sources: Sequence[SourceName]) -> list[Run]:
    """Consecutive blocks of one source, as runs."""
    runs: list[Run] = []
    for place, source in enumerate(sources, first):
        if runs and runs[-1].source == source:
            last = runs[-1]
            runs[-1] = Run(source, last.first, last.count + 1)
        else:
            runs.append(Run(source, place, 1))
    return runs


def _fetch_plan(chosen: Plan, peers: Sequence[KvSource]) -> FetchPlan | None:
    segments = chosen.segments
    if not segments:
        return None
    peer = [segment.run for segment in segments if segment.run.source == "peer"]
    node = peer[0].node if peer else ""
    last = max(segments, key=lambda segment: segment.eta)
    return FetchPlan(
        local=sum(segment.run.count for segment in segments if segment.run.source != "peer"),
        peer=sum(run.count for run in peer),
        source=next((each for each in peers if each.node == node), None) if peer else None,
        seconds=last.eta,
        deadline=max(segment.deadline for segment in segments),
        last=last.run.source,
        saves=chosen.recompute - chosen.finish + last.eta,
    )
