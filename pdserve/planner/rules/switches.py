"""Finds the mode switches that are worth their cost. Pure.

A switch takes a worker out of service for seconds, and a pool that switches to and fro serves
worse than one with a ratio that is a little wrong. So a worker keeps its mode for a while, the mode
that gives it away keeps room, the gain must pay, and taking back the last switch needs patience.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from pdserve.planner.changes.book import Step
from pdserve.planner.changes.table import Action
from pdserve.planner.outlook import PoolCandidate
from pdserve.planner.pool import last_of_its_job, valid_mix
from pdserve.planner.rules.scene import mix_of, slot_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.ids import Seconds
    from pdserve.planner.outlook import Load, PoolOutcome
    from pdserve.planner.pool import Worker
    from pdserve.planner.rules.scene import Scene

__all__ = [
    "BetterRatio",
    "FutileSwitches",
    "LastSwitch",
    "Switch",
    "keeps_room",
    "rebalance",
    "switched",
    "switches",
]


_FUTILE: Final = 2.5
"""Ticks for which it counts that no switch helped."""
_SAME_LOAD: Final = 0.1
"""Part by which a load may differ and count as the same."""


class Switch(NamedTuple):
    """One worker's change of mode, and the pool that it makes."""

    worker: Worker
    mode: str
    candidate: PoolCandidate

    def step(self, before: PoolOutcome, after: PoolOutcome) -> Step:
        """The change to begin."""
        reason = f"{after.miss:.1%} miss instead of {before.miss:.1%}"
        return Step(action=Action.SWITCH, reason=reason, mode=self.mode, life=self.worker.life)


def switches(scene: Scene, base: PoolCandidate, *, back: bool = False) -> list[Switch]:
    """Each switch of one worker that leaves every worker something to do. `back`: also those that
    would take the last one back too soon."""
    found = []
    for mode in sorted(mix_of(base.slots)):
        worker = next(iter(scene.switchable(mode)), None)
        for target in scene.modes if worker is not None else ():
            if worker is None or target == mode or (not back and (mode, target) == scene.reversal):
                continue
            candidate = switched(base, worker, target)
            if candidate is None or _waits_for_others(scene, base, mode, target):
                continue
            if valid_mix(mix_of(candidate.slots)):
                found.append(Switch(worker, target, candidate))
    return found


def _waits_for_others(scene: Scene, base: PoolCandidate, mode: str, target: str) -> bool:
    """True if those that would do this mode's job after the switch are only coming. The worker
    would refuse it, and until they are ready the pool would be smaller than it has to be."""
    if last_of_its_job(mix_of(base.slots), mode, target):
        return False
    return last_of_its_job(scene.pool.mix, mode, target)


def switched(base: PoolCandidate, worker: Worker, target: str) -> PoolCandidate | None:
    """The candidate with the worker in another mode; None: the worker is not part of it."""
    slots, slot = list(base.slots), slot_of(worker)
    if slot not in slots:
        return None
    slots[slots.index(slot)] = slot._replace(mode=target)
    return replace(base, slots=tuple(slots))


@dataclass(frozen=True, slots=True)
class BetterRatio:
    """A switch at the slow tick."""

    step: Step
    modes: tuple[str, str]
    """From and to."""
    before: PoolOutcome
    after: PoolOutcome


def rebalance(scene: Scene, load: Load, *, back: bool) -> BetterRatio | None:
    """The switch that lets the fewest requests miss, if it is worth its cost."""
    base = PoolCandidate(tuple(slot_of(one) for one in scene.pool.serving))
    found = switches(scene, base, back=back)
    if not found:
        return None
    before, *outcomes = scene.predict(load, [base, *(one.candidate for one in found)])
    best = min(range(len(found)), key=lambda at: outcomes[at].miss)
    switch, after = found[best], outcomes[best]
    if not _worth_it(scene, switch, before, after):
        return None
    modes = (switch.worker.mode, switch.mode)
    return BetterRatio(switch.step(before, after), modes, before, after)


def _worth_it(scene: Scene, switch: Switch, before: PoolOutcome, after: PoolOutcome) -> bool:
    """True if the switch gains at least twice the service that it costs: the requests that are kept
    over the stable period, against the worker's share of the pool while it is away."""
    gain = (before.miss - after.miss) * scene.config.stable
    cost = scene.drain_p90(switch.worker.kind) / max(1, len(scene.pool.serving))
    return keeps_room(scene, switch, after) and gain > 0 and gain >= 2 * cost


def keeps_room(scene: Scene, switch: Switch, after: PoolOutcome) -> bool:
    """True if the mode that gives the worker away is not full afterwards."""
    busy = after.utilisation.get(switch.worker.mode, 0.0)
    return busy <= 1 - scene.config.donor_headroom


class FutileSwitches:
    """Remembers that no switch helped. To judge them all takes most of a tick's time, so while the
    pool and the load stay as they are they are judged at every third tick only."""

    def __init__(self) -> None:
        self._until: Seconds = -inf
        self._mix: Mapping[str, int] = {}
        self._work = 0.0

    def found(self, scene: Scene, load: Load) -> None:
        """No switch helps now."""
        self._until = scene.now + _FUTILE * scene.config.tick
        self._mix, self._work = dict(scene.pool.mix), load.work

    def hold(self, scene: Scene, load: Load) -> bool:
        """True if none need be judged."""
        same = scene.pool.mix == self._mix and _alike(load.work, self._work)
        return same and scene.now < self._until


def _alike(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME_LOAD * max(one, other)


class LastSwitch:
    """The model's last switch, and how often its reversal was wanted since."""

    def __init__(self, stable: Seconds, ticks: int, gain: float) -> None:
        self._stable = stable
        self._ticks = ticks
        self._gain = gain
        self._modes: tuple[str, str] | None = None
        self._at: Seconds = 0.0
        self._wanted = 0

    def did(self, now: Seconds, modes: tuple[str, str]) -> None:
        """A switch was ordered."""
        self._modes, self._at, self._wanted = modes, now, 0

    def forbidden(self, now: Seconds) -> tuple[str, str] | None:
        """Modes, from and to, of a switch that would take it back too soon."""
        if self._modes is None or now - self._at >= self._stable:
            return None
        return (self._modes[1], self._modes[0])

    def allows(self, now: Seconds, found: BetterRatio | None) -> bool:
        """At a slow tick: True if this switch may be done. One back needs an advantage at several
        slow ticks in a row."""
        if found is None or found.modes != self.forbidden(now):
            self._wanted = 0
            return True
        better = found.after.miss <= (1 - self._gain) * found.before.miss
        self._wanted = self._wanted + 1 if better else 0
        return self._wanted >= self._ticks
