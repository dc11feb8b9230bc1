"""Maps a key to a worker by rendezvous hashing, alike at every router (`runtime.rendezvous`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.runtime.rendezvous import key_of, score

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.router.policies.base import WorkerView

__all__ = ["home", "key_of"]


def home(key: int, workers: Sequence[WorkerView]) -> WorkerView:
    """The worker with the highest hash score for the key. O(workers); at least one worker."""
    return max(workers, key=lambda worker: score(key, worker.node))
