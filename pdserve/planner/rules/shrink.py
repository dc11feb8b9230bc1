"""Removes workers that are not needed, at the slow tick. Pure.

A smaller mix that keeps the objective is looked for around the present one, under the highest load
of the last minutes and under the forecast beyond the next start-up. Then one worker is removed on
the way to it, and the same is asked of those that remain, so that several may go at once. What is
judged is what the others would have to do afterwards, so that a removal is no reason for the next
start.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Final, NamedTuple

from pdserve.planner.changes.book import Step
from pdserve.planner.changes.table import Action, ChangeState
from pdserve.planner.explain import Binding
from pdserve.planner.outlook import PoolCandidate, Slot
from pdserve.planner.pool import last_of_its_job, serves, valid_mix
from pdserve.planner.rules.obligations import ending_soon
from pdserve.planner.rules.scene import mix_of, slot_of
from pdserve.planner.rules.switches import switched

if TYPE_CHECKING:
    from pdserve.ids import NodeLife, Seconds
    from pdserve.planner.changes.book import Underway
    from pdserve.planner.outlook import Load, PoolOutcome
    from pdserve.planner.pool import Mix, Worker
    from pdserve.planner.rules.scene import Scene

__all__ = [
    "Loads",
    "Shrunk",
    "removable",
    "shrink",
    "staying",
    "surplus_start",
    "victims",
]

_AROUND: Final = 2
"""Workers of each mode by which a mix may differ from the present one."""
_TRIES: Final = 12
"""Most mixes that are judged for one removal; each is a replay."""
_AT_ONCE: Final = 8
"""Most workers that are removed at one slow tick, and never more than half of them: each takes
some replays to judge, and what was judged wrong leaves the other half."""


class Loads(NamedTuple):
    """What a smaller pool must bear."""

    peak: Load
    """The highest of the last minutes."""
    ahead: Load
    """The highest forecast until a new worker could serve again, and beyond."""
    quiet: Seconds
    """How far ahead `ahead` looks."""
    workers: int
    """Workers that hold the cache now."""
    least: int = 0
    """Fewer workers were not enough of late, for such a load."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """Steps that may be made at once, or what forbids them."""

    steps: tuple[Step, ...] = ()
    binding: Binding | None = None
    after: PoolOutcome | None = None
    target: Mix | None = None
    """The mix that is wanted in the end; None: the present one."""


def staying(scene: Scene) -> list[Worker]:
    """Workers that serve, and are not about to be ended from outside."""
    ending = {one.life for one in ending_soon(scene)}
    return [one for one in scene.pool.serving if one.life not in ending]


def removable(scene: Scene, worker: Worker) -> str:
    """Why the worker must stay; empty: it may go."""
    if why := scene.tenure.may_remove(scene.now, worker):
        return why
    if not scene.book.may_order(scene.now, Action.STOP, worker.life):
        return f"{worker.node} has refused to stop"
    if len(staying(scene)) - 1 < scene.floor:
        return f"at least {scene.floor} workers must serve"
    return ""


def victims(scene: Scene, mode: str) -> list[Worker]:
    """Workers of a mode that may be removed, the one whose loss costs least first."""
    found = [one for one in staying(scene) if one.mode == mode and not removable(scene, one)]
    return sorted(found, key=lambda one: (_loss(scene, one), -_price(scene, one), one.life))


def _loss(scene: Scene, worker: Worker) -> float:
    """Tokens that are computed again when a worker goes: the part of its cache that no other worker
    has. Its streams' KV moves. A lease that ends soon makes it cheaper."""
    again = worker.hot_tokens + _MOVED * worker.live_tokens
    if worker.hard_end is None:
        return again
    return again * min(1.0, worker.hard_end / scene.config.hold)


_MOVED: Final = 0.1
"""Cost of moving a token's KV, as a part of computing it."""


def _price(scene: Scene, worker: Worker) -> float:
    return scene.pool.price(worker.kind)


# ---------------------------------------------------------------------- the wanted mix


def shrink(scene: Scene, loads: Loads) -> Shrunk:
    """The removals that leave a mix which keeps the objective; or one change of a mode that must
    come before a removal; or what forbids both."""
    if not scene.kinds:
        return Shrunk(binding=_no_victim(scene))  # what goes could not come back with the load
    found = _one_less(scene, loads)
    steps, most = found.steps, min(_AT_ONCE, (len(staying(scene)) + 1) // 2)
    while len(steps) < most and (life := _stopped(steps)) is not None:
        scene = _without(scene, life)
        further = _one_less(scene, loads)
        if _stopped(further.steps) is None:
            break
        found, steps = further, (*steps, *further.steps)
    return replace(found, steps=steps)


def _stopped(steps: tuple[Step, ...]) -> NodeLife | None:
    """The worker that the last step stops; None: it stops none."""
    return steps[-1].life if steps and steps[-1].action is Action.STOP else None


def _without(scene: Scene, life: NodeLife) -> Scene:
    """The same with one worker less."""
    rest = tuple(one for one in scene.pool.workers if one.life != life)
    return replace(scene, pool=replace(scene.pool, workers=rest))


def _one_less(scene: Scene, loads: Loads) -> Shrunk:
    """The step towards the smallest mix that keeps the objective, if a step may be made."""
    base = PoolCandidate(tuple(slot_of(one) for one in staying(scene)))
    present = mix_of(base.slots)
    tightest: Binding | None = None
    failed: list[Mix] = []
    for mix in _smaller(scene, present, loads.least):
        first = _first_step(scene, loads, base, mix)
        if first is None or any(_within(mix, larger) for larger in failed):
            continue
        candidate = _candidate(scene, mix, present)
        _, why = judged(scene, loads, candidate, sum(mix.values()))
        if why is None:
            step, after = first
            outcome, why = judged(scene, loads, after, len(after.slots))
            return Shrunk((step,) if why is None else (), why, outcome, target=mix)
        tightest = tightest or why
        failed.append(mix)
    return Shrunk(binding=tightest or _no_victim(scene))


def _within(mix: Mix, larger: Mix) -> bool:
    """True if the mix has no worker more than the larger one of any mode."""
    return all(count <= larger.get(mode, 0) for mode, count in mix.items())


def _no_victim(scene: Scene) -> Binding:
    """What keeps every worker."""
    reasons = [why for one in staying(scene) if (why := removable(scene, one))]
    size, floor = len(staying(scene)), scene.floor
    if size - 1 < floor:
        return Binding("floor", {"floor": floor, "workers": size})
    if not scene.kinds:
        return Binding("actuator", {"reason": scene.no_kind})
    mix = mix_of(slot_of(one) for one in staying(scene))
    if not reasons and not _smaller(scene, mix, 0):
        return Binding("paired", {"modes": " and ".join(sorted(mix))})
    return Binding("operator", {"reason": reasons[0] if reasons else "no worker may be removed"})


def _smaller(scene: Scene, present: Mix, least: int) -> list[Mix]:
    """Mixes with fewer workers around the present one, the smallest change first: what one removal
    cannot do, two will not. `least`: fewest workers, besides the floor. Where there is none in
    which every worker has something to do, as among many decode workers whose prefill workers have
    died, any that serves will do."""
    modes = sorted({*scene.modes, *present})
    size = sum(present.values())
    found: list[tuple[int, int, Mix]] = []
    idle: list[tuple[int, int, Mix]] = []
    for delta in product(range(-_AROUND, _AROUND + 1), repeat=len(modes)):
        mix = {mode: present.get(mode, 0) + by for mode, by in zip(modes, delta, strict=True)}
        total, moved = sum(mix.values()), sum(abs(by) for by in delta)
        if min(mix.values()) < 0 or not size - _AROUND <= total < size:
            continue
        kept = {mode: count for mode, count in mix.items() if count}
        if total >= max(1, scene.floor, least) and serves(kept):
            (found if valid_mix(kept) else idle).append((moved, total, kept))
    if not found and not valid_mix(present):
        found = idle
    return [mix for _, _, mix in sorted(found, key=lambda one: (*one[:2], sorted(one[2].items())))][
        :_TRIES
    ]


def _first_step(
    scene: Scene, loads: Loads, base: PoolCandidate, mix: Mix
) -> tuple[Step, PoolCandidate] | None:
    """The first change on the way to the mix, and the pool that it makes; None: none may be done.

    It must keep the objective before any other change follows, and leave each worker something to
    do: of the last prefill and the last decode worker neither may go. So one of them changes to a
    mode of the mix first, and the other is not needed any more."""
    present = mix_of(base.slots)
    work, fewer = max(loads.peak.work, loads.ahead.work), len(base.slots) - 1
    reason = f"{fewer} are enough for {work:.2f} work/s, for {loads.quiet:.0f} s ahead"
    worker = _first_removed(scene, mix, present)
    if worker is not None:
        slots = list(base.slots)
        slots.remove(slot_of(worker))
        step = Step(action=Action.STOP, reason=reason, kind=worker.kind, life=worker.life)
        return step, PoolCandidate(tuple(slots))
    for donor, target in product(sorted(present), sorted(mix)):
        given, taken = mix.get(donor, 0) < present[donor], mix[target] > present.get(target, 0)
        if not (given and taken) or (donor, target) == scene.reversal:
            continue
        for one in scene.switchable(donor):
            after = switched(base, one, target)
            if after is not None and serves(mix_of(after.slots)):
                last = last_of_its_job(present, donor, target)
                return Step(
                    action=Action.SWITCH, reason=reason, mode=target, life=one.life, last=last
                ), after
    return None


def _first_removed(scene: Scene, mix: Mix, present: Mix) -> Worker | None:
    """The worker that goes first on the way to the mix; None: none may go."""
    for mode in sorted(present, key=lambda mode: mix.get(mode, 0) - present[mode]):
        if mix.get(mode, 0) >= present[mode]:
            continue
        rest = {one: count - (one == mode) for one, count in present.items()}
        busy = valid_mix(rest) or (serves(rest) and not valid_mix(present))
        if busy and (found := victims(scene, mode)):
            return found[0]
    return None


def _candidate(scene: Scene, mix: Mix, present: Mix) -> PoolCandidate:
    """The pool that a mix makes of the present workers, the ones with the greatest loss kept."""
    kept, spare = [], []
    for mode in present:
        workers = [one for one in staying(scene) if one.mode == mode]
        order = sorted(workers, key=lambda one: (-_loss(scene, one), one.life))
        kept += [slot_of(one) for one in order[: mix.get(mode, 0)]]
        spare += [slot_of(one) for one in order[mix.get(mode, 0) :]]
    for mode, count in mix.items():
        for _ in range(count - present.get(mode, 0)):
            kept.append(spare.pop()._replace(mode=mode))
    return PoolCandidate(tuple(kept))


def judged(
    scene: Scene, loads: Loads, candidate: PoolCandidate, size: int
) -> tuple[PoolOutcome, Binding | None]:
    """The outcome under the higher of both loads, and which limit it breaks. The cache of fewer
    workers holds less of the prompts."""
    higher = loads.ahead.work > loads.peak.work
    name, load = ("ahead", loads.ahead) if higher else ("peak", loads.peak)
    kept = min(1.0, size / max(1, loads.workers))
    outcome = scene.predict(load._replace(cached=kept), [candidate])[0]
    return outcome, _breaks(scene, outcome, load, name, size)


def _breaks(scene: Scene, outcome: PoolOutcome, load: Load, name: str, size: int) -> Binding | None:
    """The limit that a smaller pool would break; None: it keeps all with room to spare."""
    target, config = scene.target, scene.config
    figures: dict[str, float | str] = {"workers": size, "work": load.work, "load": name}
    if target.ttft is not None and outcome.wait_p95 > config.remove_ttft:
        return Binding("ttft", {**figures, "value": outcome.wait_p95, "limit": config.remove_ttft})
    if target.itl is not None and outcome.itl_p95 > config.remove_itl * target.itl:
        limit = config.remove_itl * target.itl
        return Binding("itl", {**figures, "value": outcome.itl_p95, "limit": limit})
    busy, room = max(outcome.utilisation.values(), default=0.0), 1 - config.donor_headroom
    if outcome.unreachable > target.allowed_miss and busy > room:
        # Requests whose prompts are too long for the objective are in no other figure.
        return Binding("busy", {**figures, "value": busy, "limit": room})
    if outcome.miss > target.allowed_miss:
        return Binding("miss", {**figures, "value": outcome.miss, "limit": target.allowed_miss})
    return None


# ---------------------------------------------------------------------- what is not there yet


def surplus_start(scene: Scene, loads: Loads) -> Underway | None:
    """A start that nobody runs yet and that is no longer needed, the newest first."""
    waiting = [one for one in scene.starts() if one.state in _NOT_RUN]
    if not waiting or scene.pool.size - 1 < scene.floor:
        return None
    slots = [slot_of(one) for one in staying(scene)]
    slots += [Slot(one.mode) for one in scene.pool.coming if one.state not in _NOT_RUN_NAMES]
    _, why = judged(scene, loads, PoolCandidate(tuple(slots)), len(slots))
    return waiting[-1] if why is None else None


_NOT_RUN: Final = (ChangeState.ASKED, ChangeState.PENDING)
_NOT_RUN_NAMES: Final = frozenset(state.value for state in _NOT_RUN)
