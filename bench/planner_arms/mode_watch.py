"""Watches the modes of a replay's workers: when the ratio changes, and how long each switch takes.

It samples in virtual time and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pdserve.runtime.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.ids import Seconds
    from pdserve.sim.replay.cluster import ReplayCluster, ReplayWorker
    from pdserve.sim.replay.scaling import Scaler

__all__ = ["ModeSeen", "Watched", "followed", "nearly_followed"]

_EVERY: Final[Seconds] = 0.1
_SERVING: Final = "serving"


@dataclass(slots=True)
class ModeSeen:
    """What was seen of the modes."""

    ratios: list[tuple[Seconds, str]] = field(default_factory=list)
    """The ratio at the beginning and each later one, with its time: `2:4` is two prefill and four
    decode workers, `3+2:4` three aggregated ones beside them."""
    switches: list[Seconds] = field(default_factory=list)
    """How long each switch kept its worker out of service."""
    _left: dict[str, Seconds] = field(default_factory=dict)

    def look(self, now: Seconds, workers: Sequence[tuple[str, str, bool]]) -> None:
        """Takes a sample: (name, mode, serves) of each worker."""
        for name, _, serves in workers:
            if not serves:
                self._left.setdefault(name, now)
            elif name in self._left:
                self.switches.append(now - self._left.pop(name))
        modes = Counter(mode for _, mode, _ in workers)
        split = f"{modes['prefill']}:{modes['decode']}"
        ratio = f"{modes['aggregated']}+{split}" if modes["aggregated"] else split
        if not self.ratios or self.ratios[-1][1] != ratio:
            self.ratios.append((now, ratio))


def followed(
    ratios: Sequence[tuple[Seconds, str]], shift: Seconds, until: Seconds
) -> Seconds | None:
    """Seconds from a shift to the ratio that then stays until the next one; None: the ratio did not
    change."""
    times = [at for at, _ in ratios if shift < at < until]
    return times[-1] - shift if times else None


def nearly_followed(
    ratios: Sequence[tuple[Seconds, str]], shift: Seconds, until: Seconds
) -> Seconds | None:
    """The same, to a ratio that differs from it by one worker."""
    times = [at for at, _ in ratios if shift < at < until]
    return times[max(0, len(times) - 2)] - shift if times else None


class Watched:
    """A scaler whose workers' modes are watched; a `Scaler`."""

    def __init__(self, scaler: Scaler) -> None:
        self.seen = ModeSeen()
        self._scaler = scaler

    async def begin(self, cluster: ReplayCluster, now: Callable[[], Seconds]) -> None:
        """Begins both."""
        self._cluster, self._now = cluster, now
        self._tasks = Tasks("mode watch")
        self._task = self._tasks.spawn(self._run(), "mode watch")
        await self._scaler.begin(cluster, now)

    async def end(self) -> None:
        """Ends both. Raises what looking raised."""
        if self._task.done():
            self._task.result()
        await self._tasks.close()
        await self._scaler.end()

    def summary(self) -> dict[str, Any]:
        """The scaler's, and what was seen."""
        return self._scaler.summary() | {
            "ratios": [[round(at, 1), ratio] for at, ratio in self.seen.ratios],
            "switches": sorted(round(seconds, 1) for seconds in self.seen.switches),
        }

    async def _run(self) -> None:
        while True:
            self.seen.look(self._now(), [_sample(one) for one in self._cluster.workers])
            await asyncio.sleep(_EVERY)


def _sample(worker: ReplayWorker) -> tuple[str, str, bool]:
    serves = worker.agent.mode.report().state == _SERVING
    return worker.node.id, worker.mode, serves
