"""Sets up the KV paths to peers for one epoch of the node: chooses back ends, retries, counts.

    path(peer)    asks for the peer's offers before each set-up, then takes the best common back end
    answer(...)   answers the control calls of peers' transports

Within one epoch the engine may restart, and its transports then reuse the same slot numbers. So
each run of the engine draws a random number, puts it into its tickets and sends it to peers with
`BackendProbe`. Nothing is sent under a ticket of an earlier run. Its transports number their paths
from there, so that no path of a later run has the number that an old ticket names.

`LoopKvConnector` makes one for each (node, epoch) that it is attached to.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from pdserve.engine_core.kv_transfer.path_stats import PathStatsTable
from pdserve.errors import (
    NotReady,
    PathLost,
    PdserveError,
    TransferError,
    TransferRefused,
    TransferTimeout,
)
from pdserve.messages.engine import PathState
from pdserve.messages.transfer import BackendOffers, BackendProbe, PathReady
from pdserve.transfer.path_probe import PROBE_TIME, PathRate, RateProbe
from pdserve.transfer.select_backend import MAX_FAILURES, RETRY_INTERVAL, BackendSelector

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from typing import Any

    from pdserve.engine_core.kv_transfer.control_rpc import ControlRpc
    from pdserve.engine_core.kv_transfer.path_stats import PathMeter, PeerPathStats
    from pdserve.ids import NodeLife, Seconds
    from pdserve.messages.transfer import TransferControl, TransferTicket
    from pdserve.runtime.tasks import Tasks
    from pdserve.transfer.backends import TransferBackend
    from pdserve.transfer.base import KvPath, KvTransport, Region
    from pdserve.transfer.select_backend import BackendChoice

__all__ = ["CONNECT_TIMEOUT", "NO_BACKEND", "READY_TIMEOUT", "PeerPaths"]

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT: Final[Seconds] = 10.0
"""Time to set up a path: three round trips between the nodes."""
READY_TIMEOUT: Final[Seconds] = 3.0
"""Time for this engine's own transports to be ready. Less than a lease, so that the peer is not
blamed for it."""

_LIVES: Final = 1 << 40
_PATHS: Final = 20
"""Bits for the paths of one run of the engine; path numbers have 63."""
NO_BACKEND: Final = "none"
"""Back end reported for a peer to which there is no path."""


@dataclass(slots=True, eq=False)
class _Peer:
    offers: BackendOffers | None = None
    setting_up: asyncio.Task[KvPath | TransferError] | None = None
    told: BackendChoice | None = None
    """The last choice that was logged."""
    failures: int = 0
    """Failures in a row to set up a path."""
    obstacle: str = ""
    """Why no path is possible; empty: there is one, or it is not certain yet."""
    until: Seconds = 0.0
    """Time before which another try is not worth it."""
    wanted: bool = False
    """True once a transfer has waited for a path; then no path is made in advance."""


class PeerPaths:
    """The transports of one epoch of the node, and their paths to peers."""

    def __init__(
        self,
        key: NodeLife,
        regions: Sequence[Region],
        backends: Sequence[TransferBackend],
        offers: BackendOffers,
        rpc: ControlRpc,
        tasks: Tasks,
        changed: Callable[[], None],
        life: int,
    ) -> None:
        """`changed` is called when a path is set up or ends. `life` is the random number of this
        run of the engine."""
        loop = asyncio.get_running_loop()
        self.key = key
        self.life = life
        self.path_stats = PathStatsTable()
        self.ready: asyncio.Future[None] = loop.create_future()
        """Done when the transports are open."""
        self.closing = False
        self._now = loop.time
        self._regions = regions
        self._backends = {b.name: b for b in backends if b.name in offers.places}
        self._offers = offers
        self._choices = BackendSelector([b.name for b in backends], offers)
        self._rpc = rpc
        self._tasks = tasks
        self._changed = changed
        self._transports: dict[str, KvTransport] = {}
        self._peers: dict[NodeLife, _Peer] = {}
        self._lives: dict[NodeLife, int] = {}
        """Number of each peer's engine run, from its last probe."""
        self._answering: Counter[NodeLife] = Counter()
        self._over: set[NodeLife] = set()
        """Peers that died while a call of theirs was being answered."""
        self._rates: dict[str, float] = {}
        """Expected rate of each back end, in bytes/s; 0: not known."""

    # ------------------------------------------------------------------ life

    async def open(self) -> None:
        """Open the transports; returns when all are ready. One that fails is logged and not offered
        to peers."""
        for name, backend in self._backends.items():
            try:
                transport = backend.make(self.key, self._regions, self._rpc.of(name))
                self._transports[name] = transport
                number_from: Callable[[int], None] | None
                number_from = getattr(transport, "number_from", None)
                if number_from is not None:
                    number_from(self.life % _LIVES << _PATHS)
                # The expected rates are read now, before requests need them.
                self._rates[name] = backend.expected()
                opening: Callable[[], Coroutine[Any, Any, None]] | None
                opening = getattr(transport, "open", None)
                if opening is not None:
                    await opening()
            except (PdserveError, OSError, ValueError) as error:
                await self._give_up(name, str(error))
        if not self.ready.done():
            self.ready.set_result(None)

    async def _give_up(self, name: str, reason: str) -> None:
        _log.error("KV cannot be moved over %s, which looked possible: %s", name, reason)
        transport = self._transports.pop(name, None)
        if transport is not None:
            await transport.close()
        places = {key: value for key, value in self._offers.places.items() if key != name}
        lacking = {**self._offers.lacking, name: reason[:500]}
        self._offers = self._choices.ours = BackendOffers(places, lacking)

    async def close(self) -> None:
        """Close every path; on return no byte is read or written any more. Idempotent."""
        self.closing = True
        if not self.ready.done():
            self.ready.set_exception(_error(TransferRefused, self.key, "close", "the epoch ended"))
            # This marks the error as retrieved, since no caller may be waiting for it.
            self.ready.exception()
        for transport in self._transports.values():
            await transport.close()
        self._changed()

    # ------------------------------------------------------------------ paths to peers

    async def path(self, peer: NodeLife, *, in_advance: bool = False) -> KvPath:
        """Return the best path to a peer, and set it up if need be. `in_advance`: no transfer waits
        for it, so it is measured first. Raises `TransferError`, or `NotReady` if this engine's own
        transports are not ready. Cancellation: only this wait ends; the set-up goes on."""
        await self._be_ready()
        known = self._peers.setdefault(peer, _Peer())
        known.wanted |= not in_advance
        if known.setting_up is None:
            known.setting_up = self._tasks.spawn(self._set_up(peer, known), f"path to {peer}")
            known.setting_up.add_done_callback(partial(_forget_task, known))
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                found = await asyncio.shield(known.setting_up)
        except TimeoutError:
            raise _error(
                TransferTimeout, peer, "connect", f"not done in {CONNECT_TIMEOUT:g} s"
            ) from None
        if isinstance(found, TransferError):
            raise found
        return found

    async def _be_ready(self) -> None:
        try:
            async with asyncio.timeout(READY_TIMEOUT):
                await asyncio.shield(self.ready)
        except TimeoutError:
            raise NotReady(
                f"the transports here are not ready after {READY_TIMEOUT:g} s", retry_after=1.0
            ) from None

    async def _set_up(self, peer: NodeLife, known: _Peer) -> KvPath | TransferError:
        """Set up a path. Errors are returned, since any number of callers may wait for them."""
        found = await self._tried(peer, known)
        if not isinstance(found, TransferError):
            known.failures, known.obstacle = 0, ""
        elif not self._is_unreachable(found):
            self._no_way(peer, known, found)
        return found

    async def _tried(self, peer: NodeLife, known: _Peer) -> KvPath | TransferError:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                return await self._best(peer, known)
        except TransferError as error:
            return error
        except TimeoutError:
            return _error(TransferTimeout, peer, "connect", f"not done in {CONNECT_TIMEOUT:g} s")
        except PdserveError as error:
            unreachable = _error(TransferError, peer, "connect", error.message)
            unreachable.__cause__ = error
            return unreachable

    def _no_way(self, peer: NodeLife, known: _Peer, error: TransferError) -> None:
        """Count a failure. A missing common back end is final at once; otherwise each common back
        end must have failed often enough."""
        known.failures += 1
        if known.failures < MAX_FAILURES * self._choices.in_common(known.offers):
            return
        if not known.obstacle:
            # Not always an error: a peer that leaves may be asked for its blocks until its end.
            _log.warning("KV cannot be moved to or from %s: %s", peer, error.message)
        known.obstacle = error.message
        known.until = self._now() + RETRY_INTERVAL
        self._changed()

    def states(self) -> list[PathState]:
        """The state of every path, and of every peer to which there is none."""
        now = self._now()
        return self.path_stats.states(now) + [
            PathState(
                node=peer.node,
                epoch=peer.epoch,
                backend=NO_BACKEND,
                failures=known.failures,
                down=known.obstacle if now < known.until else "",
                degraded=known.obstacle,
            )
            for peer, known in self._peers.items()
            if known.obstacle
        ]

    async def _best(self, peer: NodeLife, known: _Peer) -> KvPath:
        if known.offers is not None:
            choice = self._choices.choose(peer, known.offers, self._now())
            path = self._transports[choice.backend].path(peer)
            if path is not None:
                self._enter(path, known, choice)
                return path
        known.offers = await self._probe(peer)
        choice = self._choices.choose(peer, known.offers, self._now())
        return await self._connect(peer, known, choice)

    async def _probe(self, peer: NodeLife) -> BackendOffers:
        answer = await self._rpc.of("")(peer, BackendProbe(self.life), CONNECT_TIMEOUT)
        if not isinstance(answer, BackendOffers):
            raise _error(TransferRefused, peer, "connect", "it did not say which back ends it has")
        return answer

    async def _connect(self, peer: NodeLife, known: _Peer, choice: BackendChoice) -> KvPath:
        try:
            path = await self._transports[choice.backend].connect(peer, timeout=CONNECT_TIMEOUT)
        except TransferError as error:
            self._connect_failed(peer, choice, error)
            raise
        self.path_stats.meter(path).stats.rate = await self._measured(path, known)
        self._enter(path, known, choice)
        return path

    async def _measured(self, path: KvPath, known: _Peer) -> PathRate:
        """Measure a new path while neither end uses it and no transfer waits for it."""
        probe, reason = RateProbe(), "the path took no time"
        try:
            async with asyncio.timeout(PROBE_TIME):
                while size := probe.next_size():
                    if known.wanted or path.stats.outgoing or path.stats.granted:
                        reason = "a transfer was waiting for the path"
                        break
                    begin = self._now()
                    came = await path.probe(size)
                    probe.add(came, self._now() - begin)
        except TimeoutError:
            reason = f"no probe came within {PROBE_TIME * 1000:g} ms"
        except TransferError as error:
            reason = error.message
        return PathRate(probe.rate) if probe.rate else PathRate(why_not=reason)

    def _connect_failed(self, peer: NodeLife, choice: BackendChoice, error: TransferError) -> None:
        if self._is_unreachable(error):
            return
        _log.warning("%s", error.message)
        self._choices.failed(peer, choice.backend, error.message, self._now())
        self.path_stats.failed(peer, choice.backend)

    def _is_unreachable(self, error: BaseException | None) -> bool:
        """Whether the peer did not answer at all: any other back end would fail the same way."""
        while error is not None:
            if isinstance(error, PdserveError) and not isinstance(error, TransferError):
                return True
            error = error.__cause__
        return False

    def _enter(self, path: KvPath, known: _Peer, choice: BackendChoice) -> None:
        stats = self.path_stats.meter(path).stats
        stats.why = choice.why + self._unchecked(choice.backend)
        stats.degraded = choice.degraded or self._staged(choice.backend, choice.why)
        stats.expected = self._rates[choice.backend]
        if known.told is None or known.told.backend != choice.backend:
            _log.info(
                "KV with %s goes over %s, %s (%s)",
                *(path.peer, path.backend, _rate_words(stats), stats.why),
            )
        known.told = choice
        self._changed()

    def _unchecked(self, backend: str) -> str:
        """What `--verify-kv` cannot check over this back end, for the log and `pdserve status`."""
        in_device = any(region.view is None for region in self._regions)
        return "; device memory: content is not compared" if backend == "rdma" and in_device else ""

    def _staged(self, backend: str, why: str) -> str:
        """Why this end copies its KV through host memory; empty: it does not. No better backend
        joins the two, or another one was asked for by name."""
        if backend != "tcp" or all(region.view is not None for region in self._regions):
            return ""
        return f"KV in GPU memory is copied through host memory, which is slow ({why})"

    # ------------------------------------------------------------------ use and end of paths

    def lost(self, meter: PathMeter) -> None:
        """A transfer has failed. If its path is down, count that against the back end, once."""
        path = meter.path
        if meter.died or path.down is None or self.closing:
            return
        meter.died = True
        self._choices.failed(path.peer, path.backend, path.down.message, self._now())
        self.path_stats.failed(path.peer, path.backend)
        self._changed()

    def worked(self, path: KvPath) -> None:
        """An attempt has arrived in full over this path."""
        self._choices.worked(path.peer, path.backend)

    def existing(self, peer: NodeLife, ticket: TransferTicket) -> KvPath:
        """Return the path that a peer's ticket is for, and no other path to the same peer: the
        peer stops a ticket on its own path only. Raises `PathLost`."""
        transport = self._transports.get(ticket.backend)
        path = None if transport is None else transport.path(peer, ticket.path)
        if path is None:
            raise _error(
                PathLost, peer, "deliver", f"its path over {ticket.backend!r} is not there any more"
            )
        if self._lives.get(peer) != ticket.life:
            raise _error(PathLost, peer, "deliver", "the ticket is from an earlier engine run")
        return path

    async def peer_gone(self, peer: NodeLife) -> None:
        """Close all paths to a peer whose epoch has ended."""
        known = self._peers.pop(peer, None)
        if known is not None and known.setting_up is not None:
            known.setting_up.cancel()
        self._lives.pop(peer, None)
        if self._answering[peer]:
            self._over.add(peer)
        await self._close_paths(peer, f"{peer} is gone")
        self._choices.forget(peer)
        self.path_stats.forget(peer)
        self._changed()

    async def _close_paths(self, peer: NodeLife, reason: str) -> None:
        paths = set(self.path_stats.paths(peer))
        paths |= {path for t in self._transports.values() if (path := t.path(peer)) is not None}
        for path in paths:
            self.path_stats.meter(path).died = True
        for path in paths:
            await path.close(reason)

    # ------------------------------------------------------------------ requests of peers

    async def answer(
        self, peer: NodeLife, backend: str, control: TransferControl
    ) -> TransferControl:
        """Answer a control call of a peer's transport. Raises `TransferError`."""
        self._answering[peer] += 1
        try:
            answer = await self._answered(peer, backend, control)
            if peer in self._over:
                await self._close_paths(peer, f"{peer} is gone")
                self.path_stats.forget(peer)
                raise _error(PathLost, peer, "connect", "it was declared dead meanwhile")
            return answer
        finally:
            self._answering[peer] -= 1
            if not self._answering[peer]:
                del self._answering[peer]
                self._over.discard(peer)

    async def _answered(
        self, peer: NodeLife, backend: str, control: TransferControl
    ) -> TransferControl:
        await asyncio.shield(self.ready)
        if isinstance(control, BackendProbe):
            await self._meet(peer, control.life)
            return self._offers
        transport = self._transports.get(backend)
        if transport is None:
            reason = self._offers.lacking.get(backend, "not offered")
            raise _error(TransferRefused, peer, "connect", f"{backend} cannot be used: {reason}")
        answer = await transport.answer(peer, control)
        path = transport.path(peer)
        if isinstance(control, PathReady) and path is not None:
            stats = self.path_stats.meter(path).stats
            stats.why, stats.expected = "the peer chose it", self._rates[backend]
            lacking = "; ".join(f"{k}: {why} (here)" for k, why in self._offers.lacking.items())
            stats.degraded = self._staged(backend, lacking or stats.why)
            self._changed()
        return answer

    async def _meet(self, peer: NodeLife, life: int) -> None:
        """A peer is about to connect. If its engine has restarted, close the paths to its last
        run."""
        if self._lives.get(peer, life) != life:
            await self._close_paths(peer, "the peer's engine has restarted")
            self._changed()
        self._lives[peer] = life


def _rate_words(stats: PeerPathStats) -> str:
    if stats.rate.rate:
        return f"{stats.rate.rate / 1e9:.2f} GB/s measured"
    return f"about {stats.expected / 1e9:.1f} GB/s" if stats.expected else "rate unknown"


def _forget_task(known: _Peer, task: asyncio.Task[KvPath | TransferError]) -> None:
    known.setting_up = None


def _error(kind: type[TransferError], peer: NodeLife, step: str, reason: str) -> TransferError:
    return kind.at("", str(peer), step, reason)
