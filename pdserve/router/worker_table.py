"""The router's table of workers: models served, load, and whether each may be chosen.

Per model it keeps workers in the order of their node ids, by `WorkerEligibility`, each as the
frozen view that policies see. A view is rebuilt only when its worker changed, so a decision costs
the policy and one copy of a tuple. It decides nothing. Pure; the router's core owns it and feeds
it, and it reads the bookings.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING

from pdserve.ids import NodeLife
from pdserve.kv.tiers.lanes import estimate_of
from pdserve.messages.routing import WorkerLoad
from pdserve.router.policies.base import WorkerKv, WorkerView

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import NodeId, Seconds
    from pdserve.router.bookings import Bookings
    from pdserve.router.config import RouterConfig
    from pdserve.runtime.registry import Member

__all__ = ["ModelView", "WorkerEligibility", "WorkerFacts", "WorkerTable"]


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What membership and a worker's card say about it."""

    worker: NodeLife
    models: tuple[str, ...]
    """Names and aliases, each once; empty while it loads."""
    draining: bool = False
    """It drains, or takes no requests while it changes its mode."""
    suspect: bool = False
    """True if gossip suspects that it is dead."""
    reachable: bool = True
    """False once this router's own link to it was lost."""
    max_sequences: int = 0
    """Most sequences by its card; 0: not said."""
    loras: frozenset[str] = frozenset()
    """Ids of the LoRA adapters that it has."""
    prefill: bool = False
    """True for a prefill worker: it takes no requests."""
    decode: bool = False
    """True if prefill workers may compute its prompts."""
    kv: WorkerKv = field(default_factory=WorkerKv)
    """All but its lanes."""

    @classmethod
    def of(cls, member: Member) -> WorkerFacts:
        """The facts of a member; without a card it serves nothing yet."""
        card = member.card
        if card is None:
            return cls(NodeLife(member.node, member.epoch), ())
        names = dict.fromkeys(name for m in card.models for name in (m.name, *m.aliases))
        return cls(
            NodeLife(member.node, member.epoch),
            tuple(names),
            card.going,
            member.suspect,
            member.reachable,
            card.max_sequences,
            frozenset(lora.id for m in card.models for lora in m.loras),
            prefill=card.mode == "prefill",
            decode=card.mode == "decode",
            kv=WorkerKv(
                card.host,
                card.models[0].compat_hash if card.models else "",
                frozenset(card.transfers or card.fetches),
                card.kv_block_bytes,
                layers=card.kv_layers,
            ),
        )


class WorkerEligibility(Enum):
    """How far a worker may be chosen."""

    SOUND = "sound"
    DOUBTFUL = "doubtful"
    """Suspect or unreachable: chosen only if no other worker is left."""
    DRAINING = "draining"
    """Never chosen: it finishes what it has."""
    UNREADY = "unready"
    """Never chosen: its own report says that it takes nothing now."""
    PREFILL = "prefill"
    """Never chosen: other workers use it through the prefill queue."""

    __hash__ = object.__hash__  # Enum's own is written in Python, and views are kept by these


@dataclass(frozen=True, slots=True)
class ModelView:
    """All about one model that a decision rests on."""

    sound: tuple[WorkerView, ...] = ()
    doubtful: tuple[WorkerView, ...] = ()
    draining: int = 0
    unready: int = 0
    last: NodeId | None = None
    """The worker chosen last; None: none yet."""
    known: bool = False
    """True if it has workers or had some until lately."""
    prefill: int = 0
    """Its prefill workers."""
    version: int = field(default=0, compare=False)
    """Changes whenever workers come, go or change their facts, not with their load."""


@dataclass(slots=True)
class _Worker:
    facts: WorkerFacts
    load: WorkerLoad | None = None
    """Its newest report; None: there is none."""
    load_at: Seconds = 0.0
    """The time when the newest report arrived."""
    reported_size: int = 0
    """Its last reported `max_sequences`; kept when the report is lost."""
    standing: WorkerEligibility = WorkerEligibility.SOUND
    """Its eligibility: the list that it is in, for each of its models."""

    @property
    def sends(self) -> bool:
        """True if others may ask it for KV."""
        facts, load = self.facts, self.load
        if facts.suspect or not facts.reachable or not facts.kv.transfers:
            return False
        return facts.draining or load is None or load.ready


@dataclass(slots=True)
class _Model:
    standing: dict[WorkerEligibility, list[WorkerView]] = field(
        default_factory=lambda: {standing: [] for standing in WorkerEligibility}
    )
    last: NodeId | None = None
    version: int = 0
    sound: tuple[WorkerView, ...] | None = None
    doubtful: tuple[WorkerView, ...] | None = None
    """Cached copies of two of the lists; None: they have changed since."""

    def __bool__(self) -> bool:
        """True if some worker serves it."""
        return any(self.standing.values())


_node = attrgetter("node")


class WorkerTable:
    """All workers of the cluster, by model."""

    def __init__(
        self,
        config: RouterConfig,
        bookings: Bookings,
        speed: Callable[[NodeLife], float] = lambda worker: 1.0,
        predict: Callable[[NodeLife, int], Seconds] = lambda worker, tokens: 0.0,
        known_blocks: Callable[[NodeLife], int] = lambda worker: 0,
    ) -> None:
        """Args: of `bookings` it reads loads and empties `touched`, nothing else. The functions
        give, for each rebuilt view, the worker's speed factor, its time for so many tokens, and
        its known blocks.
        """
        self._config = config
        self._bookings = bookings
        self._speed = speed
        self._predict = predict
        self._known_blocks = known_blocks
        self._workers: dict[NodeId, _Worker] = {}
        self._models: dict[str, _Model] = {}
        """Models that have workers."""
        self._gone: dict[str, Seconds] = {}
        """Models that had workers, by the time of their removal, earliest first."""
        self._versions = 0
        self._tiered: set[NodeId] = set()
        """Workers that report lanes of tiers."""

    @property
    def tiered(self) -> bool:
        """True if some worker has tiers below its device, or fetches KV."""
        return bool(self._tiered)

    def __len__(self) -> int:
        """Number of workers, whatever their eligibility."""
        return len(self._workers)

    # ------------------------------------------------------------------ news

    def put(self, now: Seconds, facts: WorkerFacts) -> None:
        """Adds or changes a worker. An earlier life of the node is removed; facts about a past life
        are ignored.
        """
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

    def gone(self, now: Seconds, worker: NodeLife) -> None:
        """Removes a worker's life."""
        found = self._workers.get(worker.node)
        if found and found.facts.worker == worker:
            self._forget(now, worker.node)

    def report(self, worker: NodeLife, load: WorkerLoad | None, now: Seconds = 0.0) -> None:
        """Sets its newest load; None: no longer known."""
        found = self._workers.get(worker.node)
        if found and found.facts.worker == worker:
            found.load, found.load_at = load, now
            found.reported_size = (load and load.max_sequences) or found.reported_size
            (self._tiered.add if load and load.lanes else self._tiered.discard)(worker.node)
            self._refresh(found)

    def chosen(self, model: str, node: NodeId) -> None:
        """Notes which worker was chosen last for a model."""
        self._models[model].last = node

    def forget(self, now: Seconds) -> None:
        """Drops expired memories of models."""
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
            found.sound = tuple(standing[WorkerEligibility.SOUND])
            found.doubtful = tuple(standing[WorkerEligibility.DOUBTFUL])
        return ModelView(
            found.sound,
            found.doubtful,
            len(standing[WorkerEligibility.DRAINING]),
            len(standing[WorkerEligibility.UNREADY]),
            found.last,
            known=True,
            prefill=len(standing[WorkerEligibility.PREFILL]),
            version=found.version,
        )

    def workers(self, model: str) -> list[tuple[WorkerEligibility, WorkerView]]:
        """All workers that requests might go to, by rising node id."""
        self._catch_up()
        found = self._models.get(model)
        if found is None:
            return []
        pairs = [
            (standing, view)
            for standing, views in found.standing.items()
            if standing is not WorkerEligibility.PREFILL
            for view in views
        ]
        return sorted(pairs, key=lambda pair: pair[1].node)

    def senders(self, model: str) -> list[WorkerView]:
        """Workers of the model that may send KV to others: ready ones, those that drain, and
        prefill workers; none that is in doubt."""
        self._catch_up()
        found = self._models.get(model)
        if found is None:
            return []
        return [
            view
            for views in found.standing.values()
            for view in views
            if self._workers[view.node].sends
        ]

    def facts(self, node: NodeId) -> WorkerFacts | None:
        """The facts of a worker; None: no such worker."""
        found = self._workers.get(node)
        return found.facts if found else None

    def with_lora(self, lora: str) -> set[NodeId]:
        """Workers that have the adapter."""
        return {node for node, found in self._workers.items() if lora in found.facts.loras}

    def report_of(self, node: NodeId) -> WorkerLoad | None:
        """The worker's newest report."""
        found = self._workers.get(node)
        return found.load if found else None

    def load_age(self, now: Seconds, node: NodeId) -> Seconds:
        """Age of the worker's report; 0 without one."""
        found = self._workers.get(node)
        return max(0.0, now - found.load_at) if found and found.load else 0.0

    def model_of(self, node: NodeId) -> str:
        """The first name of the model that a worker serves; empty: none."""
        found = self._workers.get(node)
        return found.facts.models[0] if found and found.facts.models else ""

    def served(self) -> list[str]:
        """Models that have workers, each by one of its names."""
        return sorted(
            {found.facts.models[0] for found in self._workers.values() if found.facts.models}
        )

    def models(self) -> dict[str, dict[WorkerEligibility, int]]:
        """Workers by eligibility, per served model: for status and metrics."""
        return {
            name: {standing: len(views) for standing, views in model.standing.items() if views}
            for name, model in self._models.items()
        }

    # ------------------------------------------------------------------ inside

    def _catch_up(self) -> None:
        """Rebuilds the views of workers whose bookings changed."""
        touched = self._bookings.touched
        for node in touched:
            if node in self._workers:
                self._refresh(self._workers[node])
        touched.clear()

    def _refresh(self, worker: _Worker) -> None:
        """Replaces a worker's view; cheap while its eligibility stays."""
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
        """Enters a worker under each of its models."""
        worker.standing = self._standing(worker)
        view = self._view(worker)
        for name in worker.facts.models:
            model = self._models.get(name)
            if model is None:
                model = self._models[name] = _Model()
                self._gone.pop(name, None)
            model.sound = None
            model.version = self._changed()
            insort(model.standing[worker.standing], view, key=_node)

    def _withdraw(self, worker: _Worker) -> None:
        """Removes a worker from each of its models, which may be empty for a moment."""
        node = worker.facts.worker.node
        for name in worker.facts.models:
            model = self._models[name]
            model.sound = None
            model.version = self._changed()
            views = model.standing[worker.standing]
            del views[bisect_left(views, node, key=_node)]

    def _changed(self) -> int:
        """Assigns a new version, unique over all models that had the same name."""
        self._versions += 1
        return self._versions

    def _forget(self, now: Seconds, node: NodeId) -> None:
        worker = self._workers.pop(node, None)
        self._tiered.discard(node)
        if worker:
            self._withdraw(worker)
            self._bury(now, worker.facts.models)

    def _bury(self, now: Seconds, models: tuple[str, ...]) -> None:
        """Remembers those of these models that no worker serves any more."""
        for name in models:
            if name in self._models and not self._models[name]:
                del self._models[name]
                self._gone[name] = now + self._config.gone_model_memory
        self.forget(now)

    def _standing(self, worker: _Worker) -> WorkerEligibility:
        facts, load = worker.facts, worker.load
        if facts.prefill:
            return WorkerEligibility.PREFILL
        if facts.draining:
            return WorkerEligibility.DRAINING
        if load and not load.ready:
            return WorkerEligibility.UNREADY
        return (
            WorkerEligibility.DOUBTFUL
            if facts.suspect or not facts.reachable
            else WorkerEligibility.SOUND
        )

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
            # A prompt that a prefill worker computes delays no request here, and has its blocks.
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
            kv=self._kv(worker, load),
            reported_at=worker.load_at,
        )

    def _kv(self, worker: _Worker, load: WorkerLoad) -> WorkerKv:
        """With its lanes, whose backlog includes what was placed there since the report."""
        kv = worker.facts.kv
        if not load.lanes:
            return kv
        placed = self._bookings.reserved(worker.facts.worker.node)
        lanes = map(estimate_of, load.lanes)
        names = (lane.lane for lane in load.lanes)
        return replace(
            kv,
            lanes={
                name: replace(lane, backlog=lane.backlog + placed[name]) if placed[name] else lane
                for name, lane in zip(names, lanes, strict=True)
            },
        )


_NO_REPORT = WorkerLoad()
