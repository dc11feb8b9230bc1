"""Spreads members' cards by version, and large parts of cards by content hash.

Gossip carries only the news that a card has a new version. A node that gets it fetches the card,
first from the peer that sent the news, then from the member itself or any linked peer. So a card
spreads over the same links as its news, once to each node. A card is replaced whole: its version
counts its member's own changes in one epoch.

Parts (a tokenizer, memory descriptors) are fetched only on request, in chunks, from the member or
any linked peer. A part is accepted only if its bytes hash to its name, so any peer may supply it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from pdserve.gossip.events import CardReady, PartFailed, PartReady
from pdserve.gossip.messages import Card, CardReply, CardRequest, PartReply, PartRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.gossip.context import GossipContext
    from pdserve.gossip.messages import MemberRecord
    from pdserve.ids import Epoch, NodeId

__all__ = ["Cards", "part_hash"]


def part_hash(data: bytes) -> bytes:
    """The hash that names a part."""
    return blake2b(data, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class _Held:
    epoch: Epoch
    version: int
    card: Card


@dataclass(slots=True)
class _CardFetch:
    epoch: Epoch
    version: int
    teller: NodeId | None
    asked: NodeId | None = None
    under_way: bool = False


@dataclass(slots=True)
class _PartFetch:
    owner: NodeId
    size: int
    data: bytearray = field(default_factory=bytearray)
    tries: int = 0
    asked: NodeId | None = None
    under_way: bool = False


class Cards:
    """The cards of all members, and the fetches under way."""

    def __init__(self, context: GossipContext, reach: Callable[[NodeId], None]) -> None:
        """`reach` dials a member without a link."""
        self._context = context
        self._reach = reach
        self._held: dict[NodeId, _Held] = {}
        self._fetches: dict[NodeId, _CardFetch] = {}
        self._own_parts: dict[bytes, bytes] = {}
        self._cache: OrderedDict[bytes, bytes] = OrderedDict()
        self._cached = 0
        self._part_fetches: dict[bytes, _PartFetch] = {}

    # ------------------------------------------------------------------------------ cards

    def set_own(self, epoch: Epoch, version: int, card: Card, parts: tuple[bytes, ...]) -> None:
        """Sets this node's card. Errors: `ValueError` if `parts` are not those that the card
        names."""
        named = [(part.hash, part.size) for part in card.parts]
        if named != [(part_hash(data), len(data)) for data in parts]:
            raise ValueError("the parts are not those that the card names")
        self._held[self._context.me] = _Held(epoch, version, card)
        self._own_parts = {part_hash(data): data for data in parts}

    def get(self, node: NodeId) -> Card | None:
        held = self._held.get(node)
        return held.card if held else None

    def learn(self, record: MemberRecord, teller: NodeId | None) -> None:
        """Notes that a member has a card of this version, and fetches it if it is new."""
        held = self._held.get(record.node)
        if held and (held.epoch, held.version) >= (record.epoch, record.card):
            return
        if record.card == 0:
            return
        fetch = self._fetches.get(record.node)
        if fetch and fetch.epoch == record.epoch:
            fetch.version = max(fetch.version, record.card)
            return
        self._fetches[record.node] = _CardFetch(record.epoch, record.card, teller)
        self._pump()

    def drop(self, node: NodeId) -> None:
        """Drops the card of a member whose life has ended, and the fetch for it."""
        self._held.pop(node, None)
        if self._fetches.pop(node, None):
            self._context.agenda.cancel(("card", node))
            self._pump()

    def answer(self, requester: NodeId, request: CardRequest) -> None:
        held = self._held.get(request.node)
        if held and held.epoch == request.epoch and held.version >= request.version:
            reply = CardReply(request.node, request.epoch, held.version, held.card)
        else:
            reply = CardReply(request.node, request.epoch, request.version, None)
        self._context.send(requester, reply)

    def reply(self, sender: NodeId, reply: CardReply) -> None:
        """Handles an answer to a card request. Other answers, and late ones, are ignored: the
        fetch goes on at its deadline."""
        fetch = self._fetches.get(reply.node)
        if fetch is None or fetch.epoch != reply.epoch or fetch.asked != sender:
            return
        if reply.card is None or reply.version < fetch.version:
            # The peer has heard the news too and fetches the card itself: ask again soon.
            self._context.after("card", reply.node, 2 * self._context.config.gossip_interval)
            return
        self._held[reply.node] = _Held(reply.epoch, reply.version, reply.card)
        del self._fetches[reply.node]
        self._context.agenda.cancel(("card", reply.node))
        self._context.emit(CardReady(reply.node, reply.epoch, reply.version, reply.card))
        self._pump()

    def card_due(self, node: NodeId) -> None:
        """Handles the timeout of a request: another peer is asked, after the waiting fetches."""
        fetch = self._fetches.pop(node)
        fetch.under_way = False
        self._fetches[node] = fetch
        self._pump()

    def linked(self) -> None:
        """Handles a new link: fetches that wait for an unlinked peer may proceed. After a rejoin,
        members are known before there are links."""
        links = self._context.links
        for node, card in tuple(self._fetches.items()):
            if card.under_way and card.asked not in links:
                self._context.agenda.cancel(("card", node))
                self.card_due(node)
        for name, part in tuple(self._part_fetches.items()):
            if part.under_way and part.asked not in links:
                self._try_part(name, part)

    def _pump(self) -> None:
        free = self._context.config.card_fetches
        free -= sum(fetch.under_way for fetch in self._fetches.values())
        for node, fetch in self._fetches.items():
            if free <= 0:
                return
            if not fetch.under_way:
                self._ask(node, fetch)
                free -= 1

    def _ask(self, node: NodeId, fetch: _CardFetch) -> None:
        fetch.under_way = True
        fetch.asked = self._source(fetch.teller, node)
        fetch.teller = None
        if fetch.asked is not None:
            self._context.send(fetch.asked, CardRequest(node, fetch.epoch, fetch.version))
        self._context.after("card", node, self._context.config.fetch_timeout)

    def _source(self, first: NodeId | None, second: NodeId) -> NodeId | None:
        links = self._context.links
        for node in (first, second):
            if node is not None and node in links:
                return node
        return self._context.random.choice(list(links)) if links else None

    # ------------------------------------------------------------------------------ parts

    def want(self, owner: NodeId, name: bytes) -> None:
        """Fetches a part that `owner`'s card names; a fetch under way uses the new owner."""
        if name in self._part_fetches:
            self._part_fetches[name].owner = owner
            return
        data = self._part(name)
        if data is not None:
            self._context.emit(PartReady(name, data))
            return
        card = self.get(owner)
        sizes = [part.size for part in card.parts if part.hash == name] if card else []
        if not sizes:
            self._context.emit(PartFailed(name, f"no card of {owner} names this part"))
            return
        self._part_fetches[name] = _PartFetch(owner, sizes[0])
        self._pump_parts()

    def answer_part(self, requester: NodeId, request: PartRequest) -> None:
        data = self._part(request.hash)
        chunk = self._context.config.part_chunk
        if data is not None:
            data = data[request.offset : request.offset + chunk]
        self._context.send(requester, PartReply(request.hash, request.offset, data))

    def part_reply(self, sender: NodeId, reply: PartReply) -> None:
        fetch = self._part_fetches.get(reply.hash)
        if fetch is None or fetch.asked != sender or reply.offset != len(fetch.data):
            return
        if not reply.data and len(fetch.data) < fetch.size:
            self._try_part(reply.hash, fetch)
            return
        fetch.data += reply.data or b""
        fetch.tries = 0
        if len(fetch.data) < fetch.size:
            self._try_part(reply.hash, fetch, source=sender)
        else:
            self._finish_part(reply.hash, bytes(fetch.data))

    def part_due(self, key: str) -> None:
        """Handles the timeout of a request for a chunk."""
        name = bytes.fromhex(key)
        self._try_part(name, self._part_fetches[name])

    def _pump_parts(self) -> None:
        free = self._context.config.card_fetches
        free -= sum(fetch.under_way for fetch in self._part_fetches.values())
        for name, fetch in list(self._part_fetches.items()):
            if free > 0 and not fetch.under_way:
                self._try_part(name, fetch)
                free -= 1

    def _try_part(self, name: bytes, fetch: _PartFetch, source: NodeId | None = None) -> None:
        fetch.under_way = True
        fetch.tries += 1
        if fetch.tries > self._context.config.fetch_tries:
            self._end_part(name, PartFailed(name, f"{fetch.owner} does not send the part"))
            return
        if fetch.owner not in self._context.links:
            self._reach(fetch.owner)
        # The owner has the part. Every third try goes to any linked peer that may have it too,
        # because the owner may be unreachable.
        second = fetch.owner if fetch.tries % 3 else self._context.me
        fetch.asked = self._source(source, second)
        if fetch.asked is not None:
            self._context.send(fetch.asked, PartRequest(name, len(fetch.data)))
        self._context.after("part", name.hex(), self._context.config.fetch_timeout)

    def _finish_part(self, name: bytes, data: bytes) -> None:
        if part_hash(data) != name:
            self._end_part(name, PartFailed(name, "the part's bytes do not match its hash"))
            return
        self._cache[name] = data
        self._cached += len(data)
        while self._cached > self._context.config.part_cache:
            self._cached -= len(self._cache.popitem(last=False)[1])
        self._end_part(name, PartReady(name, data))

    def _end_part(self, name: bytes, effect: PartReady | PartFailed) -> None:
        del self._part_fetches[name]
        self._context.agenda.cancel(("part", name.hex()))
        self._context.emit(effect)
        self._pump_parts()

    def _part(self, name: bytes) -> bytes | None:
        if name in self._cache:
            self._cache.move_to_end(name)
            return self._cache[name]
        return self._own_parts.get(name)
