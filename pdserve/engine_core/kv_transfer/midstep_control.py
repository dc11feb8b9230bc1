"""What transports of two workers tell each other passes between two layers of a long step, too.

A fence waits for the peer's word. Taken in between steps only, a question and its answer would wait
for up to two steps at each end, and a fence that waits too long costs the whole path. So the core's
thread looks here whenever a step ticks: calls and answers of peers go to the mover, what the mover
asks and replies goes to the node. Everything else keeps its place in the queue, also calls behind a
command that begins or ends a life. Decode steps are too short to tick.

It knows no core and no step. Owned by the host, in the core's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.engine_core.core_socket import CoreSocketClosed
from pdserve.errors import ProtocolError
from pdserve.messages.engine import InboundControl, OutboundControlReply, PeerGone, SetNodeLife

if TYPE_CHECKING:
    from pdserve.engine_core.core_socket import CoreSocket
    from pdserve.engine_core.kv_transfer.connector import KvConnector
    from pdserve.messages.engine import Command

__all__ = ["MidStepControl"]


_MOST: Final = 4096
"""Commands that wait here for the end of a step; more wait in the socket."""


class MidStepControl:
    """See above."""

    def __init__(self, link: CoreSocket, mover: KvConnector) -> None:
        self._link = link
        self._mover = mover
        self._kept: list[Command] = []
        self._passed = 0
        self._in_order = False
        """A life begins or ends among what is kept: nothing passes it."""
        self._error: CoreSocketClosed | ProtocolError | None = None

    def pass_on(self) -> None:
        """Within a step. What goes wrong is raised by `take`: it is not the step's fault."""
        if self._error is not None or len(self._kept) >= _MOST:
            return
        try:
            for command in self._link.receive():
                self._pass(command)
            if not self._link.congested:
                self._link.flush()
                self._link.send([said.event for said in self._mover.says()])
        except (CoreSocketClosed, ProtocolError) as error:
            self._error = error

    def _pass(self, command: Command) -> None:
        if isinstance(command, InboundControl | OutboundControlReply) and not self._in_order:
            self._mover.take(command)
            self._passed += 1
            return
        self._in_order |= isinstance(command, SetNodeLife | PeerGone)
        self._kept.append(command)

    def take(self) -> tuple[list[Command], int]:
        """After the step: the commands that have waited, and how many have not. Raises as the
        link's `receive` does."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        kept, passed = self._kept, self._passed
        self._kept, self._passed, self._in_order = [], 0, False
        return kept, passed
