"""Runs the KV transports of an engine core on one event loop: `LoopKvConnector`.

    open      a path, then a grant                       AttemptGranted │ AttemptBroken
    revoke    Grant.revoke, or else KvPath.close         AttemptFenced, within seconds
    deliver   KvPath.deliver                             PartDelivered
    take      answers to peers; replies to own calls     say(InboundControlReply); -

Every method is called on the loop and returns at once; `poll` returns the events, in order. What
concerns the node alone goes to `say` at once, and comes by `take`. It owns its tasks, paths and
grants, which all end with it.

Its queues are bounded: the core gets as many events as it has opened and delivered, and one for
each part that arrives. At most `MAX_CALLS` calls of peers and `control_rpc.MAX_CONTROL_REQUESTS`
calls to peers are under way; one more fails as `Overloaded`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from msgspec.structs import replace

from pdserve.engine_core.kv_transfer.connector import (
    AttemptBroken,
    AttemptFenced,
    AttemptGranted,
    AttemptKey,
    ConnectorEvent,
    PartArrived,
    PartDelivered,
)
from pdserve.engine_core.kv_transfer.control_rpc import ControlRpc
from pdserve.engine_core.kv_transfer.peer_paths import PeerPaths
from pdserve.errors import (
    EngineDied,
    EngineError,
    NotReady,
    Overloaded,
    PathLost,
    PdserveError,
    TransferError,
    TransferRefused,
    TransferTimeout,
)
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.engine import (
    InboundControl,
    InboundControlReply,
    MakePath,
    OutboundControlReply,
    PathStates,
    PeerGone,
    SetNodeLife,
)
from pdserve.messages.engine_errors import kind_and_message
from pdserve.runtime.tasks import Tasks
from pdserve.transfer.backends import backend_offers
from pdserve.transfer.copy_plan import block_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.engine_core.kv_transfer.path_stats import PathMeter
    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.engine import ControlCommand, ControlEvent, PathState
    from pdserve.messages.transfer import BackendOffers, TransferControl, TransferTicket
    from pdserve.transfer.backends import TransferBackend
    from pdserve.transfer.base import Grant, GrantSpec, KvPart, KvPath, Region

__all__ = ["LoopKvConnector"]

_log = logging.getLogger(__name__)

MAX_CALLS: Final = 256
_REVOKE: Final[Seconds] = 3.0
"""Time for the peer to confirm that it writes no more; after that the path is closed."""
_ANSWER: Final[Seconds] = 15.0
"""Time to answer a peer's call; the peer waits no longer than that."""
_LOOK: Final[Seconds] = 1.0
"""Time between two checks of the paths, which update the counters and find dead paths."""


@dataclass(slots=True, eq=False)
class _Attempt:
    """One attempt to fill a sequence's blocks; the sink of its grant."""

    mover: LoopKvConnector
    key: AttemptKey
    peer: NodeLife
    order: GrantSpec
    peer_paths: PeerPaths
    state: Literal["opening", "open", "lost", "closing"] = "opening"
    opening: asyncio.Task[None] | None = None
    grant: Grant | None = None
    path: KvPath | None = None
    meter: PathMeter | None = None
    received: Bytes = 0
    """Bytes that have arrived, as far as the back end knows."""

    def on_part(self, part: int) -> None:
        """Report a part that has arrived."""
        assert self.meter is not None
        size = self.meter.arrived()
        self.received += size
        if self.state == "open":
            self.mover.emit(PartArrived(self.key, part, size))

    def on_failed(self, error: TransferError) -> None:
        """Report that no further part arrives."""
        if self.meter is not None:
            self.peer_paths.lost(self.meter)
        self.lose(error)

    def lose(self, error: TransferError | NotReady) -> None:
        """Report the failure, once."""
        if self.state in ("opening", "open"):
            self.state = "lost"
            self.mover.emit(AttemptBroken(self.key, error))


@dataclass(slots=True)
class _Pool:
    regions: Sequence[Region]
    offers: BackendOffers
    block: Bytes
    """Bytes of a block, over all regions."""


class LoopKvConnector:
    """A `KvConnector` on the event loop on which it is made."""

    def __init__(
        self,
        backends: Sequence[TransferBackend],
        *,
        say: Callable[[ControlEvent], None],
        nudge: Callable[[], None] = lambda: None,
        on_broken: Callable[[EngineDied], None] | None = None,
        draw: Callable[[], int] = lambda: secrets.randbits(60),
    ) -> None:
        """`say` sends an event to the node; called on the loop. `nudge` is called, like `start`'s
        `wake`, whenever `poll` has events: `wake` marks that in the core, `nudge` wakes the loop
        that steps the core. `on_broken` is called after a bug in here, when nothing can be relied
        on any more; without it, `poll` raises that error.
        `draw` returns the random number by which peers tell this engine's run from the next."""
        self._backends = backends
        self._draw = draw
        self._nudge = nudge
        self._wake: Callable[[], None] = lambda: None
        self._on_broken = on_broken or self._break
        self._broken: EngineDied | None = None
        self._moved: deque[ConnectorEvent] = deque()
        self._loop = asyncio.get_running_loop()
        self._tasks = Tasks("the engine's transports", self._task_failed)
        self._tell_node = say
        self._rpc = ControlRpc(self._say)
        self._pool: _Pool | None = None
        self._peer_paths: PeerPaths | None = None
        self._turn: asyncio.Task[None] | None = None
        """Closes the transports of the last epoch, then opens those of this one."""
        self._attempts: dict[AttemptKey, _Attempt] = {}
        self._closing: dict[AttemptKey, _Attempt] = {}
        self._calls = 0
        self._paths: list[PathState] = []
        self._look: asyncio.TimerHandle | None = None
        self._looks_soon = False
        self._ended: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ life

    def start(self, region: Region, wake: Callable[[], None]) -> tuple[str, ...]:
        """Start with the allocated pool; returns the usable back ends. Raises `ConfigError` if
        there is none."""
        self.use(region.pools, backend_offers(self._backends, region.pools), wake)
        return tuple(self._pool.offers.places) if self._pool is not None else ()

    def use(
        self, regions: Sequence[Region], offers: BackendOffers, wake: Callable[[], None]
    ) -> None:
        """`start`, for a caller that already has the offers."""
        self._wake = wake
        size = sum(block_bytes(region.layout) for region in regions)
        self._pool = _Pool(regions, offers, size)

    def attach(self, peer: NodeLife) -> None:
        """Exchange KV as this (node, epoch) from now on. Paths and attempts of an earlier epoch
        end. Ignores an epoch that has passed."""
        pool, old = self._pool, self._peer_paths
        assert pool is not None, "start comes first"
        if self._ended is not None or (old is not None and not _later(peer, old.key)):
            return
        for attempt in list(self._attempts.values()):
            if attempt.state == "opening":
                self._stop_opening(attempt, "this node has a new epoch")
        self._peer_paths = peer_paths = PeerPaths(
            peer,
            pool.regions,
            self._backends,
            pool.offers,
            self._rpc,
            self._tasks,
            self._look_soon,
            self._draw(),
        )
        self._turn = self._tasks.spawn(self._turn_to(peer_paths, old, self._turn), f"life {peer}")

    async def _turn_to(
        self, peer_paths: PeerPaths, old: PeerPaths | None, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await asyncio.wait({before})
        if old is not None:
            await old.close()
        if not peer_paths.closing:
            await peer_paths.open()

    def close(self) -> None:
        """Begin to close every path. Unlike other connectors this returns before the end, for which
        `closed` waits; the pool must stay allocated until then. Idempotent."""
        if self._ended is None:
            self._ended = self._loop.create_task(self._end(), name="the engine's transports end")

    async def closed(self) -> None:
        """Close every path; returns when no byte is read or written any more. Errors:
        `EngineError` if a task does not end: it may still use the pool, which is kept."""
        self.close()
        assert self._ended is not None
        await asyncio.shield(self._ended)

    async def _end(self) -> None:
        if self._look is not None:
            self._look.cancel()
        self._rpc.close()
        turn, peer_paths = self._turn, self._peer_paths
        if peer_paths is not None:
            peer_paths.closing = True
        # The transports of an earlier epoch end first.
        if turn is not None:
            await asyncio.wait({turn})
        if peer_paths is not None:
            await peer_paths.close()
        if left := await self._tasks.close():
            raise EngineError(f"the engine's transports have not ended: {', '.join(left)}")
        self._attempts.clear()
        self._closing.clear()
        # The last reference frees the pool's memory.
        self._pool = self._peer_paths = self._turn = None
        for backend in self._backends:
            try:
                backend.close()
            except PdserveError as error:
                _log.warning("%s: %s", backend.name, error.message)

    def _task_failed(self, name: str, error: BaseException) -> None:
        self._on_broken(EngineDied(f"the engine's transports broke down in {name}: {error!r}"))

    def _break(self, error: EngineDied) -> None:
        self._broken = error
        self._tell()

    # ------------------------------------------------------------------ the destination

    def open(self, key: AttemptKey, peer: NodeLife, order: GrantSpec) -> None:
        """Connect to the peer and let it fill these blocks."""
        peer_paths = self._peer_paths
        if self._ended is not None:
            return
        if peer_paths is None or key in self._attempts:
            reason = "this core is not attached to a node" if peer_paths is None else "already open"
            self.emit(
                AttemptBroken(key, TransferRefused.at(order.transfer, str(peer), "open", reason))
            )
            return
        attempt = self._attempts[key] = _Attempt(self, key, peer, order, peer_paths)
        attempt.opening = self._tasks.spawn(self._open(attempt), f"open {order.transfer}")

    async def _open(self, attempt: _Attempt) -> None:
        order = attempt.order
        try:
            path = attempt.path = await attempt.peer_paths.path(attempt.peer)
            attempt.meter = attempt.peer_paths.path_stats.meter(path)
            attempt.grant = path.grant(order, attempt)
        except PdserveError as error:
            attempt.lose(_lost(error, attempt))
            return
        attempt.state = "open"
        ticket = replace(attempt.grant.ticket, backend=path.backend, life=attempt.peer_paths.life)
        self.emit(AttemptGranted(attempt.key, ticket))

    def _stop_opening(self, attempt: _Attempt, reason: str) -> None:
        if attempt.opening is not None:
            attempt.opening.cancel()
        attempt.lose(PathLost.at(attempt.order.transfer, str(attempt.peer), "open", reason))

    def finish(self, key: AttemptKey) -> None:
        """End an attempt of which all parts have arrived. Ignores unknown attempts."""
        attempt = self._attempts.pop(key, None)
        if attempt is None or attempt.grant is None or attempt.meter is None:
            return
        attempt.state = "closing"
        attempt.grant.finish()
        if not attempt.received and self._pool is not None:
            attempt.meter.stats.received += len(attempt.order.blocks) * self._pool.block
        attempt.peer_paths.worked(attempt.meter.path)

    def revoke(self, key: AttemptKey) -> None:
        """End an attempt in any state; `AttemptFenced` follows within seconds."""
        if key in self._closing or self._ended is not None:
            return
        attempt = self._attempts.pop(key, None)
        if attempt is None:
            self.emit(AttemptFenced(key))
            return
        attempt.state = "closing"
        if attempt.opening is not None:
            attempt.opening.cancel()
        self._closing[key] = attempt
        _ = self._tasks.spawn(self._fence(attempt), f"close {attempt.order.transfer}")

    async def _fence(self, attempt: _Attempt) -> None:
        """Wait until the peer confirms that it writes no more, or else close the path."""
        if attempt.opening is not None and not attempt.opening.done():
            await asyncio.wait({attempt.opening})
        grant, path = attempt.grant, attempt.path
        if grant is not None and path is not None and not grant.closed:
            try:
                await grant.revoke(timeout=_REVOKE)
            except PdserveError as error:
                _log.warning("%s; the path is closed instead", error.message)
                await path.close(f"an attempt could not be stopped: {error.message}")
                self._look_soon()
        del self._closing[attempt.key]
        self.emit(AttemptFenced(attempt.key))

    # ------------------------------------------------------------------ the source

    def deliver(self, handle: int, peer: NodeLife, ticket: TransferTicket, part: KvPart) -> None:
        """Send a part to the peer's blocks. An error is reported in `PartDelivered`."""
        if self._ended is not None:
            return
        try:
            peer_paths = self._attached()
            path = peer_paths.existing(peer, ticket)
            meter = peer_paths.path_stats.meter(path)
            done = _Done(self, handle, part.number, meter, peer_paths)
            meter.began(self._loop.time())
            try:
                path.deliver(ticket, part, done)
            except PdserveError:
                meter.ended(self._loop.time())
                raise
        except PdserveError as error:
            reason = _as_transfer(error, ticket.transfer, peer, "deliver")
            self.emit(PartDelivered(handle, part.number, 0, reason))

    def withdraw(self, handle: int, peer: NodeLife, ticket: TransferTicket) -> None:
        """Send no more parts for this ticket. Does nothing if its path is closed."""
        try:
            path = self._attached().existing(peer, ticket)
        except PdserveError:
            # The ticket's deliveries have ended with the path.
            return
        path.withdraw(ticket)

    def _attached(self) -> PeerPaths:
        if self._peer_paths is None:
            raise TransferRefused("this core is not attached to a node")
        return self._peer_paths

    # ------------------------------------------------------------------ the node

    def take(self, command: ControlCommand) -> None:
        """Take a command of the node in."""
        if self._ended is not None:
            return
        match command:
            case OutboundControlReply():
                self._rpc.answered(command)
            case InboundControl():
                self._call(command)
            case SetNodeLife():
                self.attach(NodeLife(NodeId(command.node), command.epoch))
            case PeerGone():
                self._peer_gone(NodeLife(NodeId(command.node), command.epoch))
            case MakePath():
                self._make_path(NodeLife(NodeId(command.node), command.epoch))

    def _make_path(self, peer: NodeLife) -> None:
        if self._peer_paths is not None:
            _ = self._tasks.spawn(_made(self._peer_paths, peer), f"path to {peer} in advance")

    def _peer_gone(self, peer: NodeLife) -> None:
        for attempt in list(self._attempts.values()):
            if attempt.peer == peer and attempt.state == "opening":
                self._stop_opening(attempt, "it is dead")
        if self._peer_paths is not None:
            _ = self._tasks.spawn(self._peer_paths.peer_gone(peer), f"{peer} gone")

    def _call(self, call: InboundControl) -> None:
        if self._calls >= MAX_CALLS:
            self._reply(call, Overloaded(f"{MAX_CALLS} calls of peers are under way"))
            return
        self._calls += 1
        _ = self._tasks.spawn(self._answer(call), f"answer {call.node}")

    async def _answer(self, call: InboundControl) -> None:
        peer = NodeLife(NodeId(call.node), call.epoch)
        answer: TransferControl | PdserveError
        try:
            async with asyncio.timeout(_ANSWER):
                answer = await self._attached().answer(peer, call.backend, call.control)
        except PdserveError as error:
            answer = error
        except TimeoutError:
            answer = TransferTimeout.at("", str(peer), "answer", f"not done in {_ANSWER:g} s")
        finally:
            self._calls -= 1
        self._reply(call, answer)

    def _reply(self, call: InboundControl, answer: TransferControl | PdserveError) -> None:
        if isinstance(answer, PdserveError):
            kind, message = kind_and_message(answer)
            reply = InboundControlReply(
                number=call.number, control=None, kind=kind, message=message
            )
        else:
            reply = InboundControlReply(number=call.number, control=answer)
        self._say(reply)

    # ------------------------------------------------------------------ events

    def emit(self, moved: ConnectorEvent) -> None:
        """Append an event for `poll`."""
        if self._ended is None:
            self._moved.append(moved)
            self._tell()

    def _say(self, event: ControlEvent) -> None:
        if self._ended is None:
            self._tell_node(event)

    def _tell(self) -> None:
        self._wake()
        self._nudge()

    def poll(self) -> list[ConnectorEvent]:
        """Return all events since the last call, in order. May be called from any thread. Raises
        `EngineDied` after a bug in here."""
        if self._broken is not None:
            raise self._broken
        moved: list[ConnectorEvent] = []
        while self._moved:
            moved.append(self._moved.popleft())
        return moved

    def paths(self) -> list[PathState]:
        """State of every path to a peer. May be called from any thread."""
        return self._paths

    def _look_soon(self) -> None:
        """Check the paths at the end of this loop iteration."""
        if not self._looks_soon and self._ended is None:
            self._looks_soon = True
            self._loop.call_soon(self._look_at_paths)

    def _look_at_paths(self) -> None:
        self._looks_soon = False
        if self._look is not None:
            self._look.cancel()
            self._look = None
        if self._ended is not None or self._peer_paths is None:
            return
        states = self._peer_paths.states()
        if states != self._paths:
            self._paths = states
            self._say(PathStates(states))
        if states:
            self._look = self._loop.call_later(_LOOK, self._look_at_paths)


@dataclass(slots=True, eq=False)
class _Done:
    """Reports the end of one delivery."""

    mover: LoopKvConnector
    handle: int
    part: int
    meter: PathMeter
    peer_paths: PeerPaths

    def __call__(self, error: TransferError | None) -> None:
        size = self.meter.ended(asyncio.get_running_loop().time())
        if error is not None:
            self.peer_paths.lost(self.meter)
        self.mover.emit(PartDelivered(self.handle, self.part, size, error))


async def _made(peer_paths: PeerPaths, peer: NodeLife) -> None:
    """Make a path that nothing waits for; a failure shows in the paths' states."""
    with contextlib.suppress(PdserveError):
        await peer_paths.path(peer, in_advance=True)


def _later(peer: NodeLife, than: NodeLife) -> bool:
    """Whether this is another node, or a later epoch of the same."""
    return peer.node != than.node or peer.epoch > than.epoch


def _lost(error: PdserveError, attempt: _Attempt) -> TransferError | NotReady:
    if isinstance(error, NotReady):
        return error
    return _as_transfer(error, attempt.order.transfer, attempt.peer, "open")


def _as_transfer(error: PdserveError, transfer: str, peer: NodeLife, step: str) -> TransferError:
    if isinstance(error, TransferError):
        return error
    return TransferError.at(transfer, str(peer), step, error.message)
