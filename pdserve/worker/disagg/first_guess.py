"""Gives the prediction the rate of KV paths before the first prompt is prefilled elsewhere.

Without it a decode worker begins with the guess of a fast network, and sends its first long prompts
a slow way. So paths to a few prefill workers are made in advance; each is measured when it is made,
and the median of them is the first guess. From the first remote prefill on, the prediction learns
from what it observes, and this part does nothing more. Only `predict` needs it.

It does not know how a path is measured, nor how the prediction uses the rate. Owned by the decode
handler.
"""

from __future__ import annotations

import statistics
import zlib
from typing import TYPE_CHECKING, Final

from pdserve.ids import NodeId, NodeLife
from pdserve.runtime.paced_timer import PacedTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from pdserve.engine.port import Engine
    from pdserve.ids import Seconds
    from pdserve.messages.engine import EngineCapabilities, PathState
    from pdserve.net.timers import Timers
    from pdserve.worker.disagg.policy import DisaggPolicy

__all__ = ["PATHS", "FirstGuess", "measured_token", "rate_of", "token_seconds"]

PATHS: Final = 3
"""Most paths made in advance: in one cluster they are much alike, and each costs three calls."""
_LOOK: Final[Seconds] = 0.1
"""Seconds between two looks until the engine is ready and each path has a rate."""


class FirstGuess:
    """The first guess of one decode worker."""

    def __init__(
        self,
        own: NodeId,
        timers: Timers,
        engine: Engine,
        chooser: DisaggPolicy,
        prefill_workers: Callable[[], Iterable[NodeLife]],
    ) -> None:
        """`own`: this worker's name. `prefill_workers` returns the members that may prefill for it;
        call `wake` when they may have changed."""
        self._own = own
        self._engine = engine
        self._chooser = chooser
        self._prefill_workers = prefill_workers
        self._asked: set[NodeLife] = set()
        self._pace = PacedTimer(timers, _LOOK, self._look)
        self._pace.start()

    def wake(self) -> None:
        """Notes that prefill workers may have come. It is quick."""
        self._pace.wake()

    def close(self) -> None:
        """Makes no more paths. Idempotent."""
        self._pace.stop()

    def _look(self) -> bool:
        """Makes missing paths and reads the rates. Returns True while the engine or a rate is
        awaited."""
        capabilities, learnt = self._engine.capabilities, self._chooser.learnt
        if learnt.transfer.observed:
            self._pace.stop()
            return False
        if self._chooser.mode != "predict":
            return False
        if capabilities is None:
            return True
        if not capabilities.transfers or not capabilities.block_bytes:
            return False
        lives = set(self._prefill_workers())
        self._asked &= lives
        self._ask(lives - self._asked)
        paths = self._engine.paths()
        token = token_seconds(capabilities, rate_of(paths, self._asked))
        if token:
            learnt.guess_transfer(token)
        return any(life not in _known(paths) for life in self._asked)

    def _ask(self, lives: Collection[NodeLife]) -> None:
        """Makes paths until there are enough. Each worker has an order of its own, so that not all
        of them make theirs to the same few."""
        for life in sorted(lives, key=self._place)[: PATHS - len(self._asked)]:
            self._asked.add(life)
            self._engine.make_path(*life)

    def _place(self, life: NodeLife) -> tuple[int, NodeLife]:
        return zlib.crc32(f"{self._own} {life}".encode()), life


def measured_token(engine: Engine) -> Seconds:
    """Seconds to move a token's KV here, by the median of the paths that were measured; 0: none
    was."""
    rates = [path.measured for path in engine.paths() if path.measured > 0 and not path.down]
    return token_seconds(engine.capabilities, statistics.median(rates)) if rates else 0.0


def token_seconds(capabilities: EngineCapabilities | None, rate: float) -> Seconds:
    """Seconds of a token's KV at so many bytes per second; 0 if either is not known."""
    if capabilities is None or rate <= 0:
        return 0.0
    return capabilities.block_bytes / capabilities.block_size / rate


def rate_of(paths: Iterable[PathState], lives: Iterable[NodeLife]) -> float:
    """The median rate of the paths to these peers, in bytes per second: as measured, else what the
    device says of itself; 0 if no path has either."""
    wanted = set(lives)
    rates = [
        path.measured or path.expected
        for path in paths
        if not path.down and NodeLife(NodeId(path.node), path.epoch) in wanted
    ]
    known = [rate for rate in rates if rate > 0]
    return statistics.median(known) if known else 0.0


def _known(paths: Iterable[PathState]) -> set[NodeLife]:
    return {NodeLife(NodeId(path.node), path.epoch) for path in paths}
