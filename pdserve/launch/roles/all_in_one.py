"""The prefill and the decode worker of an all-in-one process.

Their engine process has both engine cores, with one copy of the weights and two KV pools.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdserve.messages.handoff import WorkerMode
    from pdserve.worker.config import WorkerConfig

__all__ = ["worker_pair"]

_MODES: Final[tuple[WorkerMode, ...]] = ("prefill", "decode")


def worker_pair(config: WorkerConfig) -> list[WorkerConfig]:
    """The configuration of each of the two workers, in the order of their cores."""
    share = 1 / len(_MODES)
    return [dataclasses.replace(config, mode=mode, kv_share=share) for mode in _MODES]
