"""Starts this process's engine process before the roles are imported.

The engine process imports its libraries while this process imports its roles, listens and joins. It
waits for the worker to say what to load. Later runs of an engine are launched when they are needed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from pdserve.engine.launcher import ProcessLauncher
from pdserve.engine.shared_process import SharedCoreProcess
from pdserve.launch.config.resolve import has_worker_pair
from pdserve.launch.roles.base import engine_log_fields

if TYPE_CHECKING:
    from pdserve.engine.launcher import CoreLauncher
    from pdserve.launch.roles.base import RoleContext

__all__ = ["EarlyEngine", "process_launcher"]

_log = logging.getLogger(__name__)

_PAIR: Final = 2


class EarlyEngine:
    """The first engine process, and the launchers of the cores in it and in later ones."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        pair = has_worker_pair(context.config)
        self._first = _shared_process(context) if pair else process_launcher(context)
        self._launched = False

    async def start(self) -> None:
        """Starts the process. If it cannot be started, the launch of a core says why."""
        try:
            await self._first.start_early()
        except OSError as error:
            _log.debug("the engine process did not start early: %s", error)

    def launcher(self, number: int = 0) -> CoreLauncher:
        """Makes the launcher of one run of core `number`."""
        first, launched = self._first, self._launched
        self._launched = True
        if isinstance(first, SharedCoreProcess):
            return first.launcher(number)
        return process_launcher(self._context) if launched else first

    async def discard(self) -> None:
        """Ends the process if no core was launched in it."""
        await self._first.discard()


def process_launcher(context: RoleContext) -> ProcessLauncher:
    """Makes the launcher of one run of a worker's engine, in a process of its own."""
    process = context.config.process
    return ProcessLauncher(
        log_format=process.log_format,
        log_level=process.log_level,
        log_fields=engine_log_fields(context),
        on_line=context.screen.write_line,
        engine=context.config.worker.engine,
    )


def _shared_process(context: RoleContext) -> SharedCoreProcess:
    """Makes the engine process of a prefill and a decode worker."""
    process = context.config.process
    return SharedCoreProcess(
        _PAIR,
        log_format=process.log_format,
        log_level=process.log_level,
        log_fields=engine_log_fields(context),
        on_line=context.screen.write_line,
        engine=context.config.worker.engine,
    )
