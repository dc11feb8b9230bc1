"""Puts together what a planner sees of the cluster at one moment.

Cards say which workers there are and what they do, loads how busy they are, routers' reports what
is asked of them, actuators which processes exist, and the other planners who decides. No call is
made here; the service feeds it and asks for workers' reports. Owned by the service.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

import msgspec

from pdserve.ids import NodeLife
from pdserve.planner.demand_reader import DemandReader, DemandReaderConfig
from pdserve.planner.driver.demand_view import demand_view
from pdserve.planner.driver.worker_view import Sighting, model_of, worker_view
from pdserve.planner.tick import PlannerInput

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.demand import DemandReport
    from pdserve.messages.planner import Instance
    from pdserve.messages.planner_orders import PlannerState
    from pdserve.messages.routing import WorkerLoad
    from pdserve.messages.status import NodeReport
    from pdserve.planner.config import PlannerConfig
    from pdserve.planner.demand_series import DemandSeries
    from pdserve.planner.driver.actuator_watch import ActuatorWatch
    from pdserve.planner.driver.wishes import Wishes
    from pdserve.planner.pool import Worker
    from pdserve.planner.tick import Refusal
    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import Member

__all__ = ["ClusterSight"]


class ClusterSight:
    """What one planner sees."""

    def __init__(self, config: PlannerConfig, node: Node, watches: Sequence[ActuatorWatch]) -> None:
        self._config = config
        self._node = node
        self._watches = tuple(watches)
        self._reader = DemandReader(node.now(), _reader_config(config))
        self._loads: dict[NodeLife, WorkerLoad] = {}
        self._models: dict[NodeLife, str] = {}
        """What each worker served when it last said so."""
        self._planners: dict[NodeLife, str] = {}
        """Modes of the other planners."""
        self._changing: frozenset[NodeId] = frozenset()
        self.reports: dict[NodeId, NodeReport] = {}
        """Newest reports of workers that drain or change their mode."""

    # ------------------------------------------------------------------ news

    def loaded(self, member: Member, load: WorkerLoad) -> None:
        """A worker's load."""
        self._loads[_life(member)] = load

    def load_gone(self, member: Member) -> None:
        """It publishes no load any more."""
        self._loads.pop(_life(member), None)

    def demanded(self, now: Seconds, member: Member, report: DemandReport) -> None:
        """A router's demand."""
        self._reader.reported(now, _life(member), report)

    def planner_told(self, member: Member, state: PlannerState) -> None:
        """Another planner's mode."""
        self._planners[_life(member)] = state.mode

    def planner_gone(self, member: Member) -> None:
        """It is no planner any more."""
        self._planners.pop(_life(member), None)

    # ------------------------------------------------------------------ looking

    def changing(self) -> tuple[NodeId, ...]:
        """Workers whose reports are needed: those that drain or change their mode, and once more
        those that did so at the last tick, for how it ended."""
        now = frozenset(
            one.node
            for one in self._members()
            if one.card is not None and (one.card.draining or one.card.leaving)
        )
        asked, self._changing = now | self._changing, now
        return tuple(sorted(asked))

    def look(
        self, now: Seconds, wall: float, wishes: Wishes, refusals: Mapping[str, Refusal]
    ) -> PlannerInput:
        """All that is known at this moment."""
        self._watch_routers(now)
        self._forget()
        models = [pool.model for pool in self._config.pools]
        series = {model: self._reader.series(now, model) for model in models}
        workers = tuple(self._workers(models, series))
        return PlannerInput(
            wall=wall,
            planners=self._alike(),
            demand={
                model: demand_view(one, self._queued_tokens(model, workers), self._config.stable)
                for model, one in series.items()
            },
            workers=workers,
            instances=tuple(one for watch in self._watches for one in watch.instances),
            kinds=tuple(one for watch in self._watches for one in watch.kinds),
            down={watch.name: watch.down for watch in self._watches if watch.down},
            refusals=refusals,
            paused=_for_all(wishes.paused(wall), models),
            pins=wishes.pins(wall),
        )

    def _watch_routers(self, now: Seconds) -> None:
        routers = self._node.registry.by_role("router")
        lost = [one.node for one in routers if not one.reachable]
        self._reader.watch(now, [one.node for one in routers], lost)

    def _members(self) -> list[Member]:
        return self._node.registry.by_role("worker")

    def _forget(self) -> None:
        there = {_life(one) for one in self._members()}
        self._models = {life: model for life, model in self._models.items() if life in there}
        names = {life.node for life in there}
        self.reports = {node: one for node, one in self.reports.items() if node in names}

    def _workers(
        self, models: Sequence[str], series: Mapping[str, DemandSeries]
    ) -> Iterator[Worker]:
        instances, pods = self._instances(), self._named_nodes()
        for member in self._members():
            member = _with_change(member, pods.get(member.node))
            card, life = member.card, _life(member)
            if card is None:
                continue
            model = model_of(card, self._models.get(life, ""), models)
            self._models[life] = model
            if not model:
                continue
            seen = Sighting(
                member, self._loads.get(life), self._report_of(member), instances.get(card.change)
            )
            speeds = series[model].speeds if model in series else {}
            worker = worker_view(seen, model, speeds)
            if worker is not None:
                yield worker

    def _report_of(self, member: Member) -> NodeReport | None:
        """Its report, while it says more than the card."""
        return self.reports.get(member.node)

    def _instances(self) -> dict[str, Instance]:
        return {one.change: one for watch in self._watches for one in watch.instances}

    def _named_nodes(self) -> dict[NodeId, Instance]:
        """Instances whose node's name is known beforehand."""
        found = (one for watch in self._watches for one in watch.instances)
        return {one.node: one for one in found if one.node is not None}

    def _queued_tokens(self, model: str, workers: Sequence[Worker]) -> int:
        lives = [one.life for one in workers if one.model == model]
        return sum(self._loads[life].uncomputed_tokens for life in lives if life in self._loads)

    def _alike(self) -> tuple[NodeId, ...]:
        """Living planners of the same mode, this one included. One that has not said its mode yet
        decides nothing yet."""
        found = {self._node.id}
        for member in self._node.registry.by_role("planner"):
            going = member.card is not None and member.card.draining
            alive = member.reachable and not member.suspect and not going
            if alive and self._planners.get(_life(member)) == self._config.mode:
                found.add(member.node)
        return tuple(sorted(found))


def _with_change(member: Member, instance: Instance | None) -> Member:
    """A worker that was not told its change has that of the instance with its name: all pods of a
    Deployment have the same command line."""
    card = member.card
    if card is None or card.change or instance is None:
        return member
    return replace(member, card=msgspec.structs.replace(card, change=instance.change))


def _reader_config(config: PlannerConfig) -> DemandReaderConfig:
    """As many buckets as peaks are looked for in."""
    known = DemandReaderConfig()
    return replace(known, buckets=max(known.buckets, ceil(2 * config.stable / known.bucket)))


def _life(member: Member) -> NodeLife:
    return NodeLife(member.node, member.epoch)


def _for_all(paused: Mapping[str, str], models: Sequence[str]) -> dict[str, str]:
    """A pause without a model holds for all of them."""
    every = paused.get("")
    found = {} if every is None else dict.fromkeys(models, every)
    return found | {model: why for model, why in paused.items() if model}
