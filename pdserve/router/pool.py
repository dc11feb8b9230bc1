"""The router's view of workers: who serves which model, how busy each is, who may be chosen.

Per model it keeps the workers in the order of their node ids, by `Standing`, each as the frozen
view that policies see. A view is made anew only when something about its worker changed, so that a
decision costs the policy and one copy of a tuple.

It knows members by `Facts`, not how they were learnt, and decides nothing. Pure. The router's
service owns it and feeds it together with the bookings, which it reads.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING

from pdserve.messages.routing import WorkerLoad
from pdserve.router.bookings import Life
from pdserve.router.policies.base import WorkerView

if TYPE_CHECKING:
    from pdserve.ids import NodeId, Seconds
    from pdserve.router.bookings import Bookings
    from pdserve.router.config import RouterConfig
    from pdserve.runtime.registry import Member

__all__ = ["Facts", "ModelView", "Pool", "Standing"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What membership and a worker's card say of it."""

    worker: Life
    models: tuple[str, ...]
    """Names and aliases, each once; empty while it loads."""
    draining: bool = False
    suspect: bool = False
    """Somebody accuses it of silence."""
    reachable: bool = True
    """This router's own link to it has not been lost."""
    max_sequences: int = 0
    """From its card; 0: not said."""

    @classmethod
    def of(cls, member: Member) -> Facts:
        """Those of a member; without a card it serves nothing yet."""
        card = member.card
        if card is None:
            return cls(Life(member.node, member.epoch), ())
        names = dict.fromkeys(name for m in card.models for name in (m.name, *m.aliases))
        return cls(
            Life(member.node, member.epoch),
            tuple(names),
            card.draining,
            member.suspect,
            member.reachable,
            card.max_sequences,
        )


class Standing(Enum):
    """Whether a worker may be chosen."""

    SOUND = "sound"
    DOUBTFUL = "doubtful"
    """Suspect or unreachable: only if nobody else is left."""
    DRAINING = "draining"
    """Never: it finishes what it has."""
    UNREADY = "unready"
    """Never: by its own report it takes nothing now."""


@dataclass(frozen=True, slots=True)
class ModelView:
    """Everything about one model that a decision rests on."""

    sound: tuple[WorkerView, ...] = ()
    doubtful: tuple[WorkerView, ...] = ()
    draining: int = 0
    unready: int = 0
    last: NodeId | None = None
    """Who was chosen last; None: nobody yet."""
    known: bool = False
    """It has workers, or had some until lately."""


@dataclass(slots=True)
class _Worker:
    facts: Facts
    load: WorkerLoad | None = None
    """Its newest report; None: there is none."""
    reported_size: int = 0
    """What it last reported as `max_sequences`; outlives the report."""
    standing: Standing = Standing.SOUND
    """The list that it is in, for each of its models."""


@dataclass(slots=True)
class _Model:
    standing: dict[Standing, list[WorkerView]] = field(
        default_factory=lambda: {standing: [] for standing in Standing}
    )
    last: NodeId | None = None

    def __bool__(self) -> bool:
        """Somebody serves it."""
        return any(self.standing.values())


_node = attrgetter("node")


class Pool:
    """All workers of the cluster, by model."""

    def __init__(self, config: RouterConfig, bookings: Bookings) -> None:
        """Of `bookings` it reads `load` and empties `touched`; it changes nothing else there."""
        self._config = config
        self._bookings = bookings
        self._workers: dict[NodeId, _Worker] = {}
        self._models: dict[str, _Model] = {}
        """Those that have workers."""
        self._gone: dict[str, Seconds] = {}
        """Those that had some: when to forget it, earliest first."""

    def __len__(self) -> int:
        """Workers, in whatever standing."""
        return len(self._workers)

    # ------------------------------------------------------------------ news

    def put(self, now: Seconds, facts: Facts) -> None:
        """A worker appeared or changed. An earlier life of the node is forgotten, news of one that
        is over is ignored."""
        node, epoch = facts.worker
        worker = self._workers.get(node)
        if worker and worker.facts.worker.epoch > epoch:
            return
        before: tuple[str, ...] = ()
        if worker is None or worker.facts.worker.epoch < epoch:
            self._forget(now, node)
            self._workers[node] = worker = _Worker(facts)
        else:
            before = worker.facts.models
            self._withdraw(worker)
            worker.facts = facts
        self._offer(worker)
        self._bury(now, before)

    def gone(self, now: Seconds, worker: Life) -> None:
        """Its life is over."""
        found = self._workers.get(worker.node)
        if found and found.facts.worker == worker:
            self._forget(now, worker.node)

    def report(self, worker: Life, load: WorkerLoad | None) -> None:
        """Its newest load; None: it is no longer known."""
        found = self._workers.get(worker.node)
        if found and found.facts.worker == worker:
            found.load = load
            found.reported_size = (load and load.max_sequences) or found.reported_size
            self._refresh(found)

    def chosen(self, model: str, node: NodeId) -> None:
        """Whose turn it was."""
        self._models[model].last = node

    def forget(self, now: Seconds) -> None:
        """Drop memories that ran out."""
        while self._gone:
            model, until = next(iter(self._gone.items()))
            if until > now and len(self._gone) <= self._config.gone_models:
                return
            del self._gone[model]

    # ------------------------------------------------------------------ views

    def view(self, now: Seconds, model: str) -> ModelView:
        """The model as it is now. O(workers of the model)."""
        self._catch_up()
        found = self._models.get(model)
        if found is None:
            return ModelView(known=self._gone.get(model, now) > now)
        standing = found.standing
        return ModelView(
            tuple(standing[Standing.SOUND]),
            tuple(standing[Standing.DOUBTFUL]),
            len(standing[Standing.DRAINING]),
            len(standing[Standing.UNREADY]),
            found.last,
            known=True,
        )

    def models(self) -> dict[str, dict[Standing, int]]:
        """Per served model, its workers by standing: for status and metrics."""
        return {
            name: {standing: len(views) for standing, views in model.standing.items() if views}
            for name, model in self._models.items()
        }

    # ------------------------------------------------------------------ inside

    def _catch_up(self) -> None:
        """Make the views of workers whose bookings changed."""
        touched = self._bookings.touched
        for node in touched:
            if node in self._workers:
                self._refresh(self._workers[node])
        touched.clear()

    def _refresh(self, worker: _Worker) -> None:
        """Its view replaces the old one; cheap while its standing stays."""
        if self._standing(worker) is not worker.standing:
            self._withdraw(worker)
            self._offer(worker)
            return
        view = self._view(worker)
        for name in worker.facts.models:
            views = self._models[name].standing[worker.standing]
            views[bisect_left(views, view.node, key=_node)] = view

    def _offer(self, worker: _Worker) -> None:
        """Enter it for each of its models."""
        worker.standing = self._standing(worker)
        view = self._view(worker)
        for name in worker.facts.models:
            model = self._models.get(name)
            if model is None:
                model = self._models[name] = _Model()
                self._gone.pop(name, None)
            insort(model.standing[worker.standing], view, key=_node)

    def _withdraw(self, worker: _Worker) -> None:
        """Take it out of each of its models; they may be left without workers for a moment."""
        node = worker.facts.worker.node
        for name in worker.facts.models:
            views = self._models[name].standing[worker.standing]
            del views[bisect_left(views, node, key=_node)]

    def _forget(self, now: Seconds, node: NodeId) -> None:
        worker = self._workers.pop(node, None)
        if worker:
            self._withdraw(worker)
            self._bury(now, worker.facts.models)

    def _bury(self, now: Seconds, models: tuple[str, ...]) -> None:
        """Of these, remember those that nobody serves any more."""
        for name in models:
            if name in self._models and not self._models[name]:
                del self._models[name]
                self._gone[name] = now + self._config.gone_model_memory
        self.forget(now)

    def _standing(self, worker: _Worker) -> Standing:
        facts, load = worker.facts, worker.load
        if facts.draining:
            return Standing.DRAINING
        if load and not load.ready:
            return Standing.UNREADY
        return Standing.DOUBTFUL if facts.suspect or not facts.reachable else Standing.SOUND

    def _view(self, worker: _Worker) -> WorkerView:
        node, epoch = worker.facts.worker
        load = worker.load or _NO_REPORT
        placed, tokens = self._bookings.load(node)
        said = worker.reported_size or worker.facts.max_sequences
        size = said or self._config.assumed_max_sequences
        sequences = load.running + load.waiting + placed
        return WorkerView(
            node,
            epoch,
            sequences,
            size,
            sequences / size,
            tokens,
            load.blocks_total,
            load.blocks_used,
            load.blocks_cached,
        )


_NO_REPORT = WorkerLoad()
