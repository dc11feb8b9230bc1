"""Decides which running requests a worker asks to move to another worker, and when.

    kv     the KV pool runs out: the scheduler has preempted since the last look, or would within
           some steps. The requests it would preempt first are asked to move: they would be
           recomputed here anyway, while elsewhere their blocks can follow
    itl    the streams have been slower than the operator's target for a while

Moves a few at a time, pauses so that the statistics show the effect, and never moves the last
request. A request is not asked again within a while: its frontend found no better worker. Pure: the
caller passes times. Knows neither frontends nor other workers. Owned by `agent`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.engine.port import Handle
    from pdserve.ids import Seconds
    from pdserve.messages.engine import EngineStats
    from pdserve.messages.worker_stream import MigrationHintReason

__all__ = ["MigrationProposal", "Rebalance"]

_STEPS: Final = 8
"""Steps that the pool must last. More would be wrong: requests that end meanwhile free blocks, and
a busy pool is meant to be nearly full.
"""
_KV_PAUSE: Final[Seconds] = 0.5
_ITL_PAUSE: Final[Seconds] = 2.0
"""Seconds between two proposals, until the effect of the first one shows."""
_ITL_FOR: Final[Seconds] = 2.0
"""Seconds for which streams must have been too slow."""
_EASED: Final = 0.9
"""Fraction of the target below which streams are fast enough again; in between nothing changes."""
_PART: Final = 16
"""One proposal moves at most this fraction (1/n) of the running requests, and at least one."""
_AGAIN: Final[Seconds] = 10.0
"""Seconds before the same request is asked again."""


@dataclass(frozen=True, slots=True)
class MigrationProposal:
    """Asks the frontends of these requests to have them served by another worker."""

    reason: MigrationHintReason
    handles: frozenset[Handle]


class Rebalance:
    """The rebalancing state of one worker."""

    def __init__(self, block_size: int, itl_target: Seconds = 0.0) -> None:
        """`itl_target`: seconds between tokens; 0: no target."""
        self._block_size = block_size
        self._target = itl_target
        self._slow_since: Seconds | None = None
        self._preemptions = 0
        """Preemptions in the engine's present life at the last look."""
        self._not_before: Seconds = 0.0
        self._asked: dict[Handle, Seconds] = {}

    def look(
        self, now: Seconds, stats: EngineStats, victims: Callable[[], Sequence[Handle]]
    ) -> MigrationProposal | None:
        """Returns a proposal, or None; to be called a few times a second.

        `victims` returns the requests that have produced a token and could move, in the order in
        which the scheduler would preempt them. It is called only if needed.
        """
        reason = self._reason(now, stats)
        if reason is None or now < self._not_before or stats.running < 2:
            return None
        handles = self._choose(now, stats.running, victims())
        if not handles:
            return None
        self._not_before = now + (_KV_PAUSE if reason == "kv" else _ITL_PAUSE)
        self._asked |= dict.fromkeys(handles, now)
        return MigrationProposal(reason, handles)

    def _reason(self, now: Seconds, stats: EngineStats) -> MigrationHintReason | None:
        preempted = stats.preemptions > self._preemptions
        self._preemptions = stats.preemptions
        slow = self._too_slow(now, stats)
        if preempted or self._runs_out(stats):
            return "kv"
        return "itl" if slow else None

    def _runs_out(self, stats: EngineStats) -> bool:
        """True if the pool may run out: every running sequence takes another block every
        few steps."""
        wanted = stats.running * _STEPS / self._block_size
        return stats.blocks_total > 0 and stats.blocks_free + stats.blocks_cached < wanted

    def _too_slow(self, now: Seconds, stats: EngineStats) -> bool:
        if not self._target or stats.itl < _EASED * self._target or stats.running < 2:
            self._slow_since = None
        elif stats.itl > self._target and self._slow_since is None:
            self._slow_since = now
        return self._slow_since is not None and now - self._slow_since >= _ITL_FOR

    def _choose(self, now: Seconds, running: int, victims: Sequence[Handle]) -> frozenset[Handle]:
        """Chooses the first requests that were not asked lately; one request always stays."""
        here = set(victims)
        self._asked = {
            handle: at for handle, at in self._asked.items() if handle in here and now - at < _AGAIN
        }
        most = max(1, min(running, len(victims)) // _PART)
        fresh = [handle for handle in victims[: len(victims) - 1] if handle not in self._asked]
        return frozenset(fresh[:most])
