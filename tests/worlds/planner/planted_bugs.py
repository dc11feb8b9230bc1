"""Bugs planted into planners and what obeys them, each with the world that reveals it.

Those of `UNSEEN` are shown by no world, each for a reason. Planners tune no knobs of workers that
serve, so there is no bug of a knob that does not expire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from pdserve.engine_core.core import EngineCore
from pdserve.planner import levers
from pdserve.planner import pool as pools
from pdserve.planner.changes.book import ChangeBook
from pdserve.planner.explain import Binding
from pdserve.planner.outlook import PoolCandidate
from pdserve.planner.rules import model_planner, obligations, sanity, shrink
from pdserve.planner.rules.sanity import Sanity, Sight
from pdserve.planner.rules.scene import Scene, slot_of
from pdserve.worker.mode.switch import ModeSwitch
from tests.worlds.faults import Fault
from tests.worlds.planner.plans import planned

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from pdserve.messages.handoff import WorkerMode
    from tests.worlds.faulty_engine import FaultyEngine
    from tests.worlds.run import WorldPlan

    Patch = pytest.MonkeyPatch

__all__ = ["PLANNER_BUGS", "UNSEEN", "PlannerBug"]

THREE: Final[tuple[WorkerMode, ...]] = ("aggregated", "aggregated", "aggregated")


def load(at: float, lasts: float, factor: float) -> Fault:
    """More load for a while."""
    return Fault("load", at, lasts, "f0", "", factor)


LEARN: Final = load(1.0, 12.0, 4.0)
"""So that routers learn soon what a prompt costs."""


@dataclass(frozen=True, slots=True)
class PlannerBug:
    """One rule that is taken out, and the world in which it is missed."""

    plant: Callable[[Patch], None]
    world: Callable[[int], WorldPlan]


# ---------------------------------------------------------------------- bugs


def _pending_counts(patch: Patch) -> None:
    patch.setattr(pools, "_until_ready", lambda one, boot: boot)


def _all_stay(patch: Patch) -> None:
    judged = shrink.judged

    def with_all(scene: Any, loads: Any, candidate: Any, size: int) -> Any:
        all_of_them = PoolCandidate(tuple(slot_of(one) for one in scene.pool.serving))
        return judged(scene, loads, all_of_them, size)

    patch.setattr(shrink, "judged", with_all)


def _missing_is_zero(patch: Patch) -> None:
    patch.setattr(Sanity, "look", lambda self, now, pool, demand: Sight())


def _zero_is_missing(patch: Patch) -> None:
    blindness = sanity.blindness

    def never_zero(config: Any, demand: Any) -> str:
        nothing = demand is not None and demand.peak_300 <= 0
        return blindness(config, demand) or ("no request has come" if nothing else "")

    patch.setattr(sanity, "blindness", never_zero)


def _no_veto(patch: Patch) -> None:
    patch.setattr(ModeSwitch, "needed", lambda self: "")


def _drains_go_on(patch: Patch) -> None:
    patch.setattr(levers, "undo_steps", lambda scene, reason: iter(()))
    patch.setattr(model_planner, "undo_steps", lambda scene, reason: iter(()))


def _dearest_first(patch: Patch) -> None:
    loss = shrink._loss
    patch.setattr(shrink, "_loss", lambda scene, worker: -loss(scene, worker))


def _no_successor(patch: Patch) -> None:
    patch.setattr(obligations, "ending_soon", lambda scene: [])


def _budget_is_endless(patch: Patch) -> None:
    patch.setattr(pools.Pool, "cost", property(lambda self: 0.0))


def _all_at_once(patch: Patch) -> None:
    patch.setattr(Scene, "removing", property(lambda self: None))
    patch.setattr(model_planner.ModelPlanner, "_held", lambda self, scene, sight: None)
    patch.setattr(model_planner.ModelPlanner, "_cooling", lambda self, now, demand: None)


def _never_late(patch: Patch) -> None:
    patch.setattr(ChangeBook, "_late", lambda self, now, one: "")


def _floor_is_one(patch: Patch) -> None:
    patch.setattr(Scene, "floor", property(lambda self: 1))


def _wrong_limit(patch: Patch) -> None:
    def always_max(scene: Scene, after: object) -> Binding:
        return Binding("max", {"max": scene.target.max, "workers": scene.pool.size})

    patch.setattr(model_planner, "why_not_more", always_max)


def _cache_is_lost(patch: Patch) -> None:
    flip = ModeSwitch._flip

    def cleared(self: ModeSwitch, *wanted: Any) -> Any:
        core = cast("FaultyEngine", self._service.engine).core
        assert isinstance(core, EngineCore)
        core.pool.clear()
        return flip(self, *wanted)

    patch.setattr(ModeSwitch, "_flip", cleared)


# ---------------------------------------------------------------------- worlds


def _stuck(seed: int) -> WorldPlan:
    """Jobs are pending for ever, and machines have room."""
    faults = [LEARN, Fault("stuck-pending", 1.0, 60.0, "p0"), load(20.0, 40.0, 6.0)]
    return planned(seed, faults, until=62.0, batch=3, kinds=("batch", "gpu"))


def _busy(seed: int) -> WorldPlan:
    """Three workers have enough to do."""
    faults = [load(1.0, 60.0, 4.0)]
    return planned(seed, faults, until=62.0, workers=THREE, max=3)


def _silent(seed: int) -> WorldPlan:
    """The planner does not hear the router, for longer than a removal waits."""
    return planned(seed, [LEARN, Fault("cut", 14.0, 30.0, "p0", "r0")], until=46.0, workers=THREE)


def _quiet(seed: int) -> WorldPlan:
    return planned(seed, [LEARN], until=30.0, workers=THREE)


def _rising(seed: int) -> WorldPlan:
    """Workers are started, and removed again."""
    return planned(seed, [LEARN, load(20.0, 20.0, 8.0)], until=60.0, machines=2)


def _returning(seed: int) -> WorldPlan:
    """The load returns while a worker drains."""
    crowd = Fault("crowd-at-drain", 5.0, 60.0, "f0", "", 50.0)
    return planned(seed, [LEARN, crowd], until=70.0, workers=THREE)


def _alone(seed: int) -> WorldPlan:
    """All other workers die while one drains, and the planner with them."""
    deaths = [
        Fault("others-die-at-drain", 5.0, 60.0, "p0", "", 9.0),
        Fault("planner-dies-draining", 5.0, 60.0, "p0", "", 9.0),
    ]
    return planned(seed, [LEARN, *deaths], until=70.0, workers=THREE)


def _limited(seed: int) -> WorldPlan:
    """Jobs have a time limit."""
    lease = Fault("lease", 0.0, 60.0, "p0", "", 18.0)
    return planned(seed, [LEARN, lease], until=62.0, machines=0, batch=4, min=2)


def _dear(seed: int) -> WorldPlan:
    faults = [LEARN, load(20.0, 20.0, 10.0)]
    return planned(seed, faults, until=50.0, machines=2, budget=3.0)


def _stillborn(seed: int) -> WorldPlan:
    """What is started is never ready."""
    faults = [LEARN, Fault("launch-never-ready", 1.0, 40.0, "a0"), load(15.0, 20.0, 8.0)]
    return planned(seed, faults, until=50.0)


def _floored(seed: int) -> WorldPlan:
    return planned(seed, [LEARN], until=30.0, workers=THREE, min=3, max=4)


def _switched(seed: int) -> WorldPlan:
    """An operator pins other modes."""
    modes: tuple[WorkerMode, ...] = ("aggregated", "decode", "prefill")
    pinned = Fault("pinned", 16.0, 20.0, "p0", "", 1.0)
    return planned(seed, [LEARN, pinned], until=40.0, workers=THREE, machines=0, modes=modes)


PLANNER_BUGS: Final[dict[str, PlannerBug]] = {
    "pending counts as serving": PlannerBug(_pending_counts, _stuck),
    "a removal is judged as if nobody went": PlannerBug(_all_stay, _busy),
    "missing demand is read as zero": PlannerBug(_missing_is_zero, _silent),
    "zero demand is read as missing": PlannerBug(_zero_is_missing, _quiet),
    "the veto is gone": PlannerBug(_no_veto, _alone),
    "a drain is not taken back": PlannerBug(_drains_go_on, _returning),
    "the worker with the hot prefix goes": PlannerBug(_dearest_first, _rising),
    "the end of a lease is ignored": PlannerBug(_no_successor, _limited),
    "the budget is endless": PlannerBug(_budget_is_endless, _dear),
    "two workers go at a time": PlannerBug(_all_at_once, _quiet),
    "a start is waited for without end": PlannerBug(_never_late, _stillborn),
    "a floor does not hold": PlannerBug(_floor_is_one, _floored),
    "a limit is named that is none": PlannerBug(_wrong_limit, _dear),
    "a switch clears the prefix cache": PlannerBug(_cache_is_lost, _switched),
}

_IN_MODES: Final = "worker/mode/test_planted_bugs.py"
UNSEEN: Final[dict[str, tuple[str, str, str]]] = {
    "a change id is not checked at the start": (
        "agent/test_workers.py",
        "def test_a_repeat_starts_nothing_whatever_became_of_it(",
        "a planner lists before it repeats an order, so an agent is not asked twice",
    ),
    "a stale term is obeyed": (
        "runtime/orders/test_order_fence.py",
        "def test_only_orders_as_late_as_the_last_one_are_obeyed(",
        "a planner that is silent for long enough to lose its models begins a new life and term",
    ),
    "dwell is ignored": (
        "planner/rules/test_switches.py",
        "def test_a_worker_keeps_its_mode_for_dwell(",
        "prompts of prefill workers teach routers no times here, so a planner knows the demand "
        "late, when all modes are older than dwell",
    ),
    "samples of a cold start are learnt": (
        "perf_model/test_predictor.py",
        "def test_a_workers_first_requests_do_not_count(",
        "engines of a world are as fast at their first prompts as later",
    ),
    "a switch keeps claims of the former generation": (
        _IN_MODES,
        '"a stale claim is obeyed": (',
        "of the worker, not of planners",
    ),
    "a card is told before its parts are attached": (
        _IN_MODES,
        '"a card is told before its parts are attached": (',
        "a worker's parts and its card change in one turn of its loop: no moment lies in between",
    ),
    "a quarantine is dropped at the flip": (
        _IN_MODES,
        '"a quarantine is dropped": (',
        "no transfer of these worlds is given up while a worker changes its mode",
    ),
}
"""Bugs that worlds of planners do not show: file and name of the test that does, and why worlds do
not."""
