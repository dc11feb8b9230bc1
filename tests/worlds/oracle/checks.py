"""Checks of a simulated cluster: during faults, after them, and at its end.

Each check reads the nodes from outside, changes nothing, and yields a sentence per violation. A run
that does not settle prints these sentences, so that it says what it waits for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.blocks.hashing import short_hashes
from pdserve.engine_core.core import EngineCore
from pdserve.ids import NodeLife
from pdserve.messages.kv_events import KV, SHORT_HASH_BYTES
from pdserve.messages.routing import BOOKINGS, LOAD, SEQUENCES
from pdserve.router.bookings import BookedLoad
from pdserve.runtime.topics.service import LogTopic, StateTopic
from pdserve.runtime.topics.subscription import LogFollower, StateFollower
from pdserve.worker.disagg.queue.client import PrefillQueueClient
from tests.worlds.roles import Frontend, Router, Worker
from tests.worlds.virtual_tiers import blocks_below, names_below, what_tiers_hold

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.router.prefix_index.index import PrefixIndex
    from pdserve.runtime.topics.service import Topics
    from tests.worlds.world import VirtualHost, World

__all__ = ["at_rest", "membership", "pool_chains", "ready", "undisturbed_handoffs", "unfinished"]


def membership(world: World) -> Iterator[str]:
    """Every node knows exactly the live nodes, in their present life."""
    truth = {h.part.node.id: h.part.node.epoch for h in _up(world) if h.part is not None}
    for host in _up(world):
        assert host.part is not None
        node = host.part.node
        seen = {member.node: member.epoch for member in node.registry} | {node.id: node.epoch}
        for who in sorted(truth.keys() | seen.keys()):
            if truth.get(who) != seen.get(who):
                wanted, found = _life(truth.get(who)), _life(seen.get(who))
                yield f"{host.name} has {found} for {who}, it is {wanted}"
        for member in node.registry:
            if member.suspect:
                yield f"{host.name} still suspects {member.node}"


def ready(world: World) -> Iterator[str]:
    """Every node serves, and all other nodes know it."""
    cards = {h.part.node.id: h.part.node.card for h in _up(world) if h.part is not None}
    for host in _up(world):
        assert host.part is not None
        if isinstance(host.part, Worker) and (why := host.part.service.unready_reason()):
            yield f"worker {host.name} is not ready: {why}"
        if isinstance(host.part, Frontend) and (why := host.part.backend.unready_reason()):
            yield f"frontend {host.name} is not ready: {why}"
        for member in host.part.node.registry:
            card = cards.get(member.node)
            if card is None or card != member.card:
                yield f"{host.name} has an old card of {member.node}"


def _life(epoch: int | None) -> str:
    return "nobody" if epoch is None else f"life {epoch}"


def unfinished(world: World) -> Iterator[str]:
    """Requests that have not ended, each with where it stands."""
    for account in world.accounts:
        age = world.loop.time() - account.began
        yield (
            f"request {account.name} is {account.stage} for {age:.1f} s, "
            f"{account.tokens} tokens received"
        )


def at_rest(world: World) -> Iterator[str]:
    """No request runs, and everything that belonged to requests is released."""
    yield from unfinished(world)
    for host in _up(world):
        if not host.ready:
            yield f"{host.name} has not come up"
        if isinstance(host.part, Router):
            yield from _router(world, host, host.part)
        elif isinstance(host.part, Worker):
            yield from _worker(host, host.part)
            yield from _engine(world, host, host.part)
        elif isinstance(host.part, Frontend):
            yield from _frontend(host, host.part)
        yield from _links(host)


def _router(world: World, host: VirtualHost, router: Router) -> Iterator[str]:
    core, bookings = router.service.core, router.service.core.bookings
    for model, queue in router.service.prefill.states().items():
        if queue.waiting or queue.claimed:
            yield f"router {host.name} queues {queue.waiting} and {queue.claimed} of {model}"
    if core.held:
        yield f"router {host.name} holds {core.held} questions"
    if len(bookings):
        yield f"router {host.name} keeps {len(bookings)} bookings"
    for other in _up(world):
        if isinstance(other.part, Worker):
            charge = bookings.load(other.part.node.id)
            if charge != BookedLoad(0, 0):
                yield f"router {host.name} charges {other.name} {charge}"
            prefills = bookings.prefills(other.part.node.id)
            if prefills.requests or prefills.work or prefills.tokens or prefills.strangers:
                yield f"router {host.name} expects first tokens of {other.name}: {prefills}"
            yield from _follows(host, router.topics, other, SEQUENCES, other.part.topics)
            yield from _follows(host, router.topics, other, LOAD, other.part.topics)
            yield from _follows(host, router.topics, other, KV, other.part.topics)
            index = router.service.core.index
            yield from _indexed(f"{host.name} of {other.name}", index, other.part)
        elif isinstance(other.part, Router) and other is not host:
            yield from _follows(host, router.topics, other, BOOKINGS, other.part.topics)
    try:
        core.check()
    except AssertionError as error:
        yield f"the ledger of {host.name} contradicts itself: {error}"
    yield from _index(world, host, router.service.core.index)


def _index(world: World, host: VirtualHost, index: PrefixIndex) -> Iterator[str]:
    """The index knows the live workers, and all its blocks belong to one of them."""
    nodes = [h.part.node for h in _up(world) if isinstance(h.part, Worker)]
    lives = {NodeLife(node.id, node.epoch) for node in nodes}
    if index.lives != lives:
        yield f"the index of {host.name} knows {sorted(index.lives)}, there are {sorted(lives)}"
    try:
        index.check()
    except AssertionError as error:
        yield f"the index of {host.name} contradicts itself: {error}"


def _indexed(where: str, index: PrefixIndex, worker: Worker) -> Iterator[str]:
    """What a router knows of a worker's pool and its lower tiers is what is in them."""
    chains = list(pool_chains(worker))
    node = worker.node.id
    known, held = index.known_blocks(node), _held(worker)
    if known != held:
        yield f"the index at {where} knows {known} blocks, its pool holds {held}"
    for chain in chains:
        life = NodeLife(node, worker.node.epoch)
        found = index.holders(chain).get(life, (0, 0))
        wanted = _on_device(worker, chain), len(chain) // SHORT_HASH_BYTES
        if found != wanted:
            yield f"the index at {where} finds {found} of a chain of {wanted} (device, all) blocks"


def pool_chains(worker: Worker) -> Iterator[bytes]:
    """Short names of every chain in the pool and on lower tiers, from its first block to a leaf."""
    core = worker.engine.core
    if not isinstance(core, EngineCore):
        return
    parents = core.pool.names() | names_below(core)
    for leaf in parents.keys() - set(parents.values()):
        chain = [leaf]
        while (parent := parents[chain[-1]]) in parents:
            chain.append(parent)
        yield short_hashes(b"".join(reversed(chain)))


def _on_device(worker: Worker, chain: bytes) -> int:
    """Leading blocks of a chain that are on the device."""
    core = worker.engine.core
    assert isinstance(core, EngineCore)
    joined = short_hashes(b"".join(core.pool.names()))
    there = set(_split(joined))
    return next(
        (i for i, name in enumerate(_split(chain)) if name not in there),
        len(chain) // SHORT_HASH_BYTES,
    )


def _split(names: bytes) -> Iterator[bytes]:
    for start in range(0, len(names), SHORT_HASH_BYTES):
        yield names[start : start + SHORT_HASH_BYTES]


def _held(worker: Worker) -> int:
    """Number of blocks, one for each tier that has it."""
    core = worker.engine.core
    if not isinstance(core, EngineCore):
        return 0
    return len(core.pool.names()) + blocks_below(core)


def _follows(
    host: VirtualHost, topics: Topics, publisher: VirtualHost, name: str, published: Topics
) -> Iterator[str]:
    """What `host` has of a topic is what its publisher has."""
    assert publisher.part is not None
    following = topics.following(name, publisher.part.node.id)
    source = published.published(name)
    where = f"{host.name} on {name!r} of {publisher.name}"
    if isinstance(following, LogFollower) and isinstance(source, LogTopic):
        if following.reader.target.digest() != source.digest():
            yield f"{where}: another state than the publisher's"
    elif isinstance(following, StateFollower) and isinstance(source, StateTopic):
        if following.last != source.value:
            yield f"{where}: the value is not the last one"
    else:
        yield f"{where}: not followed"


def _worker(host: VirtualHost, worker: Worker) -> Iterator[str]:
    held = worker.topics.published(SEQUENCES)
    assert isinstance(held, LogTopic)
    if held.digest():
        yield f"worker {host.name} says that it holds bookings"
    if worker.agent.requests:
        yield f"worker {host.name} keeps {worker.agent.requests} requests"
    stats = worker.engine.stats()
    if stats.running or stats.waiting:
        yield f"the engine of {host.name} keeps {stats.running + stats.waiting} sequences"
    if stats.blocks_used:
        yield f"the engine of {host.name} keeps {stats.blocks_used} blocks"
    if stats.blocks_quarantined:
        yield f"the engine of {host.name} has {stats.blocks_quarantined} blocks in quarantine"
    if stats.remote or stats.sending:
        yield f"the engine of {host.name} waits for {stats.remote} and sends {stats.sending}"
    if worker.agent.decode is not None and len(worker.agent.decode):
        yield f"worker {host.name} keeps {len(worker.agent.decode)} handoffs"
    queue = None if worker.agent.decode is None else worker.agent.decode.queue
    if isinstance(queue, PrefillQueueClient) and len(queue):
        yield f"worker {host.name} keeps {len(queue)} items of the prefill queue"
    if worker.agent.prefill is not None and len(worker.agent.prefill):
        yield f"worker {host.name} keeps {len(worker.agent.prefill)} claims"


def _engine(world: World, host: VirtualHost, worker: Worker) -> Iterator[str]:
    """All reservations and paths of an engine belong to a request or a live node."""
    core = worker.engine.core
    if isinstance(core, EngineCore):
        if held := what_tiers_hold(core):
            yield f"the tiers of {host.name} keep {held}"
        reservations = core.scheduler.reservations
        if len(reservations) or reservations.unfilled or reservations.unbound:
            words = f"{len(reservations)} reservations of {reservations.unfilled} blocks"
            yield f"the engine of {host.name} keeps {words}, {reservations.unbound} unbound"
    lives = {(h.part.node.id, h.part.node.epoch) for h in _up(world) if h.part is not None}
    for path in worker.engine.paths():
        if (path.node, path.epoch) not in lives:
            yield f"the engine of {host.name} has a path to {path.node}/{path.epoch}, who is gone"


def undisturbed_handoffs(world: World) -> Iterator[str]:
    """Nothing has gone wrong, so no handoff has come to nothing but by its client's will."""
    for host in _up(world):
        if isinstance(host.part, Worker) and host.part.agent.decode is not None:
            for outcome, count in host.part.agent.decode.tally.attempts.items():
                if outcome not in ("done", "unwanted"):
                    yield f"{count} attempts at {host.name} were {outcome}"


def _frontend(host: VirtualHost, frontend: Frontend) -> Iterator[str]:
    if frontend.backend.requests:
        yield f"frontend {host.name} keeps {frontend.backend.requests} requests"


def _links(host: VirtualHost) -> Iterator[str]:
    """Nothing waits on any link, and no credit is held by streams that are over."""
    assert host.part is not None
    life = host.part.node._life
    if life is None:
        return
    for node in life.gossip.machine.targets:
        if life.endpoint.link(node) is None:
            yield f"{host.name} watches {node} and has no link to it"
    for link in host.part.node.endpoint.links.values():
        stats = link.stats()
        where = f"the link of {host.name} to {link.peer.node}"
        if stats.serving:
            yield f"{where}: {stats.serving} requests unanswered"
        if stats.unsent_bytes:
            yield f"{where}: {stats.unsent_bytes} bytes unsent"
        if stats.granted and not stats.streams:
            yield f"{where}: {stats.granted} credit granted without a stream"
        connections = [link.connection, *([link.bulk.connection] if link.bulk else [])]
        for stream in (one for connection in connections for one in connection.streams()):
            occupied = stream.window - stream.allowance - stream.spent
            if stream.receiving and stream.listening and occupied:
                yield f"{where}: {occupied} of the credit of stream {stream.id} has not come back"


def _up(world: World) -> list[VirtualHost]:
    return [host for host in world.hosts.values() if host.up and host.part is not None]
