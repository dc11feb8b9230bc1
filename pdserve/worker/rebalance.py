"""Which running requests a worker would rather have served elsewhere, and when.

    kv     its pool runs out: the scheduler has preempted since the last look, or would within some
           steps. Whom it would preempt first is asked to move: that one would be computed again
           here anyway, and elsewhere its blocks can follow
    itl    its streams have been slower than the operator's target for a while: one fewer runs

A few at a time, with time in between for the numbers to show what that has brought, and never the
last one. Nobody is asked twice within a while: its frontend looked, and found nothing better. Pure:
time comes in; it knows neither frontends nor other workers. Owned by `member`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.engine.api import Handle
    from pdserve.ids import Seconds
    from pdserve.messages.channel import MoveReason
    from pdserve.messages.engine import EngineStats

__all__ = ["Rebalance", "Relief"]

_STEPS: Final = 8
"""So far ahead the pool must last. Not further: those that end meanwhile give blocks back, and a
busy pool is meant to be nearly full."""
_KV_PAUSE: Final[Seconds] = 0.5
_ITL_PAUSE: Final[Seconds] = 2.0
"""Between two reliefs: the time in which one shows."""
_ITL_FOR: Final[Seconds] = 2.0
"""Streams must have been too slow for so long."""
_EASED: Final = 0.9
"""Below this part of the target they are fast enough again; in between nothing changes."""
_PART: Final = 16
"""One relief takes at most one in so many of those that run, and at least one."""
_AGAIN: Final[Seconds] = 10.0
"""Before the same request is asked again."""


@dataclass(frozen=True, slots=True)
class Relief:
    """Ask the frontends of these to have them served elsewhere."""

    reason: MoveReason
    handles: frozenset[Handle]


class Rebalance:
    """One worker's."""

    def __init__(self, block_size: int, itl_target: Seconds = 0.0) -> None:
        """`itl_target` 0: streams may be as slow as they are."""
        self._block_size = block_size
        self._target = itl_target
        self._slow_since: Seconds | None = None
        self._preemptions = 0
        """Of the engine's present life, as last seen."""
        self._not_before: Seconds = 0.0
        self._asked: dict[Handle, Seconds] = {}

    def look(
        self, now: Seconds, stats: EngineStats, victims: Callable[[], Sequence[Handle]]
    ) -> Relief | None:
        """To be called a few times a second. `victims`: those that have begun and could go
        elsewhere, whom the scheduler would preempt first first; it is called only if it matters."""
        reason = self._reason(now, stats)
        if reason is None or now < self._not_before or stats.running < 2:
            return None
        handles = self._choose(now, stats.running, victims())
        if not handles:
            return None
        self._not_before = now + (_KV_PAUSE if reason == "kv" else _ITL_PAUSE)
        self._asked |= dict.fromkeys(handles, now)
        return Relief(reason, handles)

    def _reason(self, now: Seconds, stats: EngineStats) -> MoveReason | None:
        preempted = stats.preemptions > self._preemptions
        self._preemptions = stats.preemptions
        slow = self._too_slow(now, stats)
        if preempted or self._runs_out(stats):
            return "kv"
        return "itl" if slow else None

    def _runs_out(self, stats: EngineStats) -> bool:
        """Each running sequence takes a block more every so many steps."""
        wanted = stats.running * _STEPS / self._block_size
        return stats.blocks_total > 0 and stats.blocks_free + stats.blocks_cached < wanted

    def _too_slow(self, now: Seconds, stats: EngineStats) -> bool:
        if not self._target or stats.itl < _EASED * self._target or stats.running < 2:
            self._slow_since = None
        elif stats.itl > self._target and self._slow_since is None:
            self._slow_since = now
        return self._slow_since is not None and now - self._slow_since >= _ITL_FOR

    def _choose(self, now: Seconds, running: int, victims: Sequence[Handle]) -> frozenset[Handle]:
        """The first of those that were not asked lately; one always stays."""
        here = set(victims)
        self._asked = {
            handle: at for handle, at in self._asked.items() if handle in here and now - at < _AGAIN
        }
        most = max(1, min(running, len(victims)) // _PART)
        fresh = [handle for handle in victims[: len(victims) - 1] if handle not in self._asked]
        return frozenset(fresh[:most])
