"""Passes the transports' control messages within a long step, not only between steps.

A fence waits for the peer to confirm it. If control messages were handled only between steps, a
call and its reply would wait for up to two steps at each end, and a fence that times out closes the
whole path. So each tick of a step passes peers' calls and replies to the connector, and the
connector's calls and replies to the node. All other commands keep their order, as do calls behind a
command that begins or ends an epoch. Decode steps are too short to tick.

It knows neither the core nor the step. Owned by the `CoreLoop`; used in the core's thread.
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
    """Passes control messages between a core's socket and its connector within a step."""

    def __init__(self, link: CoreSocket, mover: KvConnector) -> None:
        self._link = link
        self._mover = mover
        self._kept: list[Command] = []
        self._passed = 0
        self._in_order = False
        """An epoch begins or ends among the kept commands, so no later command may pass them."""
        self._error: CoreSocketClosed | ProtocolError | None = None

    def pass_on(self) -> None:
        """Pass control messages on; called within a step. `take` raises the errors of the socket,
        so that they do not fail the step."""
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
        """After a step, return the commands that waited and the number of those passed on. Raises
        as `CoreSocket.receive` does."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        kept, passed = self._kept, self._passed
        self._kept, self._passed, self._in_order = [], 0, False
        return kept, passed
