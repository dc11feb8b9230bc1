"""A key's home among workers, the same at every router: see `runtime.rendezvous`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.runtime.rendezvous import key_of, score

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.router.policies.base import WorkerView

__all__ = ["home", "key_of"]


def home(key: int, workers: Sequence[WorkerView]) -> WorkerView:
    """Whom the key prefers. O(workers); at least one."""
    return max(workers, key=lambda worker: score(key, worker.node))
