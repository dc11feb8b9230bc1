"""Moves blocks that no request waits for: from a worker that leaves, and to one that is new.

    leaving   push      lists its chains, offers each heir its share, and waits until the heirs have
                        pulled what they want
    heir      OFFER_KV  pulls the offered chains one after the other, within bounds
    new       WARM      asks another worker for its chains, and pulls them in the same way

The receiver decides: it pulls at most a share of its pool, and stops when the time is over. What it
has already is not pulled. Owned by the worker's agent; its tasks are the node's.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from pdserve.errors import PdserveError
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.kv_pull import KvChains, KvTaken, ListKv, OfferKv
from pdserve.runtime.peers.handlers import answers, answers_later
from pdserve.runtime.rpc_methods import LIST_KV, OFFER_KV, WARM
from pdserve.worker.kv_fetch.heirs import divided, heirs

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from typing import Any, Protocol

    from pdserve.engine.kv_pulls import AbsorbResult
    from pdserve.engine.port import Engine
    from pdserve.ids import Seconds
    from pdserve.messages.card import ModelCard
    from pdserve.messages.kv_pull import OfferedChain, WarmUp
    from pdserve.net.base import IncomingCall
    from pdserve.runtime.node import Node
    from pdserve.worker.kv_fetch.service import KvFetchNumbers

    class PushWorker(Protocol):
        """The part of the worker that is used here."""

        @property
        def engine(self) -> Engine: ...

        @property
        def names_id(self) -> bytes: ...

        @property
        def draining(self) -> bool: ...

        def cards(self) -> Mapping[str, ModelCard]: ...


__all__ = ["MAX_LISTED", "MAX_RECEIVING", "PUSH_TIMEOUT", "TAKEN_SHARE", "KvPusher"]

_log = logging.getLogger(__name__)

MAX_LISTED: Final = 1 << 16
"""Most blocks of one offer."""
MAX_RECEIVING: Final = 2
"""Offers and warm-ups in progress at one worker; one more is `busy`."""
_CALLERS: Final = 16
"""Most offers and warm-ups that wait for their answer, those that are refused included."""
TAKEN_SHARE: Final = 0.25
"""Largest share of its pool that a worker pulls for one offer: the rest is what its own requests
have left there."""
PUSH_TIMEOUT: Final[Seconds] = 10.0
"""Longest time that a drain waits for heirs."""
_PAUSE: Final[Seconds] = 0.1
"""Time between two tries while one of the two workers is busy."""
_ANSWER: Final[Seconds] = 2.0
"""Time to list the chains of a worker."""
_REASONS: Final = {
    "absent": "some were not here any more",
    "busy": "it takes blocks from others",
    "cancelled": "it does not want more",
    "closed": "it is leaving, too",
    "corrupt": "some arrived with other bytes",
    "deadline": "the time for leaving was over",
    "epoch": "one of the two has restarted",
    "full": f"more than {100 * TAKEN_SHARE:.0f} % of its pool is not taken for one worker",
    "gone": "the connection was lost",
    "misfit": "it has another model, or cannot take blocks",
    "transfer": "the transfer failed",
    "unready": "its engine is not ready",
}
"""What `KvTaken.refused` means, for the log of the worker that leaves."""
_FINAL: Final = frozenset({"cancelled", "closed", "deadline", "epoch", "gone", "unready"})
"""Reasons after which nothing more of the same worker is tried."""


class KvPusher:
    """Offers, takes and warms up for one worker."""

    def __init__(self, node: Node, worker: PushWorker, numbers: KvFetchNumbers) -> None:
        self._node = node
        self._worker = worker
        self._engine = worker.engine.kv_pulls
        self._numbers = numbers
        self._receiving = 0
        node.host(self)

    # ------------------------------------------------------------------ leaving

    async def push(self, timeout: Seconds) -> int:
        """Offer what is worth keeping to other workers; returns the number of blocks that they have
        pulled. Cancellation: heirs stop at their next block."""
        until = self._node.now() + timeout
        compat_hash, names_id = self._compat_hash(), self._worker.names_id
        able = self._worker.engine.capabilities
        if not compat_hash or able is None:
            return 0
        to = heirs(self._node.registry, compat_hash, names_id, able.transfers)
        if not to:
            return 0
        shares = divided(await self._chains(MAX_LISTED), to)
        taken = await asyncio.gather(
            *(self._offer(heir, chains, until) for heir, chains in shares.items())
        )
        self._numbers.pushed += sum(taken)
        if shares:
            _log.info("%d cached blocks moved; workers asked: %d", sum(taken), len(shares))
        return sum(taken)

    async def _offer(self, heir: NodeLife, chains: KvChains, until: Seconds) -> int:
        left = max(0.001, until - self._node.now())
        offer = OfferKv(
            epoch=heir.epoch,
            compat_hash=self._compat_hash(),
            names_id=self._worker.names_id,
            chains=chains,
            timeout=left,
        )
        try:
            taken = await self._node.ref(*heir).ask(OFFER_KV, offer, timeout=left)
        except PdserveError as error:
            _log.info("%s takes no blocks: %s", heir, error.message)
            return 0
        if taken.refused:
            why = _REASONS.get(taken.refused, taken.refused)
            _log.info("%s took %d of the offered blocks: %s", heir, taken.blocks, why)
        return taken.blocks

    # ------------------------------------------------------------------ receiving

    @answers_later(OFFER_KV, at_once=_CALLERS)
    async def _offered(self, offer: OfferKv, call: IncomingCall) -> KvTaken:
        refused = self._refusal(offer)
        if refused:
            return KvTaken(0, refused)
        until = self._node.now() + offer.timeout
        return await self._receive(lambda: self._take(call.life, offer.chains, until, 0))

    def _refusal(self, asked: OfferKv | ListKv) -> str:
        if asked.epoch != self._node.epoch:
            return "epoch"
        same = asked.compat_hash == self._compat_hash() and asked.names_id == self._worker.names_id
        return "" if same else "misfit"

    @answers_later(WARM, at_once=_CALLERS)
    async def _warm(self, order: WarmUp, call: IncomingCall) -> KvTaken:
        return await self._receive(lambda: self._warmed(order))

    async def _receive(self, work: Callable[[], Coroutine[Any, Any, KvTaken]]) -> KvTaken:
        """Do this work. A worker that leaves takes nothing: a whole cluster may be leaving."""
        if self._worker.draining:
            return KvTaken(0, "closed")
        if self._receiving >= MAX_RECEIVING:
            return KvTaken(0, "busy")
        self._receiving += 1
        try:
            return await work()
        finally:
            self._receiving -= 1

    async def _warmed(self, order: WarmUp) -> KvTaken:
        until = self._node.now() + order.timeout
        link = await self._node.link(NodeId(order.source), timeout=order.timeout)
        source = NodeLife(link.peer.node, link.peer.epoch)
        wanted = ListKv(
            epoch=source.epoch,
            compat_hash=self._compat_hash(),
            names_id=self._worker.names_id,
            blocks=order.blocks or MAX_LISTED,
        )
        listed = await link.request(LIST_KV, wanted, timeout=min(order.timeout, _ANSWER))
        return await self._take(source, listed, until, order.blocks)

    async def _take(self, source: NodeLife, listed: KvChains, until: Seconds, most: int) -> KvTaken:
        """Pull chains, one after the other; `most` blocks at most, 0: as many as the share."""
        capabilities = self._worker.engine.capabilities
        if capabilities is None:
            return KvTaken(0, "unready")
        room = int(TAKEN_SHARE * capabilities.num_blocks)
        room = min(room, most) if most else room
        taken, refused = 0, ""
        for chain in listed.chains:
            if taken >= room:
                refused = "full"
                break
            pulled, error = await self._take_chain(source, chain, until)
            taken += pulled
            refused = error or refused
            if error in _FINAL:
                break
        self._numbers.warmed += taken
        return KvTaken(taken, refused)

    async def _take_chain(
        self, source: NodeLife, chain: OfferedChain, until: Seconds
    ) -> tuple[int, str]:
        """Pull one chain, in several pulls if there is little room; returns how many blocks came
        and why not all."""
        taken = 0
        while True:
            left = until - self._node.now()
            if left <= 0:
                return taken, "deadline"
            result = await self._absorb(source, chain, left)
            taken += result.pulled
            if result.error != "busy":
                return taken, result.error
            if not result.pulled:
                await asyncio.sleep(_PAUSE)

    async def _absorb(
        self, source: NodeLife, chain: OfferedChain, timeout: Seconds
    ) -> AbsorbResult:
        done: asyncio.Future[AbsorbResult] = asyncio.get_running_loop().create_future()
        self._engine.absorb(source, chain, timeout, lambda result: _set(done, result))
        return await done

    # ------------------------------------------------------------------ what there is

    @answers(LIST_KV)
    def _list(self, asked: ListKv, call: IncomingCall) -> KvChains | None:
        if self._refusal(asked):
            return KvChains()
        self._engine.list_chains(min(asked.blocks, MAX_LISTED), call.reply)
        return None

    async def _chains(self, blocks: int) -> KvChains:
        listed: asyncio.Future[KvChains] = asyncio.get_running_loop().create_future()
        self._engine.list_chains(blocks, lambda chains: _set(listed, chains))
        try:
            async with asyncio.timeout(_ANSWER):
                return await listed
        except TimeoutError:
            return KvChains()

    def _compat_hash(self) -> str:
        """What this worker's blocks belong to; empty: it serves no model."""
        return next((card.compat_hash for card in self._worker.cards().values()), "")


def _set(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)
