"""The end of a node, in phases with deadlines; a phase that overruns is named, and the next begins.

    gate    take nothing new; others stop choosing us
    drain   finish or hand over what is in flight, answer what cannot be served
    leave   say goodbye
    close   stop tasks, close links

It knows nothing of what the phases do. Used once, by whoever owns the node.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pdserve.runtime.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from pdserve.ids import Seconds

__all__ = ["Phase", "Report", "shut_down"]

_log = logging.getLogger(__name__)

_GRACE: Final[Seconds] = 1.0
"""For the clean-up of a phase that was cancelled at its deadline."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One step of an end."""

    name: str
    work: Callable[[], Awaitable[object]]
    """Cancelled at the deadline."""
    timeout: Seconds


@dataclass(slots=True)
class Report:
    """How it went."""

    overran: list[str] = field(default_factory=list)
    """Phases that were cut short."""
    failed: dict[str, BaseException] = field(default_factory=dict)
    """Phases that raised."""
    left: tuple[str, ...] = ()
    """What is still there, in words."""

    @property
    def clean(self) -> bool:
        """All was done in time, and nothing is left."""
        return not (self.overran or self.failed or self.left)


async def shut_down(
    phases: Sequence[Phase], left: Callable[[], Sequence[str]] = lambda: ()
) -> Report:
    """Go through `phases`, whatever becomes of each; then ask what is `left`. Raises nothing.

    Cancellation: the present phase is cancelled, and the later ones do not happen.
    """
    report, tasks = Report(), Tasks("shutdown")
    for phase in phases:
        await _perform(phase, tasks, report)
    report.left = (*(f"task {name}" for name in tasks.names()), *left())
    if report.left:
        _log.error("left behind: %s", ", ".join(report.left))
    return report


async def _perform(phase: Phase, tasks: Tasks, report: Report) -> None:
    async def work() -> None:
        await phase.work()

    task = tasks.spawn(work(), phase.name)
    try:
        done, _ = await asyncio.wait({task}, timeout=phase.timeout)
    finally:
        task.cancel(f"{phase.name} is over")
    if not done:
        _log.warning("%s was not done within %g s", phase.name, phase.timeout)
        report.overran.append(phase.name)
        done, _ = await asyncio.wait({task}, timeout=_GRACE)
    if done and not task.cancelled() and (error := task.exception()) is not None:
        report.failed[phase.name] = error
    await asyncio.sleep(0)  # if it ended between the two waits, its owner has yet to forget it
