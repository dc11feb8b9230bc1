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
    from collections.abc import Callable

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
    loras: frozenset[str] = frozenset()
    """Adapters that it has."""
    prefill: bool = False
    """It computes prompts for others and takes no requests."""
    decode: bool = False
    """It may have prompts computed by such."""

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
            prefill=card.mode == "prefill",
            decode=card.mode == "decode",
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
    PREFILL = "prefill"
    """Never: it is there for other workers, which find it by the prefill queue."""


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
    prefill: int = 0
    """Workers that only compute prompts for others."""


@dataclass(slots=True)
class _Worker:
    facts: Facts
    load: WorkerLoad | None = None
    """Its newest report; None: there is none."""
    load_at: Seconds = 0.0
    """When that came."""
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
    sound: tuple[WorkerView, ...] | None = None
    doubtful: tuple[WorkerView, ...] | None = None
    """Copies of two of the lists; None: they have changed since."""

    def __bool__(self) -> bool:
        """Somebody serves it."""
        return any(self.standing.values())


_node = attrgetter("node")


class Pool:
    """All workers of the cluster, by model."""

    def __init__(
        self,
        config: RouterConfig,
        bookings: Bookings,
        speed: Callable[[Life], float] = lambda worker: 1.0,
        predict: Callable[[Life, int], Seconds] = lambda worker, tokens: 0.0,
        known_blocks: Callable[[Life], int] = lambda worker: 0,
    ) -> None:
        """Of `bookings` it reads loads and empties `touched`; it changes nothing else there.
        The functions are asked whenever a view is made: a worker's factor, its time for so many
        tokens, the blocks known there."""
        self._config = config
        self._bookings = bookings
        self._speed = speed
        self._predict = predict
        self._known_blocks = known_blocks
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

    def report(self, worker: Life, load: WorkerLoad | None, now: Seconds = 0.0) -> None:
        """Its newest load; None: it is no longer known."""
        found = self._workers.get(worker.node)
        if found and found.facts.worker == worker:
            found.load, found.load_at = load, now
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
        if found.sound is None or found.doubtful is None:
            found.sound = tuple(standing[Standing.SOUND])
            found.doubtful = tuple(standing[Standing.DOUBTFUL])
        return ModelView(
            found.sound,
            found.doubtful,
            len(standing[Standing.DRAINING]),
            len(standing[Standing.UNREADY]),
            found.last,
            known=True,
            prefill=len(standing[Standing.PREFILL]),
        )

    def workers(self, model: str) -> list[tuple[Standing, WorkerView]]:
        """All that requests might go to, by rising node id."""
        self._catch_up()
        found = self._models.get(model)
        if found is None:
            return []
        pairs = [
            (standing, view)
            for standing, views in found.standing.items()
            if standing is not Standing.PREFILL
            for view in views
        ]
        return sorted(pairs, key=lambda pair: pair[1].node)

    def facts(self, node: NodeId) -> Facts | None:
        """What is known of a worker; None: there is none of that name."""
        found = self._workers.get(node)
        return found.facts if found else None

    def with_lora(self, lora: str) -> set[NodeId]:
        """Who has the adapter."""
        return {node for node, found in self._workers.items() if lora in found.facts.loras}

    def report_of(self, node: NodeId) -> WorkerLoad | None:
        """The worker's newest report."""
        found = self._workers.get(node)
        return found.load if found else None

    def load_age(self, now: Seconds, node: NodeId) -> Seconds:
        """How old the worker's report is; 0 without one."""
        found = self._workers.get(node)
        return max(0.0, now - found.load_at) if found and found.load else 0.0

    def model_of(self, node: NodeId) -> str:
        """The first name of what a worker serves; empty: nothing."""
        found = self._workers.get(node)
        return found.facts.models[0] if found and found.facts.models else ""

    def served(self) -> list[str]:
        """Models that have workers, each by one of its names."""
        return sorted(
            {found.facts.models[0] for found in self._workers.values() if found.facts.models}
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
            model = self._models[name]
            model.sound = None
            views = model.standing[worker.standing]
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
            model.sound = None
            insort(model.standing[worker.standing], view, key=_node)

    def _withdraw(self, worker: _Worker) -> None:
        """Take it out of each of its models; they may be left without workers for a moment."""
        node = worker.facts.worker.node
        for name in worker.facts.models:
            model = self._models[name]
            model.sound = None
            views = model.standing[worker.standing]
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
        if facts.prefill:
            return Standing.PREFILL
        if facts.draining:
            return Standing.DRAINING
        if load and not load.ready:
            return Standing.UNREADY
        return Standing.DOUBTFUL if facts.suspect or not facts.reachable else Standing.SOUND

    def _view(self, worker: _Worker) -> WorkerView:
        life = worker.facts.worker
        node, epoch = life
        load = worker.load or _NO_REPORT
        placed, placed_tokens = self._bookings.load(node)
        prefills = self._bookings.prefills(node)
        said = worker.reported_size or worker.facts.max_sequences
        size = said or self._config.assumed_max_sequences
        sequences = max(0, load.running + load.waiting - prefills.left) + placed
        requests, tokens, work, head = prefills[0], prefills[2], prefills[3], prefills[4]
        speed = self._speed(life)
        if prefills.strangers:  # known by the worker's word only: its report says how much it is
            strange = max(0, load.uncomputed_tokens - tokens)
            requests += prefills.strangers
            tokens += strange
            work += self._predict(life, strange) if strange else 0.0
            head = head or work / requests
        if worker.facts.decode and worker.load is not None:
            # What a prefill worker computes is in nobody's way here, and has its blocks already.
            most = load.uncomputed_tokens + placed_tokens
            if tokens > most:
                work *= most / tokens
                head = min(head, work)
                tokens = most
        return WorkerView(
            node=node,
            epoch=epoch,
            sequences=sequences,
            max_sequences=size,
            occupancy=sequences / size,
            placed_tokens=placed_tokens,
            blocks_total=load.blocks_total,
            blocks_used=load.blocks_used,
            blocks_cached=load.blocks_cached,
            prefills=requests,
            prefill_tokens=tokens,
            work=work,
            head=head,
            as_of=prefills.as_of,
            decodes=max(0, sequences - prefills.sequences - prefills.strangers),
            kv_tokens=load.kv_tokens + placed_tokens,
            speed=speed,
            ttft=prefills.ttft,
            itl=load.itl,
            known_blocks=self._known_blocks(life),
            decode=worker.facts.decode,
            window_work=prefills.window,
        )


_NO_REPORT = WorkerLoad()
