"""An engine that fails on demand: it dies, fails a step, stalls, or runs slowly.

Poison is a token that only some prompts have. Every engine that computes it dies, or fails the step
with it, on any worker.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final

from pdserve.engine.watchdog import StallWatchdog
from pdserve.engine_core.core import EngineCore
from pdserve.errors import EngineDied, EngineStalled, PdserveError
from pdserve.messages.engine import CoreFailed
from pdserve.messages.kv_events import TIERS
from pdserve.observe.heartbeat import HeartbeatReading
from pdserve.sim.engine import VirtualTimeEngine
from pdserve.testing.scripted import ScriptedExecutor
from tests.worlds.virtual_tiers import open_virtual_tiers

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from pdserve.engine_core.executor import StepPlan
    from pdserve.engine_core.kit import Core
    from pdserve.engine_core.kv_transfer.connector import KvConnector
    from pdserve.ids import Seconds
    from pdserve.messages.engine import EngineSpec, Event
    from pdserve.testing.fake_rdma import FakeFabric
    from tests.worlds.virtual_tiers import TierFaults

__all__ = ["FAIL_TOKEN", "KILL_TOKEN", "POISON_TOKENS", "FaultyEngine"]

KILL_TOKEN: Final = 1  # 0 is the token by which a worker proves its new mode
"""A prompt's token whose computation ends the core's process."""
FAIL_TOKEN: Final = 2
"""One that fails the step."""
POISON_TOKENS: Final = (KILL_TOKEN, FAIL_TOKEN)


def _cost(pace: Seconds, batch: int, length: int, cached: int = 0) -> Seconds:
    """What it costs to prefill a prompt here."""
    return pace * (length - cached) / batch


class FaultyEngine(VirtualTimeEngine):
    """See above."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        pace: Seconds,
        load_time: Seconds,
        restart_time: Seconds,
        stall_timeout: Seconds,
        fabric: FakeFabric | None = None,
        tier_faults: TierFaults,
        on_death: Callable[[str], None] = lambda why: None,
    ) -> None:
        """`on_death` gets the reason why a core ended that was not asked to."""
        super().__init__(spec, pace=pace, load_time=load_time, fabric=fabric)
        self.tier_faults = tier_faults
        self.tally: Counter[str] = Counter()
        """What the tiers of all cores that have ended have done."""
        self.failing = 0
        """Steps that are going to fail."""
        self.failed = 0
        """Steps that have."""
        self.stuck = False
        """True while the core is stalled. A new core is not."""
        self.poisoned = 0
        """Number of times that poison had its effect."""
        self._ticks = 0
        self._stall: StallWatchdog | None = None
        """The watchdog of the present core; see `engine.core_run`."""
        self._stalled = False
        self._watcher: asyncio.TimerHandle | None = None
        self._stall_timeout = stall_timeout
        self._doomed = False
        """True if the core dies in the present step."""
        self._usual_pace = pace
        self._restart_time = restart_time
        self._on_death = on_death

    def slow_down(self, factor: float) -> None:
        """Each step takes so many times the usual from now on."""
        self._pace = self._usual_pace * factor

    def go_on(self) -> bool:
        """Ends the stall; False if the core was not stalled, or was replaced."""
        was, self.stuck = self.stuck, False
        if was:
            self._arm()
        return was

    def die(self, restart_after: Seconds) -> bool:
        """See `VirtualTimeEngine`."""
        died = super().die(restart_after)
        if died:
            self.stuck = False
            self._on_death("stalled" if self._stalled else "died")
        self._stalled = self._doomed = False
        return died

    # ------------------------------------------------------------------ whether it gets on

    def _boot(self) -> None:
        super()._boot()
        self._stall = StallWatchdog(self._stall_timeout, self._loop.time())
        self._watcher = self._loop.call_later(self._stall.interval, self._look)

    def _drop_core(self) -> None:
        self._count_tiers()
        super()._drop_core()
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    def free(self) -> None:
        """See `VirtualTimeEngine`."""
        self._count_tiers()
        super().free()

    def _count_tiers(self) -> None:
        stats = self.stats()
        for one in stats.tiers:
            name = TIERS[one.tier]
            self.tally[f"{name} stored"] += one.blocks_stored
            self.tally[f"{name} hits"] += one.hit_tokens
        self.tally["fetched"] += stats.pulled_blocks
        self.tally["fetches failed"] += stats.pulls_failed

    def _look(self) -> None:
        """See `engine.core_run`: what a core's page says is here what one sees of it."""
        core, stall = self._core, self._stall
        if core is None or stall is None:
            return
        self._watcher = self._loop.call_later(stall.interval, self._look)
        due = 0.0 if core.has_work else core.wake_at()
        look = HeartbeatReading(self._ticks, 0, inf if due is None else due, "a step")
        if stall.look(look, 0, self._loop.time()):
            self._stalled = True
            self.stalls += 1
            self.die(self._restart_time)

    def _fail_all(self, error: PdserveError) -> None:
        if self._stalled and isinstance(error, EngineDied):
            error = EngineStalled("the engine has made no progress", retry_after=1.0)
        super()._fail_all(error)

    # ------------------------------------------------------------------ in a step

    def _make_core(self, spec: EngineSpec, mover: KvConnector | None) -> Core:
        executor = ScriptedExecutor(self._planned)
        core = EngineCore(executor, self, mover)
        core._open_storage = partial(open_virtual_tiers, executor, self, self.tier_faults)  # type: ignore[method-assign]
        if spec.tiers is not None:
            # A step's computation takes no virtual time, so that nothing is learnt from it.
            core._step_cost.prefill = partial(_cost, self._usual_pace, spec.max_batch_tokens)  # type: ignore[method-assign]
        return core

    def _planned(self, plan: StepPlan) -> None:
        if self.failing:
            self.failing -= 1
            self.failed += 1
            self._on_death("a step failed")
            raise RuntimeError("this step fails")
        for chunk in plan.chunks:
            sequence = chunk.sequence
            end = min(chunk.start + chunk.count, sequence.prompt_len)
            for token in sequence.tokens[chunk.start : end]:
                if token in POISON_TOKENS:
                    self.poisoned += 1
                    self._on_death("poison")
                    self._doomed |= token == KILL_TOKEN
                    raise RuntimeError("the prompt is poison")

    def _step(self) -> None:
        if self.stuck:
            self._timer = None
            return
        self._ticks += 1
        super()._step()
        if self._doomed:
            self.die(self._restart_time)

    def _tell(self, event: Event) -> None:
        if self._doomed:
            return  # it died in the middle of the step, and says nothing of it
        if isinstance(event, CoreFailed):  # its host would end it now
            self.die(self._restart_time)
        else:
            super()._tell(event)
