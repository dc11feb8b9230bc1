"""Runs Slurm's commands for an actuator, and reads the queue seldom.

It knows the failures of commands, and nothing of workers.
"""

from __future__ import annotations

import asyncio
import math
import os
from typing import TYPE_CHECKING, Final

from pdserve.planner.actuators.commands import run_command
from pdserve.planner.actuators.slurm.text import command_environ, failure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.ids import Seconds

__all__ = ["Pace", "SlurmCommands"]

_COMMAND: Final[Seconds] = 8.0
"""Longest that one command may take; a call has its deadline for all of its own."""


class SlurmCommands:
    """The commands of one Slurm."""

    def __init__(self, environ: Mapping[str, str] | None, deadline: Seconds) -> None:
        """Args: `environ` is that of this process (None), or another; `deadline` is that of the
        calls that run commands."""
        self._most = min(_COMMAND, deadline)
        self.environ = command_environ(os.environ if environ is None else environ)

    async def ask(self, *command: str, text: str = "") -> str:
        """Runs a command; returns its output.

        Errors: those of the port, in Slurm's own words.
        """
        done = await run_command(command, self.environ, self._most, text=text)
        if done.code:
            raise failure(command[0], done.words)
        return done.out

    async def told(self, *command: str) -> bool:
        """Runs a command for a job that may have ended meanwhile; False: it has.

        Errors: those of the port.
        """
        done = await run_command(command, self.environ, self._most)
        if done.code == 0:
            return True
        gone = ("invalid job id", "already finished", "already completing", "invalid job/step")
        if any(words in done.words.lower() for words in gone):
            return False
        raise failure(command[0], done.words)


class Pace:
    """Lets one task at a time pass, and not more often than each `interval` seconds."""

    def __init__(self, interval: Seconds) -> None:
        self.interval = interval
        self.last = -math.inf
        """The loop's time when the last one passed."""
        self.lock = asyncio.Lock()

    @property
    def due(self) -> bool:
        """True if it is time for another."""
        return asyncio.get_running_loop().time() - self.last >= self.interval

    def passed(self) -> None:
        """Says that one passes now."""
        self.last = asyncio.get_running_loop().time()

    def forget(self) -> None:
        """Lets the next one pass at once: the last one was in vain."""
        self.last = -math.inf

    async def turn(self) -> None:
        """Waits until the interval is over; call it with the lock held."""
        await asyncio.sleep(max(0.0, self.last + self.interval - asyncio.get_running_loop().time()))
        self.passed()
