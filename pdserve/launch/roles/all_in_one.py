"""Runs prefill and decode worker of an all-in-one process over one engine process.

The engine process has both engine cores, with one copy of the weights and two KV pools.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Final

from pdserve.engine.shared_process import SharedCoreProcess
from pdserve.launch.roles.base import engine_log_fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine.launcher import CoreLauncher
    from pdserve.launch.roles.base import RoleContext
    from pdserve.messages.handoff import WorkerMode
    from pdserve.worker.config import WorkerConfig

__all__ = ["worker_pair"]

_MODES: Final[tuple[WorkerMode, ...]] = ("prefill", "decode")


def worker_pair(context: RoleContext) -> list[tuple[WorkerConfig, Callable[[], CoreLauncher]]]:
    """The configuration of each of the two workers, and the launcher of their shared engine
    process."""
    process = context.config.process
    shared = SharedCoreProcess(
        len(_MODES),
        log_format=process.log_format,
        log_level=process.log_level,
        log_fields=engine_log_fields(context),
        on_line=context.screen.write_line,
    )
    return [
        (
            dataclasses.replace(context.config.worker, mode=mode, kv_share=1 / len(_MODES)),
            functools.partial(shared.launcher, number),
        )
        for number, mode in enumerate(_MODES)
    ]
