"""Keeps the changes that are under way, and moves them on by what the lists show. Pure.

Nothing here is stored. A planner that begins anew adopts what it finds: instances and loading
workers as starts, workers that change their mode as switches, and drains that a planner ordered as
stops. An operator's drain is no change of the planner's.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final

from pdserve.messages.planner import Change
from pdserve.planner.changes.ids import model_tag, read_change_id
from pdserve.planner.changes.table import ENDS, Action, ChangeEvent, ChangeState, next_state
from pdserve.planner.pool import Coming

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pdserve.ids import NodeId, NodeLife, Seconds
    from pdserve.messages.planner import Instance
    from pdserve.planner.changes.times import KindHealth, StartTimes
    from pdserve.planner.config import PlannerConfig
    from pdserve.planner.pool import Worker
    from pdserve.planner.tick import PlannerInput, Refusal

__all__ = ["ChangeBook", "Ended", "Step", "Underway"]

S, E = ChangeState, ChangeEvent
_MARGIN: Final[Seconds] = 15.0
"""An order that a worker obeys shows on its card within this; beyond its own time-outs it is given
as much."""
_UNDO: Final[Seconds] = 20.0
"""A worker answers an undone drain once it serves again, and is waited for as long."""
_LONGEST: Final[Seconds] = 86_400.0
"""Longest drain that a worker is given because it says so: a day."""
_LEAST_READY: Final[Seconds] = 15.0
"""A start has at least this long from its process to a ready worker, however fast others were: a
host that is busy for a moment makes a start of 2 s one of 7."""
_UNSEEN: Final = 2
"""Ticks in a row that a healthy list must lack an instance before it is gone."""
_SEEN_INSTANCE: Final[Mapping[str, ChangeEvent]] = {
    "pending": E.PENDING,
    "booting": E.BOOTING,
    "running": E.BOOTING,
    "failed": E.FAILED,
    "ended": E.FAILED,
}
_WAITS: Final = (None, E.PENDING, E.BOOTING, E.LOADING)
"""Events of a start that is still waited for."""
_FIRST: Final = {Action.START: S.ASKED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A change that is wanted."""

    action: Action
    reason: str
    kind: str = ""
    mode: str = ""
    life: NodeLife | None = None
    share: float = 0.0
    last: bool = False
    """Of a switch: also if no other worker would do what this one does now."""
    pinned: bool = False
    """Of a stop: nothing but an operator's pin asks for it."""


@dataclass(slots=True, kw_only=True)
class Underway:
    """A change, and how far it is."""

    step: Step
    id: str
    model: str
    number: int
    state: ChangeState
    began: Seconds
    entered: Seconds
    """When it came into its state."""
    booted: Seconds | None = None
    alone: Seconds = -inf
    """Until when nothing of the cluster was seen: its worker may have served meanwhile."""
    adopted: bool = False
    """Found after a restart: when it began is not known."""
    instance: str = ""
    """Id of the change that started the worker which it is about."""
    unseen: int = 0
    lost: Seconds | None = None
    """Of a start: since when its host does not answer; None: it does."""
    left: bool = False
    """Of a switch: the worker was seen to leave its mode."""
    blamed: bool = False
    """Of a start: its failure is counted already."""
    failure: str = ""
    resumed: bool = False
    """Of a stop: it was taken back, which says nothing against the next one."""
    silent: str = ""
    """Why no answer came to the last order to its worker; empty: one came, or none is awaited."""
    drains_until: Seconds | None = None
    """Of a stop: when the worker's own time limit ends its drain, as it said first; None: it has
    not said."""

    @classmethod
    def new(cls, step: Step, name: str, model: str, number: int, now: Seconds) -> Underway:
        """A change that begins now."""
        return cls(
            step=step,
            id=name,
            model=model,
            number=number,
            state=_FIRST.get(step.action, S.ORDERED),
            began=now,
            entered=now,
        )

    @property
    def action(self) -> Action:
        """What it does."""
        return self.step.action

    @property
    def removes(self) -> bool:
        """True if it takes capacity away, for good or for a while."""
        return self.action in (Action.STOP, Action.SWITCH)

    @property
    def record(self) -> Change:
        """As it travels."""
        step = self.step
        return Change(
            id=self.id,
            action=step.action.value,
            kind=step.kind,
            mode=step.mode,
            node=step.life.node if step.life else None,
            epoch=step.life.epoch if step.life else 0,
            share=step.share,
            state=self.state.value,
            reason=self.failure or step.reason,
        )


@dataclass(frozen=True, slots=True)
class Ended:
    """A change that is over."""

    change: Change
    model: str
    state: ChangeState
    seconds: Seconds
    wrong: NodeLife | None = None
    """A worker that registered in another mode than was asked for."""


class ChangeBook:
    """The changes of all models that a planner owns."""

    def __init__(self, config: PlannerConfig, times: StartTimes, health: KindHealth) -> None:
        self._config = config
        self._times = times
        self._health = health
        self._changes: dict[str, Underway] = {}
        self._served: set[str] = set()
        """Starts that are over because their worker has served, as long as they are listed."""
        self._broken: dict[str, tuple[str, Seconds]] = {}
        """Kind of the workers that served and load again, and since when, by the change that
        started them."""
        self._refused_until: dict[tuple[NodeLife, Action], Seconds] = {}

    def of(self, model: str) -> tuple[Underway, ...]:
        """The changes of a model that are under way, the oldest first."""
        return tuple(one for one in self._changes.values() if one.model == model)

    def __iter__(self) -> Iterator[Underway]:
        return iter(tuple(self._changes.values()))

    def get(self, change: str) -> Underway | None:
        """A change that is under way."""
        return self._changes.get(change)

    def enter(self, one: Underway) -> None:
        """Begins a change; its order follows from its state."""
        self._changes[one.id] = one

    def withdraw(self, now: Seconds, one: Underway, reason: str) -> None:
        """The change is no longer wanted."""
        one.failure = reason
        self._move(now, one, E.WITHDRAWN)

    def forget(self, model: str) -> None:
        """The model has another owner now, who finds its changes in the lists."""
        for one in self.of(model):
            del self._changes[one.id]

    def asked(self, model: str, price: Mapping[str, float]) -> Iterator[Coming]:
        """Starts of the model that no list may show yet."""
        for one in self.of(model):
            if one.action is Action.START and one.state not in (S.ENDING, *ENDS):
                kind = one.step.kind
                yield Coming(
                    change=one.id,
                    kind=kind,
                    mode=one.step.mode,
                    state=one.state.value,
                    price=price.get(kind, 1.0),
                )

    def given_up(self, now: Seconds, model: str) -> frozenset[str]:
        """Starts of the model of which nothing is expected any more: those that are being ended,
        and workers that served and whose engine has not come back for as long as a start may
        take."""
        ending = {one.id for one in self.of(model) if one.state is S.ENDING}
        broken = {
            change
            for change, (kind, since) in self._broken.items()
            if now - since >= self._ready_limit(kind)
        }
        return frozenset(ending | broken)

    def _ready_limit(self, kind: str) -> Seconds:
        """Longest time that a worker of this kind may take to become ready."""
        usual = self._config.ready_factor * self._times.p90("boot", kind)
        return max(_LEAST_READY, usual)

    def ready_in(self, now: Seconds, change: str, kind: str) -> Seconds:
        """Seconds until a start whose process runs is expected to serve."""
        one = self._changes.get(change)
        spent = now - one.booted if one is not None and one.booted is not None else 0.0
        return max(0.0, self._times.p90("boot", kind) - spent)

    def switching(self, now: Seconds) -> set[NodeLife]:
        """Workers whose mode may change by an order of this planner. A switch that it gave up some
        minutes ago may still happen."""
        ordered = {one.step.life for one in self if one.action is Action.SWITCH and one.step.life}
        late = {
            life
            for (life, action), until in self._refused_until.items()
            if action is Action.SWITCH and until > now
        }
        return ordered | late

    def may_order(self, now: Seconds, action: Action, life: NodeLife) -> bool:
        """False for a while after a switch or a stop of the worker that did not happen."""
        return now >= self._refused_until.get((life, action), 0.0)

    # ------------------------------------------------------------------ what the lists show

    def adopt(self, now: Seconds, model: str, seen: PlannerInput) -> None:
        """Enters what is under way in the lists and not in the book."""
        self._note_served(now, seen)
        for step, state, name in _found(model, seen):
            if name in self._changes or name in self._served or self._about(step.life):
                continue
            self._changes[name] = Underway(
                step=step,
                id=name,
                model=model,
                number=0,
                state=state,
                began=now,
                entered=now,
                adopted=True,
                booted=now if state in (S.BOOTING, S.JOINED) else None,
                left=state is S.LEAVING,
            )

    def _note_served(self, now: Seconds, seen: PlannerInput) -> None:
        """A worker that has left is not a start that begins anew, although its instance is listed
        for a moment longer."""
        self._served |= {one.change for one in seen.workers if one.state != "loading"}
        self._served &= {
            *(one.change for one in seen.workers),
            *(one.change for one in seen.instances),
        }
        self._broken = {
            one.change: self._broken.get(one.change, (one.kind, now))
            for one in seen.workers
            if one.state == "loading" and one.change in self._served
        }

    def advance(self, now: Seconds, model: str, seen: PlannerInput) -> list[Ended]:
        """Moves the model's changes on; returns those that are over."""
        workers = {one.life: one for one in seen.workers}
        by_change = {one.change: one for one in seen.workers if one.change}
        instances = {one.change: one for one in seen.instances}
        ended: list[Ended] = []
        for one in self.of(model):
            if one.action is Action.START:
                worker = by_change.get(one.id)
                event = self._start_event(now, one, worker, instances.get(one.id), seen)
            else:
                worker = workers.get(one.step.life) if one.step.life else None
                event = self._worker_event(now, one, worker, seen.refusals.get(one.id))
            wrong = worker.life if worker is not None and event is E.WRONG else None
            if event is not None:
                self._move(now, one, event)
            if one.state in ENDS:
                ended.append(self._close(now, one, wrong if one.action is Action.START else None))
        return ended

    def _about(self, life: NodeLife | None) -> bool:
        return life is not None and any(one.step.life == life for one in self._changes.values())

    def _start_event(
        self,
        now: Seconds,
        one: Underway,
        worker: Worker | None,
        instance: Instance | None,
        seen: PlannerInput,
    ) -> ChangeEvent | None:
        one.unseen = 0 if worker or instance or _is_down(one.step.kind, seen) else one.unseen + 1
        refusal = seen.refusals.get(one.id)
        event: ChangeEvent | None
        if worker is not None and worker.state != "draining":
            event = _joined_event(one, worker)
        elif refusal is not None and refusal.kind != "transient" and one.state is S.ASKED:
            one.failure, event = refusal.reason, E.REFUSED
            self._blame(now, one, refusal)
        elif instance is not None:
            event = _SEEN_INSTANCE.get(instance.state)
            if event is E.FAILED and one.state is not S.ENDING:  # it ends for a reason of its own
                one.failure = instance.reason
        else:
            event = E.GONE if one.unseen >= _UNSEEN else None
        if _isolated(seen):
            one.alone = now
        silent = instance is not None and instance.state == "unknown"
        one.lost = (now if one.lost is None else one.lost) if silent else None
        # What no list has ever shown is not gone: its order may have been refused each time.
        waits = one.state is S.ASKED if event is E.GONE else event in _WAITS
        if waits and (late := self._late(now, one)):
            one.failure = late
            return E.LATE
        return event

    def _blame(self, now: Seconds, one: Underway, refusal: Refusal) -> None:
        """An actuator that is full or denies says nothing against the kind itself."""
        kind, config = one.step.kind, self._config
        if refusal.kind == "exhausted":
            wait = config.start_backoff if refusal.retry_in is None else refusal.retry_in
            self._health.away(kind, now + wait, refusal.reason)
        else:
            self._health.failed(kind, now, refusal.reason)
        one.blamed = True

    def _late(self, now: Seconds, one: Underway) -> str:
        """Why a start has waited for too long; empty: it has not."""
        kind, config = one.step.kind, self._config
        if one.lost is not None:  # which says nothing against the kind
            lasts = now - max(one.lost, one.alone)
            late = lasts >= self._ready_limit(kind)
            return f"its host has not answered for {lasts:.0f} s" if late else ""
        if one.state in (S.ASKED, S.PENDING) and now - one.began >= config.pending_timeout:
            self._health.away(kind, now + config.pending_timeout, "a start was pending for ever")
            return f"nobody ran it within {config.pending_timeout:.0f} s"
        limit = self._ready_limit(kind)
        since = max(one.booted if one.booted is not None else now, one.alone)
        if one.state in (S.BOOTING, S.JOINED) and now - since >= limit:
            reason = f"it was not ready {limit:.0f} s after its process began"
            self._health.failed(kind, now, reason)
            return reason
        return ""

    def _worker_event(
        self, now: Seconds, one: Underway, worker: Worker | None, refusal: Refusal | None
    ) -> ChangeEvent | None:
        if refusal is not None and refusal.kind != "transient":
            one.failure = refusal.reason
            return E.REFUSED
        if worker is None:
            return E.GONE
        one.instance = worker.change
        _note_worker(now, one, worker, refusal)
        event = _EVENTS[one.action](one, worker)
        if event is None and now - one.entered >= self._limit(one):
            one.failure = one.silent or one.failure
            return E.LATE
        return event

    def drain_limit(self, one: Underway) -> Seconds:
        """Longest drain of a stop: the planner's limit, or the worker's own where that is
        longer."""
        own = 0.0 if one.drains_until is None else one.drains_until - one.entered
        return max(self._config.drain_timeout, min(own, _LONGEST))

    def silent(self, model: str) -> tuple[NodeId, ...]:
        """Workers of the model that have an order and do not answer."""
        lives = {one.step.life for one in self.of(model) if one.silent and one.state not in ENDS}
        return tuple(sorted(life.node for life in lives if life is not None))

    def draining(self, now: Seconds, model: str) -> dict[NodeId, Seconds]:
        """Workers of the model whose own limit lets them drain for longer than the planner's, and
        for how long still."""
        return {
            one.step.life.node: max(0.0, one.entered + self.drain_limit(one) - now)
            for one in self.of(model)
            if one.state is S.DRAINING and one.step.life is not None
            if self.drain_limit(one) > self._config.drain_timeout
        }

    def _limit(self, one: Underway) -> Seconds:
        """Longest time in its state."""
        if one.action is Action.SWITCH and one.state is not S.ORDERED:
            return self._config.switch_timeout + _MARGIN
        if one.action is Action.STOP and one.state is S.DRAINING:
            return self.drain_limit(one) + _MARGIN
        return _MARGIN + (_UNDO if one.action is Action.UNDO else 0.0)

    # ------------------------------------------------------------------ states

    def _move(self, now: Seconds, one: Underway, event: ChangeEvent) -> None:
        before, one.state = one.state, next_state(one.action, one.state, event)
        if one.state is before:
            return
        one.entered, one.silent = now, ""
        one.resumed = event in (E.BACK, E.READY, E.WITHDRAWN) and one.action is Action.STOP
        if one.state in (S.BOOTING, S.JOINED) and one.booted is None:
            one.booted = now
        one.left = one.left or one.state in (S.LEAVING, S.PROVING)
        one.failure = one.failure or (event.value if one.state in ENDS - {S.DONE} else "")

    def _close(self, now: Seconds, one: Underway, wrong: NodeLife | None) -> Ended:
        del self._changes[one.id]
        if one.action is Action.START:
            self._start_over(now, one, wrong)
        elif one.action is Action.STOP and one.state is S.DONE and not one.adopted:
            self._times.add("drain", one.step.kind, now - one.began)
        elif one.state is S.GIVEN_UP and one.step.life and not one.resumed:
            later = {key: until for key, until in self._refused_until.items() if until > now}
            later[one.step.life, one.action] = now + self._config.switch_retry
            self._refused_until = later
        return Ended(one.record, one.model, one.state, now - one.began, wrong)

    def _start_over(self, now: Seconds, one: Underway, wrong: NodeLife | None) -> None:
        kind = one.step.kind
        if one.state is S.DONE:
            self._health.ready(kind)
            if not one.adopted:
                self._times.add("start", kind, now - one.began)
                self._times.add("boot", kind, now - (one.booted or one.began))
        elif wrong is not None:
            self._health.disable(kind, f"asked for {one.step.mode}, {wrong.node} came otherwise")
        elif one.state is S.FAILED and not one.blamed:
            self._health.failed(kind, now, one.failure)


def _isolated(seen: PlannerInput) -> bool:
    """True if nothing of the cluster is seen, neither a worker nor a router's demand."""
    return not seen.workers and not any(one.known for one in seen.demand.values())


def _is_down(kind: str, seen: PlannerInput) -> bool:
    """True if the kind's list cannot be trusted now."""
    if not seen.down:
        return False
    known = {one.name: one.actuator for one in seen.kinds}
    return known.get(kind, "") in seen.down or kind not in known


def _note_worker(now: Seconds, one: Underway, worker: Worker, refusal: Refusal | None) -> None:
    """Keeps what the worker says of its drain, and that it says nothing. Its first word on the time
    limit counts: a worker that repeats it for ever does not drain for ever."""
    if refusal is not None and one.state is S.ORDERED:
        one.silent = refusal.reason if refusal.silent else ""
    draining = one.action is Action.STOP and worker.state == "draining"
    if draining and worker.drain_left is not None and one.drains_until is None:
        one.drains_until = now + worker.drain_left


def _joined_event(one: Underway, worker: Worker) -> ChangeEvent:
    if one.step.mode and worker.mode and worker.mode != one.step.mode:
        return E.WRONG
    return E.LOADING if worker.state == "loading" else E.READY


def _stop_event(one: Underway, worker: Worker) -> ChangeEvent | None:
    if worker.state == "draining":
        return E.DRAINING if one.state is S.ORDERED else None
    return None if one.state is S.ORDERED else E.BACK


def _switch_event(one: Underway, worker: Worker) -> ChangeEvent | None:
    if worker.state == "draining":
        return E.DRAINING
    if worker.state == "ready":
        if worker.mode == one.step.mode:
            return E.READY
        one.failure = worker.failed or one.failure
        return E.BACK if one.left else None
    seen = {"leaving": E.LEAVING, "proving": E.PROVING}.get(worker.state)
    return None if one.state is S.PROVING or seen is _AT.get(one.state) else seen


_AT: Final = {S.LEAVING: E.LEAVING}


def _undo_event(one: Underway, worker: Worker) -> ChangeEvent | None:
    return E.READY if worker.state == "ready" else None


_EVENTS: Final = {
    Action.STOP: _stop_event,
    Action.SWITCH: _switch_event,
    Action.UNDO: _undo_event,
}


def _found(model: str, seen: PlannerInput) -> Iterator[tuple[Step, ChangeState, str]]:
    """What is under way by the lists: step, state, id."""
    tag, reason = model_tag(model), "found under way"
    ready = {one.change for one in seen.workers if one.change and one.state != "loading"}
    loading = {one.change for one in seen.workers if one.state == "loading"}
    for one in seen.instances:
        name = read_change_id(one.change)
        if name is None or name.tag != tag or one.change in ready:
            continue
        if one.state in ("pending", "booting", "running"):
            state = S.PENDING if one.state == "pending" else S.BOOTING
            state = S.JOINED if one.change in loading else state
            step = Step(action=Action.START, reason=reason, kind=one.kind, mode=name.mode)
            yield step, state, one.change
    for worker in seen.workers:
        if worker.model == model and (found := _found_worker(worker, reason)):
            yield *found, f"found-{worker.life}"


def _found_worker(worker: Worker, reason: str) -> tuple[Step, ChangeState] | None:
    if worker.state == "draining" and worker.ordered:
        stop = Step(action=Action.STOP, reason=reason, kind=worker.kind, life=worker.life)
        return stop, S.DRAINING
    if worker.state in ("leaving", "proving") and worker.target:
        mode, state = worker.target, S.LEAVING if worker.state == "leaving" else S.PROVING
        return Step(action=Action.SWITCH, reason=reason, mode=mode, life=worker.life), state
    return None
