"""Runs one node of the cluster: its links, its membership, and the actors that it hosts.

    Node      what lasts as long as the process: actors, tasks, the registry, the card
    _Life     what belongs to one epoch: endpoint and gossip. It is replaced whole when peers have
              declared this node dead, so that nothing of the old life acts in the new one

A node ends with `leave` (the others learn of it and stop choosing it), then `close`. It does not
know what messages mean: the actors that it hosts do.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.errors import (
    ConfigError,
    DeadlineExceeded,
    DialFailed,
    Draining,
    LinkLost,
    NameTaken,
    NoCommonVersion,
    NoMethod,
    NotReady,
    OwnAddress,
    WrongCluster,
    WrongClusterKey,
    WrongPeer,
)
from pdserve.gossip import events as ev
from pdserve.gossip.config import GossipConfig
from pdserve.gossip.messages import TELL, Card, CardPart, MemberRecord
from pdserve.gossip.service import PARTS, GossipService
from pdserve.net import address as addresses
from pdserve.net.endpoint import Endpoint
from pdserve.net.settings import NetSettings
from pdserve.net.timers import Timers
from pdserve.runtime.peers.handlers import ActorTable
from pdserve.runtime.peers.local_link import LocalLink, Neighbours
from pdserve.runtime.peers.peer_ref import PeerRef
from pdserve.runtime.registry import Registry
from pdserve.runtime.tasks import Tasks
from pdserve.wire.codec import encode
from pdserve.wire.flow import BodyBudget
from pdserve.wire.handshake import Identity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from random import Random

    from pdserve.ids import Epoch, NodeId, Seconds
    from pdserve.messages.node import NodeCard
    from pdserve.net.base import ByteNetwork, IncomingCall, IncomingStream, Link, LinkDownReason
    from pdserve.runtime.registry import MemberEvent
    from pdserve.wire.parser import Buffer

__all__ = ["Node", "NodeConfig"]

_log = logging.getLogger(__name__)

_HOPELESS: Final[dict[type[DialFailed], str]] = {
    WrongClusterKey: "give both nodes the same key, by --cluster-key-file",
    WrongCluster: "give both nodes the same --cluster",
    NoCommonVersion: "use the same version of pdserve",
    WrongPeer: "give each node a --node-name of its own",
}
"""Errors of a seed that no waiting cures, with the remedy."""
_CARD_LIMIT: Final = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """How a node takes part in the cluster. Addresses are `host:port`."""

    node: NodeId
    role: str
    listen: str = "127.0.0.1:0"
    """Address for peers' links; port 0: any free port."""
    advertise: str = ""
    """Address that peers dial; empty: the listening address. Port 0 stands for the bound port."""
    join: tuple[str, ...] = ()
    """Seeds: addresses of any nodes of the cluster. Empty: this is the first node."""
    cluster: str = "pdserve"
    """Name of the cluster; nodes of another name are refused, whatever their key."""
    leave_timeout: Seconds = 2.0
    """Longest wait for a goodbye, which takes `gossip.config.GossipConfig.leave_linger`. 0: no
    goodbye, for nodes that end together."""
    gossip: GossipConfig = field(default_factory=GossipConfig)
    net: NetSettings = field(default_factory=NetSettings)


class Node:
    """One node. Create it inside the running event loop."""

    def __init__(
        self,
        config: NodeConfig,
        network: ByteNetwork,
        *,
        keys: Callable[[], tuple[bytes, ...]],
        entropy: Callable[[int], bytes],
        random: Random,
        wall: Callable[[], Seconds],
        neighbours: Neighbours | None = None,
    ) -> None:
        """`wall` is the wall clock, which numbers the epochs. `entropy` is for nonces, `random` for
        what a simulation must repeat. `neighbours`: the nodes of this process."""
        self.id = config.node
        self.config = config
        self.random = random
        self.registry = Registry()
        self.tasks = Tasks(
            f"node {config.node}", self._task_failed, lambda words: self.on_stuck(words)
        )
        self.card: NodeCard | None = None
        self._names: tuple[bytes, int] = (b"", 0)
        self.lives = 0
        """Number of lives that the node has begun; above 1, others declared it dead."""
        self._network = network
        self._keys = keys
        self._entropy = entropy
        self._wall = wall
        self.on_superseded: Callable[[str], None] = lambda reason: None
        """Hears why this node can take part no more: another process has its name."""
        self.on_stuck: Callable[[str], None] = lambda words: None
        """Hears which of its tasks do not end when it closes."""
        self._loop = asyncio.get_running_loop()
        self._epoch: Epoch = 0
        self._listen = config.listen
        self._parts: dict[bytes, bytes] = {}
        self._life: _Life | None = None
        self._joined: asyncio.Future[None] = self._loop.create_future()
        """The future that `start` waits for, through more than one life if the first was
        declared dead."""
        self._past: dict[_Life, None] = {}
        """Lives that are over and not closed yet."""
        self._closed = False
        self.bodies = BodyBudget(config.net.requests)
        """Budget for the bodies of peers' open requests, over all lives."""
        self._refused: Counter[str] = Counter()  # of earlier lives
        self.actors = ActorTable(self.tasks)
        self._neighbours = neighbours or Neighbours()
        self.actors.streams[PARTS] = lambda stream, body: self._living().gossip.opened(stream, body)
        self._fetching: dict[bytes, asyncio.Future[bytes]] = {}
        self.timers = Timers(self._loop)
        """Deadlines and intervals of whatever lives on this node; they end with it."""

    # ------------------------------------------------------------------ looking

    @property
    def epoch(self) -> Epoch:
        """The present epoch; 0 before `start`."""
        return self._epoch

    @property
    def joined(self) -> bool:
        """True once it has its seeds' member table, or knows that it is alone."""
        return self._life is not None and self._life.joined

    @property
    def address(self) -> str:
        """Address at which peers dial this node."""
        return "" if self._life is None else self._life.endpoint.identity.address

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint of the present life. Errors: `NotReady` without one."""
        return self._living().endpoint

    @property
    def links(self) -> int:
        """Peers with a link."""
        return 0 if self._life is None else len(self._life.endpoint.links)

    def handshakes_refused(self) -> dict[str, int]:
        """Refused connections over all lives, by error class."""
        present = Counter({} if self._life is None else self._life.endpoint.refused)
        return dict(self._refused + present)

    def now(self) -> Seconds:
        """The event loop's time."""
        return self._loop.time()

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call at the end of this turn of the event loop."""
        self._loop.call_soon(callback)

    # ------------------------------------------------------------------ what it serves

    def host(self, actor: object) -> None:
        """Serve what the actor's methods declare: see `runtime.peers.handlers`."""
        self.actors.host(actor)

    def on_member(self, listener: Callable[[MemberEvent], None]) -> Callable[[], None]:
        """Call `listener` on every change of membership, beginning with the present members.
        Returns a function that ends it."""
        return self.registry.listen(listener)

    # ------------------------------------------------------------------ taking part

    async def start(self, *, beside: tuple[str, ...] = ()) -> None:
        """Listen and join; returns once this node has its seeds' member table or knows that it is
        alone. `beside`: more seeds, unknown when the node was configured.

        Errors: `ConfigError` for an address that cannot be listened on; `WrongClusterKey`,
        `WrongCluster`, `NoCommonVersion` or `WrongPeer` from a seed.
        """
        epoch = max(int(self._wall() * 1000), self._epoch + 1)
        await self._begin(epoch, ev.StartGossip((*self.config.join, *beside)))
        await self._joined
        _log.debug("%s joined as life %d", self.id, self._epoch)

    def _give_up(self, error: BaseException) -> bool:
        """End a `start` that still waits, with `error`; False if there is none."""
        if self._joined.done():
            return False
        self._joined.set_exception(error)
        self._joined.exception()  # only `start` looks, and it may be over
        return True

    async def leave(self) -> None:
        """Say goodbye, and wait until the others can have heard it."""
        life = self._life
        timeout = self.config.leave_timeout
        if life is None or life.over or not len(self.registry) or not timeout:
            return
        life.gossip.leave()
        await asyncio.wait({life.stopped}, timeout=timeout)

    async def close(self, *, grace: Seconds = 0.0) -> None:
        """End links and tasks. `grace`: seconds that calls in flight have to finish. Idempotent.

        Members are reported as gone, so that waits for them end.
        """
        self._closed = True
        self.timers.close()
        await self.tasks.close()
        self._neighbours.leave(self, f"{self.id} was closed")
        for life in tuple(self._past):  # its end may have been cut short just now
            await life.close()
        if self._life is not None:
            await self._life.close(grace=grace)
            self._life = None
        self._past.clear()
        self.registry.clear("closed")
        self._stop_fetching("this node is shutting down")
        self._give_up(Draining("the node was closed before it had joined", retry_after=1.0))

    def publish_card(self, card: NodeCard, parts: Mapping[bytes, bytes]) -> None:
        """Publish this node's card; `parts` are the contents that the card names by hash. Errors:
        `ConfigError` if the card is too large."""
        names_id, birth = self._names
        card = replace(card, names_id=names_id, names_birth=birth)
        body = encode(card)
        if len(body) > _CARD_LIMIT:
            raise ConfigError(
                f"this node's card has {len(body)} bytes, {_CARD_LIMIT} at most: serve fewer "
                "models or aliases from one worker"
            )
        self.card = card
        self._parts = dict(parts)
        if self._life is not None and not self._life.over:
            self._tell_card(self._life)

    def publish_names(self, names_id: bytes, birth: int) -> None:
        """Publish which hash secret this node holds, in this card and all later ones."""
        if self._names == (names_id, birth):
            return
        self._names = (names_id, birth)
        if self.card is not None:
            self.publish_card(self.card, self._parts)

    def _tell_card(self, life: _Life) -> None:
        if self.card is not None:
            named = tuple(CardPart("", name, len(data)) for name, data in self._parts.items())
            life.gossip.set_card(Card(encode(self.card), named), tuple(self._parts.values()))

    # ------------------------------------------------------------------ reaching others

    def link_nowait(self, node: NodeId) -> Link | None:
        """The present link to a member, or None; it may be closing."""
        life = self._life
        return None if life is None else life.endpoint.link(node)

    def ref(self, node: NodeId, epoch: Epoch | None = None) -> PeerRef:
        """A reference to another node, or to one life of it: the way to ask and tell it."""
        return PeerRef(self, node, epoch)

    async def link(self, node: NodeId, *, timeout: Seconds) -> Link:
        """The link to a member, dialled if there is none.

        Errors: `LinkLost` (not sent) if it is no member, `DialFailed`, `DeadlineExceeded`.
        Cancellation: ends only this wait.
        """
        found = self.link_nowait(node)
        if found is not None and not found.retiring:
            return found
        member = self.registry.get(node)
        if member is None or not member.address:
            raise LinkLost(f"{node} is not in the cluster", sent=False)
        try:
            async with asyncio.timeout(timeout):
                return await self.endpoint.dial(member.address, expect=node)
        except TimeoutError:
            raise DeadlineExceeded(f"no connection to {node} within {timeout:g} s") from None

    def local_link(self, node: NodeId) -> LocalLink | None:
        """The way to a member in this process; None: it is in another one."""
        found = self._neighbours.link(self, node)
        if found is None:
            return None
        member = self.registry.get(node)
        return found if member is not None and member.epoch == found.peer.epoch else None

    async def part(self, owner: NodeId, hash: bytes, *, timeout: Seconds) -> bytes:
        """Fetch a large part of a member's card; concurrent callers share one fetch.

        Errors: `LinkLost` if no node has it, `DeadlineExceeded`. Cancellation: ends only this wait.
        """
        life = self._life
        if life is None or life.over:
            raise LinkLost("this node is not in the cluster", sent=False)
        waiting = self._fetching.get(hash)
        if waiting is None:
            waiting = self._fetching[hash] = self._loop.create_future()
        life.gossip.want_part(owner, hash)  # a fetch under way turns to this owner
        await asyncio.wait({waiting}, timeout=timeout)
        if not waiting.done():
            raise DeadlineExceeded(f"a part of {owner}'s card did not arrive within {timeout:g} s")
        return waiting.result()

    def _stop_fetching(self, reason: str) -> None:
        """Fail all fetches: no life is left that could complete them."""
        for hash in tuple(self._fetching):
            self._part_settled(hash, LinkLost(reason, sent=False))

    # ------------------------------------------------------------------ lives

    def _living(self) -> _Life:
        if self._life is None:
            raise NotReady("this node is not in the cluster", retry_after=1.0)
        return self._life

    async def _begin(self, epoch: Epoch, start: ev.StartGossip) -> None:
        """Begin a life. It listens first, since the address is part of the node's identity."""
        self._epoch = epoch
        life = _Life(self, epoch)
        try:
            await life.listen(self._listen)
        except BaseException:
            await life.close()
            raise
        if self._closed:  # meanwhile; `close` has ended `start`
            await life.close()
            return
        # The same port for every life: others look for this node there.
        self._listen = life.listening
        self._life = life
        self.lives += 1
        self._neighbours.enter(self)
        self._tell_card(life)
        life.gossip.start(start)

    async def _rejoin(self, effect: ev.Rejoin) -> None:
        """Peers have declared this life dead and dropped its state; drop it here too, and begin
        another."""
        old, self._life = self._life, None
        self._neighbours.leave(self, f"{self.id} begins another life")
        self.registry.clear("own rejoin")
        self._stop_fetching("this node rejoins with a new epoch")
        if old is not None:
            self._past[old] = None
            await old.close()
            del self._past[old]
            self._refused.update(old.endpoint.refused)
        epoch = max(int(self._wall() * 1000), effect.above + 1)
        _log.warning("peers declared this node dead: rejoining with epoch %d", epoch)
        await self._begin(epoch, effect.start)

    # ------------------------------------------------------------------ from below

    def take(self, life: _Life, effect: ev.Effect) -> None:
        """Apply an effect of gossip that concerns more than links."""
        if life is not self._life or self._closed:
            return
        if isinstance(effect, ev.TableReady):
            if effect.alone and set(self.config.join) - life.own - {self.address}:
                why = "; ".join(life.troubles.values()) or "no answer"
                _log.warning(
                    "no seed accepted this node (%s): it runs alone and keeps retrying", why
                )
            life.ready()
            if not self._joined.done():
                self._joined.set_result(None)
        elif isinstance(effect, ev.Rejoin):
            life.over = True
            _ = self.tasks.spawn(self._rejoin(effect), "rejoin")
        elif isinstance(effect, ev.Superseded):
            self._superseded(life)
        elif isinstance(effect, ev.GossipStopped):
            life.stop()
        elif isinstance(effect, ev.PartReady):
            self._part_settled(effect.hash, effect.data)
        elif isinstance(effect, ev.PartFailed):
            self._part_settled(effect.hash, LinkLost(effect.reason, sent=False))
        elif isinstance(effect, ev.TableFull):
            _log.warning("the member table is full: %s was refused", effect.node)
        else:
            self.registry.feed(effect)

    def _superseded(self, life: _Life) -> None:
        life.over = True
        reason = f"another process takes part as {self.id}: give each node a name of its own"
        _log.error("%s", reason)
        self._give_up(WrongPeer(reason))
        self.on_superseded(reason)

    def _part_settled(self, hash: bytes, result: bytes | LinkLost) -> None:
        waiting = self._fetching.pop(hash, None)
        if waiting is None or waiting.done():
            return
        if isinstance(result, LinkLost):
            waiting.set_exception(result)
            waiting.exception()  # marks it as seen, since maybe no task waits any more
        else:
            waiting.set_result(result)

    def _task_failed(self, name: str, error: BaseException) -> None:
        if name == "rejoin":
            self._give_up(error)
            self.on_superseded(f"this node cannot rejoin: {error}")

    def dial_failed(self, life: _Life, address: str, error: DialFailed) -> None:
        """A dial failed. Some errors of a seed end the join; a taken name ends this life."""
        _log.debug("dialling %s failed: %s", address, error)
        if isinstance(error, OwnAddress):
            life.own.add(address)
        elif address in self.config.join:
            life.troubles[address] = error.message
        if isinstance(error, NameTaken) and self._joined.done():
            if life is self._life and not life.over:
                self._superseded(life)
            return
        remedy = next((text for kind, text in _HOPELESS.items() if isinstance(error, kind)), None)
        if remedy is not None and address in self.config.join:
            named = type(error)(f"cannot join through {address}: {error.message}; {remedy}")
            if not self._give_up(named) and address not in life.complained:
                life.complained.add(address)  # it lives on without that seed
                _log.warning("%s", named.message)

    # ------------------------------------------------------------------ net.base.Handler

    def on_link_up(self, link: Link) -> None:
        """Tell gossip of a new link."""
        # A peer without an address is a visitor: it sends requests and is no member.
        if self._life is not None and link.peer.address:
            self._life.gossip.link_up(link)

    def on_link_down(self, link: Link, down: LinkDownReason) -> None:
        """Tell gossip that a link has closed, unless another one to the same life is up."""
        life = self._life
        if life is not None:
            now = life.endpoint.link(link.peer.node)
            if now is None or now.peer.epoch != link.peer.epoch:
                orderly = down.cause == "shutdown"
                life.gossip.link_down(link.peer.node, link.peer.epoch, orderly=orderly)

    def on_tell(self, link: Link, method: int, body: Buffer) -> None:
        """Pass a one-way message to its handler; messages of unknown methods are dropped."""
        if method == TELL:
            self._hear_gossip(link, body)
            return
        hear = self.actors.notices.get(method)
        if hear is None:
            _log.debug(
                "a one-way message of %s has the unknown method %d; dropped", link.peer.node, method
            )
        else:
            hear(link.peer, body)

    def on_request(self, call: IncomingCall) -> None:
        """Pass a request to its handler. Errors: `NoMethod` if there is none."""
        answer = self.actors.answers.get(call.method)
        if answer is None:
            raise NoMethod(f"method {call.method} is not served by {self.config.role} nodes")
        answer(call)

    def on_stream(self, stream: IncomingStream, method: int, body: Buffer) -> None:
        """Pass a new stream to its handler. Errors: `NoMethod` if there is none."""
        opened = self.actors.streams.get(method)
        if opened is None:
            raise NoMethod(f"no stream of method {method} at {self.config.role} nodes")
        opened(stream, body)

    def _hear_gossip(self, link: Link, body: Buffer) -> None:
        """Pass a gossip message to the present life. Between two lives, messages on old links are
        dropped."""
        if self._life is not None:
            self._life.gossip.told(link, body)

    def keys_changed(self) -> None:
        """Use the new cluster keys from now on (`Endpoint.keys_changed`)."""
        if self._life is not None:
            self._life.endpoint.keys_changed()

    # ------------------------------------------------------------------ for a life

    def make_endpoint(self, epoch: Epoch, address: str) -> Endpoint:
        """Create the endpoint of a life."""
        return Endpoint(
            Identity(self.config.cluster, self.id, epoch, address),
            self,
            self._network,
            keys=self._keys,
            entropy=self._entropy,
            settings=self.config.net,
            bodies=self.bodies,
        )


class _Life:
    """One epoch of a node."""

    def __init__(self, node: Node, epoch: Epoch) -> None:
        loop = asyncio.get_running_loop()
        self.over = False
        self.troubles: dict[str, str] = {}
        """What each seed's last dial ended with."""
        self.own: set[str] = set()
        """Seeds that have led back to this node."""
        self.complained: set[str] = set()
        """Seeds that will not have us, once each in the log."""
        self.joined = False
        self.stopped: asyncio.Future[None] = loop.create_future()
        self.listening = ""
        self.endpoint = node.make_endpoint(epoch, "")
        self.gossip: GossipService
        self._node = node
        self._epoch = epoch

    async def listen(self, address: str) -> None:
        """Begin to accept peers. Errors: `ConfigError`."""
        node = self._node
        self.listening = await self.endpoint.listen(address)
        advertised = addresses.advertised(node.config.advertise, self.listening)
        self.endpoint.identity = Identity(node.config.cluster, node.id, self._epoch, advertised)
        me = MemberRecord(node.id, self._epoch, address=advertised, role=node.config.role)
        self.gossip = GossipService(
            me,
            self.endpoint,
            node.config.gossip,
            node.random,
            on_effect=lambda effect: node.take(self, effect),
            on_dial_failed=lambda where, error: node.dial_failed(self, where, error),
        )

    def ready(self) -> None:
        self.joined = True

    def stop(self) -> None:
        self.over = True
        if not self.stopped.done():
            self.stopped.set_result(None)

    async def close(self, *, grace: Seconds = 0.0) -> None:
        if hasattr(self, "gossip"):
            await self.gossip.close()
        await self.endpoint.close(grace=grace)
        if not self.stopped.done():
            self.stopped.set_result(None)
