"""Adds capacity: the cheapest lever that is enough, in a fixed order. Pure.

    undo     cancel a drain: the worker is there and warm
    switch   change a worker's mode: seconds
    start    the fewest new workers that are enough: minutes, and money

The first costs nothing, so it stays in force while later ones are tried. Each lever is judged by
what it would make of the load that is to be borne: more than what is expected. Where none is enough
for that, switches are judged by the load that is expected: what is best beyond a pool's limits need
not be best within them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from pdserve.planner.changes.book import Step
from pdserve.planner.changes.table import Action, ChangeState
from pdserve.planner.outlook import PoolCandidate, Slot
from pdserve.planner.pool import valid_mix
from pdserve.planner.rules.scene import STARTED_MODES, mix_of, slot_of
from pdserve.planner.rules.switches import Switch, keeps_room, switched, switches

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pdserve.planner.outlook import Load, PoolOutcome
    from pdserve.planner.pool import Worker
    from pdserve.planner.rules.scene import Scene

__all__ = ["Raised", "helpful_modes", "raise_capacity", "undo_steps"]

_TRIES: Final = 24
"""Most candidates with new workers that are judged at one tick; each is a replay."""
_ROW: Final = 4
"""Most switches that are judged as one."""
_BETTER: Final = 0.01
"""A lever that is not enough is used if it saves at least this share of the requests."""
_DROWNED: Final = 0.9
"""Share of missed requests from which shares tell pools apart no more: what waits already makes all
the others late."""
_SOONER: Final = 0.1
"""Part of the wait that each switch must save there."""
_DECODE: Final = frozenset(("decode", "decode_admission", "handoff"))
"""Causes of misses that prefill workers do not cure: decoding, and admission to it."""


class Raised(NamedTuple):
    """What is to be done, and what it makes of the load."""

    steps: tuple[Step, ...]
    after: PoolOutcome
    enough: bool
    """False: nothing that may be done keeps the objective."""
    wanted: int = 0
    """Starts that would be needed, those under way included."""


@dataclass(frozen=True, slots=True)
class _Try:
    """Steps so far, and the pool that they make."""

    steps: tuple[Step, ...]
    candidate: PoolCandidate
    outcome: PoolOutcome

    def and_then(self, step: Step, candidate: PoolCandidate, outcome: PoolOutcome) -> _Try:
        return _Try((*self.steps, step), candidate, outcome)


def helpful_modes(
    modes: tuple[str, ...], observed: Mapping[str, int], predicted: Mapping[str, float]
) -> tuple[str, ...]:
    """The modes whose workers can cure the misses: where most are missed for want of decoding, a
    prefill worker would only fill the queue before it."""
    total = sum(observed.values())
    causes: Mapping[str, float] = observed if total >= _BETTER_KNOWN else predicted
    decode = sum(share for cause, share in causes.items() if cause in _DECODE)
    if decode > 0.5 * sum(causes.values()):
        return tuple(mode for mode in modes if mode != "prefill")
    return modes


_BETTER_KNOWN: Final = 20
"""Misses that must have been seen before their causes count more than predicted ones."""


def raise_capacity(
    scene: Scene,
    load: Load,
    expected: Load,
    stay: PoolOutcome,
    horizon: float,
    *,
    switches_too: bool = True,
) -> Raised:
    """The first levers that are enough for `load`; if none are, those that help most.
    `switches_too`: False if switches need not be judged."""
    now = _undone(scene, load, _Try((), PoolCandidate(scene.base(horizon)), stay))
    if _fits(scene, now.outcome):
        return Raised(now.steps, now.outcome, enough=True)
    present = replace(now, outcome=scene.predict(expected, [now.candidate])[0])
    lacks = not _fits(scene, present.outcome)
    best = _switched(scene, expected, present) if lacks and switches_too else None
    # What is not enough for the expected load is not for more, either.
    switched = None
    if switches_too and (not lacks or (best is not None and _fits(scene, best.outcome))):
        switched = _switched(scene, load, now)
    if switched is not None and _fits(scene, switched.outcome):
        return Raised(switched.steps, switched.outcome, enough=True)
    started = _started(scene, load, now, horizon)
    helps = switched is not None and switched.outcome.miss < started.after.miss
    if best is None or started.enough or (started.wanted and not helps):
        return started
    return Raised(best.steps, best.outcome, enough=False, wanted=started.wanted)


def _fits(scene: Scene, outcome: PoolOutcome) -> bool:
    return outcome.miss <= scene.most_misses


# ---------------------------------------------------------------------- levers without cost


def undo_steps(scene: Scene, reason: str) -> Iterator[tuple[Step, Worker]]:
    """Cancels the drains that a planner has ordered and that are still going on."""
    undoing = {one.step.life for one in scene.changes if one.action is Action.UNDO}
    for one in scene.changes:
        life = one.step.life
        if one.action is not Action.STOP or one.state is ChangeState.STOPPING or life in undoing:
            continue
        worker = scene.pool.worker(life) if life is not None else None
        if worker is not None and not _ends_soon(scene, worker):
            yield Step(action=Action.UNDO, reason=reason, kind=worker.kind, life=life), worker


def _ends_soon(scene: Scene, worker: Worker) -> bool:
    """True if the worker drains because its time runs out: it cannot be kept."""
    return worker.hard_end is not None and worker.hard_end <= scene.start_p90


def _undone(scene: Scene, load: Load, now: _Try) -> _Try:
    for step, worker in undo_steps(scene, "the load needs it after all"):
        slots = (*now.candidate.slots, slot_of(worker))
        candidate = replace(now.candidate, slots=slots)
        now = now.and_then(step, candidate, scene.predict(load, [candidate])[0])
    return now


# ---------------------------------------------------------------------- switches


def _switched(scene: Scene, load: Load, now: _Try) -> _Try | None:
    """The first switch of the best row of switches in one direction, with what the whole row makes
    of the load; None: none may be done, or none helps.

    One worker is switched at a time. But where a mode lacks several, one more may help nothing that
    shows, because its queue still grows; so rows are judged, and each tick decides anew. While one
    switches, a row that is enough is waited for: nothing is bought in its place."""
    busy = scene.removing
    if busy is not None and busy.action is not Action.SWITCH:
        return None
    rows = [row for first in switches(scene, now.candidate) for row in _rows(scene, first)]
    outcomes = scene.predict(load, [row[-1].candidate for row in rows])
    best = _best_row(scene, now, rows, outcomes)
    if best is None or (busy is not None and not _fits(scene, outcomes[best])):
        return None
    row, outcome = rows[best], outcomes[best]
    if busy is not None:
        return _Try(now.steps, row[-1].candidate, outcome)
    return now.and_then(row[0].step(now.outcome, outcome), row[-1].candidate, outcome)


def _best_row(
    scene: Scene,
    now: _Try,
    rows: Sequence[tuple[Switch, ...]],
    outcomes: Sequence[PoolOutcome],
) -> int | None:
    """Of those that are enough the shortest; of others each further switch must help for itself.
    Where nearly all requests are late whatever is done, the row after which they are least late."""
    ranks: dict[int, tuple[float, float]] = {}
    for at, (row, outcome) in enumerate(zip(rows, outcomes, strict=True)):
        if not keeps_room(scene, row[-1], outcome):
            continue
        if outcome.miss <= now.outcome.miss - _BETTER * len(row):
            ranks[at] = max(outcome.miss, scene.target.allowed_miss) + _BETTER * len(row), 0.0
        elif _less_late(now.outcome, outcome, len(row)):
            ranks[at] = inf, outcome.wait_p95
    return min(ranks, key=lambda at: ranks[at], default=None)


def _less_late(now: PoolOutcome, then: PoolOutcome, switches: int) -> bool:
    """True if nearly all are late now, and `switches` make them a good deal less late."""
    return now.miss >= _DROWNED and then.wait_p95 < (1 - _SOONER) ** switches * now.wait_p95


def _rows(scene: Scene, first: Switch) -> Iterator[tuple[Switch, ...]]:
    """The switch, and with up to `_ROW` - 1 more of the same from and to."""
    row: tuple[Switch, ...] = (first,)
    yield row
    for worker in scene.switchable(first.worker.mode)[1:_ROW]:
        following = switched(row[-1].candidate, worker, first.mode)
        if following is None or not valid_mix(mix_of(following.slots)):
            return
        row = (*row, Switch(worker, first.mode, following))
        yield row


# ---------------------------------------------------------------------- starts


def _started(scene: Scene, load: Load, now: _Try, horizon: float) -> Raised:
    """The fewest new workers that are enough. Starts that are under way and not counted as
    capacity yet are taken off: waiting for them is no reason to ask for more."""
    observed = scene.demand.missed if scene.demand is not None else {}
    modes: tuple[str, ...] = tuple(mode for mode in STARTED_MODES if mode in scene.modes)
    if sum(observed.values()) >= _BETTER_KNOWN:
        modes = helpful_modes(modes, observed, {})
    uncounted = _uncounted(scene, horizon)
    kinds = scene.startable()
    most = len(kinds) + uncounted
    added, outcome = _fewest(scene, load, now, modes, most)
    steps = list(now.steps)
    for mode, kind in zip(added[uncounted:], kinds, strict=False):
        reason = f"{now.outcome.miss:.1%} would miss, {len(added)} more would do"
        steps.append(Step(action=Action.START, reason=reason, kind=kind, mode=mode))
    return Raised(tuple(steps), outcome, _fits(scene, outcome), len(added))


def _uncounted(scene: Scene, horizon: float) -> int:
    """Starts under way that nobody can say the end of, or that end after the horizon; those of a
    kind that waits for too long no longer count, so that another kind is tried."""
    return sum(
        (one.ready_in is None or one.ready_in > horizon) and one.kind not in scene.blocked
        for one in scene.pool.coming
    )


def _fewest(
    scene: Scene, load: Load, now: _Try, modes: tuple[str, ...], most: int
) -> tuple[list[str], PoolOutcome]:
    """Modes of the new workers, in the order in which they help, and what they make of the
    load."""
    if len(modes) == 1 and most > 0:
        return _fewest_alike(scene, load, now, modes[0], most)
    added: list[str] = []
    last, tries = now, 0
    enough, best = 0, now
    while modes and len(added) < most and not _fits(scene, last.outcome) and tries < _TRIES:
        # Each worker moves the bottleneck, so what helps next follows from what is missed now.
        useful = helpful_modes(modes, {}, last.outcome.causes) if added else modes
        tried = [_with(last.candidate, mode, 1) for mode in useful]
        outcomes = scene.predict(load, tried)
        at = _most_helpful(last.outcome, useful, outcomes)
        tries += len(useful)
        added.append(useful[at])
        last = _Try((), tried[at], outcomes[at])
        if last.outcome.miss < best.outcome.miss:
            enough, best = len(added), last
        elif len(added) - enough > len(modes):
            break  # where two modes are full, one more of each helps, but not one more of either
    return added[:enough], best.outcome


def _most_helpful(now: PoolOutcome, modes: Sequence[str], outcomes: Sequence[PoolOutcome]) -> int:
    """The mode whose new worker lets the fewest requests miss; of equal ones the fullest."""

    def rank(at: int) -> tuple[float, float]:
        return round(outcomes[at].miss, 2), -now.utilisation.get(modes[at], 0.0)

    return min(range(len(modes)), key=rank)


def _fewest_alike(
    scene: Scene, load: Load, now: _Try, mode: str, most: int
) -> tuple[list[str], PoolOutcome]:
    """With one mode the number is found by doubling and halving."""
    low, high, best = 0, 1, now.outcome
    while True:
        high = min(high, most)
        best = scene.predict(load, [_with(now.candidate, mode, high)])[0]
        if _fits(scene, best) or high == most:
            break
        low, high = high, 2 * high
    if not _fits(scene, best) and best.miss > now.outcome.miss - _BETTER:
        return [], now.outcome  # however many: it is not workers that are missing
    limit = scene.most_misses
    if not _fits(scene, best):
        # The last workers cure next to nothing: a point is what they must be worth.
        low, limit = 0, best.miss + _BETTER
    while high - low > 1:
        middle = (low + high) // 2
        outcome = scene.predict(load, [_with(now.candidate, mode, middle)])[0]
        if outcome.miss <= limit:
            high, best = middle, outcome
        else:
            low = middle
    return [mode] * high, best


def _with(base: PoolCandidate, mode: str, count: int) -> PoolCandidate:
    return replace(base, slots=(*base.slots, *(Slot(mode) for _ in range(count))))
