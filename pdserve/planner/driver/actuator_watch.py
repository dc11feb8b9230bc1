"""Looks at one actuator again and again: what it can start, and what it has started.

A planner's tick never waits for an actuator: it takes what was seen last. An actuator that does not
answer is *down*: what it listed before may be over, and what it does not list may be there. Owned
by the service; the task is the node's.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from pdserve.planner.actuators.base import DEADLINE, ActuatorError, within

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.messages.planner import Instance, Kind
    from pdserve.planner.actuators.base import Actuator

__all__ = ["ActuatorWatch"]

_log = logging.getLogger(__name__)


class ActuatorWatch:
    """What is known of one actuator."""

    def __init__(self, actuator: Actuator) -> None:
        self.actuator = actuator
        self.kinds: tuple[Kind, ...] = ()
        self.instances: tuple[Instance, ...] = ()
        self.down = "it has not answered yet"
        """Why it does not answer, in its own words; empty: it does."""
        self.looked = asyncio.Event()
        """Set after the first look, whatever came of it."""

    @property
    def name(self) -> str:
        """The actuator's name."""
        return self.actuator.name

    async def run(self, interval: Seconds) -> None:
        """Looks every `interval` seconds, for ever."""
        while True:
            await self.look()
            self.looked.set()
            await asyncio.sleep(interval)

    async def look(self) -> None:
        """Asks once, within the actuator's deadline."""
        try:
            async with within(DEADLINE, f"{self.name} was asked for its instances"):
                kinds = tuple(await self.actuator.kinds())
                instances = tuple(await self.actuator.list())
        except ActuatorError as error:
            self._failed(error.message)
        except Exception as error:
            # A defect of one actuator must not end the planner's levers that need none.
            _log.exception("actuator %s", self.name)
            self._failed(f"{type(error).__name__}, see the planner's log")
        else:
            if self.down and self.looked.is_set():
                _log.info("actuator %s answers again", self.name)
            self.kinds, self.instances, self.down = kinds, instances, ""

    def _failed(self, why: str) -> None:
        if why != self.down:
            _log.warning("actuator %s does not answer: %s", self.name, why)
        self.down = why
