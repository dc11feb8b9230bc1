"""Changes that do not depend on the load: floors, workers that end, and pins. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from pdserve.planner.changes.book import Step
from pdserve.planner.changes.table import Action
from pdserve.planner.levers import undo_steps
from pdserve.planner.pool import last_of_its_job, serves, valid_mix
from pdserve.planner.rules.scene import STARTED_MODES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from pdserve.ids import NodeLife
    from pdserve.planner.pool import Mix, Worker
    from pdserve.planner.rules.scene import Scene

__all__ = [
    "ending_soon",
    "lacking",
    "last_of_its_job",
    "pin_steps",
    "required_starts",
    "required_undos",
    "start_steps",
    "unpinned_undos",
    "wrong_stops",
]


def ending_soon(scene: Scene) -> list[Worker]:
    """Workers that are ended from outside before a successor that is started later could take
    over: a start-up, a drain and some slack from now."""
    config = scene.config
    return [
        one
        for one in scene.pool.in_state("ready", "leaving", "proving")
        if one.hard_end is not None
        and one.hard_end <= scene.start_p90 + scene.drain_p90(one.kind) + config.lease_slack
    ]


def required_undos(scene: Scene) -> list[Step]:
    """Drains that are taken back because too few workers are left without them: those workers are
    there at once, and a start takes minutes."""
    present = len(scene.pool.in_state("ready", "leaving", "proving")) + len(_undone(scene))
    present -= len(scene.told_to_stop)
    reason = f"min and floors ask for {scene.floor}"
    found = [step for step, _ in undo_steps(scene, reason)]
    return found[: max(0, scene.floor - present)]


def unpinned_undos(scene: Scene) -> list[Step]:
    """Drains that are taken back because only a pin asked for them, and none holds any more: no
    rule has judged that the load can do without those workers. Never beyond `max`: the pin may have
    started others."""
    pinned = {one.step.life for one in scene.changes if one.step.pinned}
    room = scene.target.max - scene.pool.size - len(_undone(scene))
    found = []
    for step, worker in undo_steps(scene, "the pin that asked for it is over"):
        away = worker.state == "draining"
        if step.life in pinned and (room > 0 or not away):
            room -= away
            found.append(step)
    return found


def lacking(scene: Scene) -> int:
    """Workers fewer than the floor, with those that are coming; below 0: more."""
    return scene.floor - (scene.pool.size + len(_undone(scene)))


def _undone(scene: Scene) -> list[Worker]:
    """Workers that drain and have been told to serve again."""
    undone = {one.step.life for one in scene.changes if one.action is Action.UNDO}
    return [one for one in scene.pool.in_state("draining") if one.life in undone]


def required_starts(scene: Scene, succeeded: Collection[NodeLife] = ()) -> list[Step]:
    """Starts that bring the pool to its floor, and give each worker that ends a successor,
    whatever the load. `succeeded`: workers whose successor was ordered before."""
    ending = ending_soon(scene)
    new = [one for one in ending if one.life not in succeeded]
    present = scene.pool.in_state("ready", "leaving", "proving")
    coming = scene.pool.size - len(present)
    to_floor = lacking(scene) + len(ending)
    # A start under way is a successor, too, unless it is that of a worker of before.
    unsucceeded = len(new) - max(0, coming - (len(ending) - len(new)))
    reason = f"min and floors ask for {scene.floor}"
    if ending:
        reason = f"{', '.join(one.node for one in ending)} will be ended from outside"
    count = max(0, to_floor, unsucceeded)
    modes = _wanted_modes(scene, [one.mode for one in new], count)
    return start_steps(scene, modes, reason, replacing=len(ending))


def _wanted_modes(scene: Scene, first: list[str], count: int) -> list[str]:
    """Modes of so many new workers: those of the workers that end, then such that each has
    something to do."""
    mix = Counter(scene.pool.mix) + Counter(one.mode for one in scene.pool.coming)
    wanted = first[:count]
    mix.update(wanted)
    while len(wanted) < count:
        wanted.append(_useful_mode(scene, mix))
        mix[wanted[-1]] += 1
    return wanted


def _useful_mode(scene: Scene, mix: Mapping[str, int]) -> str:
    """A mode that makes a pool in which every worker has something to do, or else one that takes
    requests."""
    allowed = [mode for mode in STARTED_MODES if mode in scene.modes]
    for mode in allowed:
        if valid_mix({**mix, mode: mix.get(mode, 0) + 1}):
            return mode
    return next((mode for mode in allowed if mode != "prefill"), "aggregated")


def start_steps(
    scene: Scene, modes: Iterable[str], reason: str, *, replacing: int = 0
) -> list[Step]:
    """Starts in these modes, as many as there is room for."""
    kinds = scene.startable(replacing=replacing)
    return [
        Step(
            action=Action.START,
            reason=reason,
            kind=kind,
            mode=mode if mode in STARTED_MODES else "aggregated",
        )
        for mode, kind in zip(modes, kinds, strict=False)
    ]


def wrong_stops(scene: Scene, wrong: Iterable[NodeLife]) -> list[Step]:
    """The drain of a worker that came in a mode that was not asked for, one at a time. Where fewer
    than the floor would be left, it serves until there are others."""
    if scene.removing is not None or len(scene.pool.serving) - 1 < scene.floor:
        return []
    for life in wrong:
        worker = scene.pool.worker(life)
        if worker is None or not scene.book.may_order(scene.now, Action.STOP, life):
            continue
        if worker.state == "ready":
            reason = f"it came as {worker.mode}, which was not asked for"
            return [Step(action=Action.STOP, reason=reason, kind=worker.kind, life=life)]
    return []


def pin_steps(scene: Scene, pin: Mapping[str, int]) -> list[Step]:
    """What brings the pool to the workers that an operator has fixed: drains that are taken back,
    then switches, then starts, and stops of what is too much, one at a time."""
    present = _pin_present(scene)
    missing, surplus = _difference(pin, present), _difference(present, pin)
    reason = "an operator has pinned the pool"
    if undos := _pin_undos(scene, missing, reason):
        return undos
    switch = _pin_switch(scene, missing, surplus, reason)
    if switch is not None and scene.removing is None:
        return [switch]
    # What a switch will bring once it may begin is not started: it would be one too many. While a
    # worker leaves, the others may be needed, and are free to switch when it is back.
    waits = switch is not None or scene.removing is not None
    coming = _switchable(scene, surplus) if waits else 0
    steps = start_steps(scene, list(missing.elements())[coming:], reason)
    spare = len(scene.pool.serving) > min(scene.floor, sum(pin.values()))
    if not steps and not missing and spare and scene.removing is None:
        # What is only coming is no reason to fall below the floor.
        steps = _pin_removal(scene, pin, surplus, reason)
    return steps


def _pin_present(scene: Scene) -> Counter[str]:
    """Workers by mode once all that is under way has happened."""
    present = Counter(scene.pool.mix)
    present.update(one.mode for one in scene.pool.coming)
    present.update(one.mode for one in _undone(scene))
    present.subtract(one.mode for one in scene.told_to_stop)
    return +present


def _pin_undos(scene: Scene, missing: Mix, reason: str) -> list[Step]:
    """Drains of workers that lack: they are there at once, and nothing has to be started."""
    left, found = Counter(missing), []
    for step, worker in undo_steps(scene, reason):
        if left[worker.mode] > 0:
            left[worker.mode] -= 1
            found.append(step)
    return found


def _pin_removal(scene: Scene, pin: Mapping[str, int], surplus: Mix, reason: str) -> list[Step]:
    """The next stop. Of the last prefill and the last decode worker neither stops while the other
    one needs it, so one of them does first what the pin wants."""
    needed = [one for one in surplus if _is_needed(scene.pool.mix, one)]
    free = {mode: count for mode, count in surplus.items() if mode not in needed}
    if steps := list(_pin_stops(scene, free, reason)):
        return steps[:1]
    switch = _pin_switch(scene, Counter(pin), surplus, reason) if needed else None
    return list(_pin_stops(scene, surplus, reason))[:1] if switch is None else [switch]


def _difference(one: Mapping[str, int], other: Mapping[str, int]) -> Counter[str]:
    return Counter(dict(one)) - Counter(dict(other))


def _pin_switch(scene: Scene, missing: Mix, surplus: Mix, reason: str) -> Step | None:
    for target in sorted(missing):
        for mode in sorted(surplus):
            for one in _switchable_in(scene, mode) if mode != target else ():
                last = last_of_its_job(scene.pool.mix, mode, target)
                return Step(
                    action=Action.SWITCH, reason=reason, mode=target, life=one.life, last=last
                )
    return None


_FOR: Final[Mapping[str, str]] = {"decode": "prefill", "prefill": "decode", "both": "decode"}
"""The mode of the workers that it is done for."""


def _is_needed(mix: Mix, mode: str) -> bool:
    """True if a worker of this mode refuses to stop, because others could not work without it."""
    return last_of_its_job(mix, mode, "") and mix.get(_FOR[mode], 0) > 0


def _switchable_in(scene: Scene, mode: str) -> list[Worker]:
    """Workers of a mode that can change it now, and did not refuse to of late."""
    return [one for one in _switchable_later(scene, mode) if _may_leave(scene, one)]


def _switchable_later(scene: Scene, mode: str) -> list[Worker]:
    """Workers of a mode that can change it once the others take requests without them."""
    return [
        one
        for one in scene.pool.serving
        if one.mode == mode
        and one.can_switch
        and not one.pinned
        and scene.book.may_order(scene.now, Action.SWITCH, one.life)
    ]


def _switchable(scene: Scene, surplus: Mix) -> int:
    """Workers too many in their modes that could change them."""
    return sum(min(many, len(_switchable_later(scene, mode))) for mode, many in surplus.items())


def _pin_stops(scene: Scene, surplus: Mix, reason: str) -> Iterator[Step]:
    for one in sorted(scene.pool.serving, key=lambda one: (one.live_tokens, one.life)):
        refused = not scene.book.may_order(scene.now, Action.STOP, one.life)
        if surplus.get(one.mode, 0) > 0 and _may_leave(scene, one) and not refused:
            kind, life = one.kind, one.life
            yield Step(action=Action.STOP, reason=reason, kind=kind, life=life, pinned=True)


def _may_leave(scene: Scene, worker: Worker) -> bool:
    """True if the others that are ready take requests without it: what is only coming does not."""
    mix = Counter(one.mode for one in scene.pool.serving if one.life != worker.life)
    return not worker.pinned and serves(mix)
