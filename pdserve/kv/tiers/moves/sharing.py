"""Looks at times for blocks that other workers have sealed below the same directory.

A look is a job: it lists the other subdirectories and reads the tables of segments that are new.
What it finds can be read as blocks of the own disk can. But the files are another's: nothing is
claimed there, and a file that is gone is a miss. The index of found blocks is a `SealedReader`.

Pure but for the jobs: times are arguments.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.kv.tiers.jobs import LookShared

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.kv.tiers.disk.sealed_reader import SealedReader
    from pdserve.kv.tiers.jobs import FillShared, JobDone
    from pdserve.kv.tiers.moves.indexes import TierIndexes
    from pdserve.kv.tiers.moves.job_lanes import JobLanes

__all__ = ["SharedCounts", "Sharing"]

_log = logging.getLogger(__name__)

LOOK_EVERY: Final[Seconds] = 10.0
"""Seconds from one look to the next: how long a block may be sealed before others find it."""

LOOK_ON: Final[Seconds] = 0.25
"""Seconds to the next look after one that left tables unread."""


@dataclass(slots=True)
class SharedCounts:
    """Counters of blocks of other workers."""

    read: int = 0
    failed: int = 0


class Sharing:
    """When to look, and what became of the reads."""

    def __init__(self, tiers: TierIndexes, jobs: JobLanes) -> None:
        self.counts = SharedCounts()
        self._tiers = tiers
        self._jobs = jobs
        self._looking: SealedReader | None = None
        """For whom a look is under way."""
        self._void = False
        """Whether blocks were dropped that the look under way may have found."""
        self._at: Seconds = 0.0
        """When the next look is due."""

    def due(self) -> Seconds | None:
        """When `look` must be called at the latest; None: never, or a look is under way."""
        return None if self._tiers.open_shared is None or self._looking else self._at

    def look(self, now: Seconds) -> None:
        """Begin a look, if it is time."""
        shared = self._tiers.open_shared
        if shared is None or self._looking is not None or now < self._at:
            return
        self._looking = shared
        self._jobs.submit(LookShared(shared.known(), shared.room), now)

    def looked(self, done: JobDone, now: Seconds) -> None:
        """A look ended. What it found counts if the directory is the same and still used."""
        asker, self._looking = self._looking, None
        void, self._void = self._void, False
        self._at = now + LOOK_EVERY
        if done.error:
            _log.warning("blocks of other workers were not looked for: %s", done.error)
        elif done.scan is not None and asker is self._tiers.shared and not (asker is None or void):
            asker.apply(done.scan)
            if done.scan.more:
                self._at = now + LOOK_ON

    def drop(self, unwanted: Callable[[bytes], bool]) -> None:
        """Forget blocks, by an operator's order. Their owners, which have the same order, erase
        them: what was found before is not to be taken in after."""
        self._void = self._looking is not None
        if self._tiers.shared is not None:
            self._tiers.shared.drop(unwanted)

    def restart(self) -> None:
        """Look at once: another directory or secret is used from now on."""
        self._at = 0.0

    def filled(self, done: JobDone, job: FillShared) -> None:
        """A block was read, or not."""
        if not done.error:
            self.counts.read += 1
            return
        if not self.counts.failed:
            _log.warning(
                "a KV block that another worker stored is gone or bad, and counts as a miss, as "
                "all later ones do: %s",
                done.error,
            )
        self.counts.failed += 1
        if self._tiers.shared is not None:
            self._tiers.shared.failed(job.place, job.hash, gone=done.reason == "absent")
