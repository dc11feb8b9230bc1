"""A decode worker, prefill workers and a queue in one process: the drivers are real, so are nodes,
membership and messages; engines, KV and the queue are played.

Each worker is a process of its own on one loop in virtual time: it can be killed, or stand still.
The played engine keeps account of every handle, attempt and byte, so that a test can see whether
what was decoded is what was sent for it, and whether anything is left in the end.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pdserve.errors import EngineDied, NotReady, Overloaded, PdserveError, TransferError
from pdserve.ids import NodeId
from pdserve.messages.card import ModelCard
from pdserve.messages.engine import EngineCapabilities, EngineStats, PathState
from pdserve.messages.handoff import FirstToken, Handoff, PrefillItem, QueueState
from pdserve.messages.node import NodeCard
from pdserve.messages.request import (
    Finish,
    FirstTokenStats,
    GenerateRequest,
    SamplingParams,
    TokenDelta,
)
from pdserve.messages.transfer import TransferTicket
from pdserve.net.transport.memory import MemoryWorld
from pdserve.observe.metrics import Metrics
from pdserve.runtime.node import Node, NodeConfig
from pdserve.token_ids import token_ids
from pdserve.worker.disagg.decode_handler import DecodeHandler
from pdserve.worker.disagg.policy import DisaggPolicy
from pdserve.worker.disagg.prefill_handler import PrefillHandler
from tests.support.net_support import KEY
from tests.worlds.loop import VirtualProcess, WorldLoop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pdserve.engine.port import PrefillSink, RemotePrefillSink, TokenSink
    from pdserve.messages.tiers import CachedSource

BLOCK = 8
CARD = ModelCard(
    name="m",
    aliases=("alias",),
    max_model_len=4096,
    vocab_size=100,
    block_size=BLOCK,
    tokenizer_json=b"",
    compat_hash="same",
)
CAPABILITIES = EngineCapabilities(
    engine="played",
    model_type="played",
    dtype="float32",
    device="cpu",
    max_model_len=4096,
    vocab_size=100,
    block_size=BLOCK,
    num_blocks=1000,
    block_bytes=1,
    max_batch_tokens=256,
    max_sequences=16,
    transfers=("fake",),
    compat_hash="same",
)


def request(
    name: str = "r", *, prompt: int = 100, deadline: float | None = None, **fields: Any
) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        model="m",
        prompt=token_ids([7] * prompt),
        sampling=SamplingParams(max_tokens=3),
        deadline=deadline,
        **fields,
    )


class Client:
    """Whoever waits for a request."""

    def __init__(self, asked: GenerateRequest) -> None:
        self.request = asked
        self.handle = 0
        self.tokens: Counter[int] = Counter()
        self.started: list[FirstTokenStats] = []
        self.ended = 0
        self.error: PdserveError | None = None
        self.cancelled = False
        self.problems: list[str] = []
        self.asked = 0.0
        self.ends: float | None = None
        """When it was over."""
        self.clock: Callable[[], float] = lambda: 0.0

    def on_delta(self, delta: TokenDelta) -> None:
        if self.cancelled or self.over:
            self.problems.append(f"{self.request.request_id}: a delta after the end")
        self.tokens[delta.choice] += len(delta.tokens)
        if delta.started is not None:
            self.started.append(delta.started)
        self.ended += delta.finish is not None
        self.ends = self.clock()

    def on_error(self, error: PdserveError) -> None:
        if self.cancelled or self.over:
            self.problems.append(f"{self.request.request_id}: an error after the end")
        self.error = error
        self.ends = self.clock()

    @property
    def over(self) -> bool:
        return self.error is not None or self.ended == self.request.n

    @property
    def where(self) -> str:
        return self.started[0].prefill if self.started else ""

    @property
    def outcome(self) -> str:
        if self.cancelled:
            return "cancelled"
        if self.error is not None:
            return type(self.error).__name__
        return self.where.partition(";")[0] if self.over else "open"


@dataclass
class Remote:
    """One request of `submit_remote`, in the played engine."""

    request: GenerateRequest
    sink: RemotePrefillSink
    open: int = 0
    peer: tuple[str, int] = ("", 0)
    handoff: Handoff | None = None
    active: bool = False


@dataclass
class Prompt:
    """One prompt that is computed for a peer."""

    request: GenerateRequest
    sink: PrefillSink
    ticket: TransferTicket
    decode: str


@dataclass
class Script:
    """What an engine does at each step: nothing said is `ok`.

    `fail`: it says so. `hang`: nothing ever comes of it. `slow`: ten times as long, `crawl`: forty.
    """

    steps: dict[str, list[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(
        default_factory=lambda: {
            "admit": 0.01,
            "open": 0.02,
            "activate": 0.02,
            "decode": 0.02,
            "prefill": 0.2,
            "send": 0.1,
        }
    )
    cached: int = 0
    """Tokens that it need not compute to prefill a prompt for another worker."""
    sources: tuple[CachedSource, ...] = ()
    """Where these were."""

    def take(self, step: str) -> str:
        queue = self.steps.get(step)
        return queue.pop(0) if queue else "ok"


class PlayedEngine:
    """A worker and its engine, see `ports.DisaggWorker`: what handlers call of `engine.port`."""

    def __init__(self, site: DisaggCluster, host: Host, script: Script) -> None:
        self.capabilities: EngineCapabilities | None = CAPABILITIES
        self.engine: Any = self
        self.names_id = b"names"
        self.reported = EngineStats()
        self.reason: str | None = None
        self.script = script
        self.states: list[PathState] = []
        self.remotes: dict[int, Remote] = {}
        self.locals: dict[int, tuple[GenerateRequest, TokenSink]] = {}
        self.prompts: dict[int, Prompt] = {}
        self.arrived: set[tuple[int, int]] = set()
        """(handle, attempt) whose blocks are filled."""
        self.quarantined = 0
        self.calls: Counter[str] = Counter()
        self._site = site
        self._host = host
        self._handles = 0

    # ------------------------------------------------------------------ looking

    def cards(self) -> dict[str, ModelCard]:
        return {} if self.capabilities is None else {"m": CARD, "alias": CARD}

    def stats(self) -> EngineStats:
        return self.reported

    def unready_reason(self) -> str | None:
        return self.reason

    @property
    def busy(self) -> list[int]:
        return [*self.remotes, *self.locals, *self.prompts]

    def _later(self, step: str, action: Callable[[], None]) -> str:
        self.calls[step] += 1
        mode = self.script.take(step)
        if mode != "hang":
            seconds = self.script.seconds[step] * {"slow": 10, "crawl": 40}.get(mode, 1)
            self._host.call_later(seconds, action)
        return mode

    def _handle(self) -> int:
        self._handles += 1
        if self.capabilities is None:
            raise NotReady("the engine is down")
        return self._handles

    def die(self) -> None:
        """The core is gone; it is back at once."""
        sinks: list[Any] = [one.sink for one in self.remotes.values()]
        sinks += [sink for _, sink in self.locals.values()]
        sinks += [one.sink for one in self.prompts.values()]
        self.remotes.clear()
        self.locals.clear()
        self.prompts.clear()
        self.arrived.clear()
        for sink in sinks:
            sink.on_error(EngineDied("the engine died"))

    # ------------------------------------------------------------------ decode

    def paths(self) -> list[PathState]:
        return self.states

    def submit(self, request: GenerateRequest, sink: TokenSink) -> int:
        handle = self._handle()
        self.locals[handle] = (request, sink)
        self._later("prefill", lambda: self._decode(handle, 0, 0))
        return handle

    def submit_remote(self, request: GenerateRequest, sink: RemotePrefillSink) -> int:
        handle = self._handle()
        self.remotes[handle] = Remote(request, sink)

        def admitted() -> None:
            if handle not in self.remotes:
                return
            if mode == "fail":
                del self.remotes[handle]
                sink.on_error(EngineDied("no room at all"))
            else:
                sink.on_admitted(0)

        mode = self._later("admit", admitted)
        return handle

    def open_attempt(self, handle: int, attempt: int, node: NodeId, epoch: int) -> None:
        remote = self.remotes.get(handle)
        if remote is None:
            return
        if remote.active:
            remote.sink.on_attempt_lost(attempt, TransferError("it is decoded already"))
            return
        if remote.open:
            self._site.complain(f"attempt {attempt} is opened while {remote.open} is open")
        remote.open, remote.peer = attempt, (node, epoch)

        def opened() -> None:
            if self.remotes.get(handle) is not remote or remote.open != attempt:
                return
            if mode == "fail":
                remote.open = 0
                remote.sink.on_attempt_lost(attempt, TransferError("no path"))
            elif mode == "full":
                remote.open = 0
                remote.sink.on_attempt_lost(attempt, Overloaded("no blocks", retry_after=1.0))
                self._later("admit", lambda: self._admit_again(handle))
            else:
                remote.sink.on_opened(attempt, _ticket(handle, attempt, remote.request))

        mode = self._later("open", opened)

    def _admit_again(self, handle: int) -> None:
        remote = self.remotes.get(handle)
        if remote is not None and not remote.active:
            remote.sink.on_admitted(0)

    def give_up(self, handle: int, attempt: int) -> None:
        remote = self.remotes.get(handle)
        if remote is not None and remote.open == attempt and not remote.active:
            self.quarantined += 1
            remote.open = 0
            remote.handoff = None
            self.arrived.discard((handle, attempt))

    def activate(self, handle: int, attempt: int, handoff: Handoff) -> None:
        remote = self.remotes.get(handle)
        if remote is not None and remote.open == attempt:
            if handoff.checksums[0][0] != attempt:
                self._site.complain(f"attempt {attempt} gets the handoff of another")
            remote.handoff = handoff
            self._try(handle, attempt)

    def arrive(self, ticket: TransferTicket) -> None:
        """All bytes of an attempt, if its blocks may still be filled."""
        handle = int(ticket.transfer)
        remote = self.remotes.get(handle)
        if remote is not None and remote.open == ticket.attempt:
            self.arrived.add((handle, ticket.attempt))
            self._try(handle, ticket.attempt)

    def _try(self, handle: int, attempt: int) -> None:
        remote = self.remotes[handle]
        if remote.handoff is None or (handle, attempt) not in self.arrived or remote.active:
            return

        def checked() -> None:
            if self.remotes.get(handle) is not remote or remote.open != attempt:
                return
            if mode == "fail":
                self.arrived.discard((handle, attempt))
                remote.open, remote.handoff = 0, None
                remote.sink.on_attempt_lost(attempt, TransferError("a checksum differs"))
                return
            remote.active = True
            remote.open = 0
            self._decode(handle, len(remote.request.prompt), 0)

        mode = self._later("activate", checked)

    def prefill_here(self, handle: int) -> None:
        remote = self.remotes.get(handle)
        if remote is None or remote.active:
            return
        remote.open, remote.handoff = 0, None
        remote.active = True
        self._later("prefill", lambda: self._decode(handle, 0, 0))

    def _decode(self, handle: int, received: int, step: int) -> None:
        found = self.remotes.get(handle)
        request, sink = (found.request, found.sink) if found else self.locals.get(handle, _NOBODY)
        if request is None:
            return
        last = step + 1 == request.sampling.max_tokens
        if last:
            self.remotes.pop(handle, None)
            self.locals.pop(handle, None)
            self.arrived = {key for key in self.arrived if key[0] != handle}
        started = FirstTokenStats(0, 0.0, 0.1, 0.1, received) if step == 0 else None
        for choice in range(request.n):
            finish = Finish(reason="length") if last else None
            sink.on_delta(
                TokenDelta(handle=handle, choice=choice, tokens=[1], finish=finish, started=started)
            )
        if not last:
            self._later("decode", lambda: self._decode(handle, received, step + 1))

    def abort(self, handle: int) -> None:
        self.calls["abort"] += 1
        for known in (self.remotes, self.locals, self.prompts):
            known.pop(handle, None)
        self.arrived = {key for key in self.arrived if key[0] != handle}

    # ------------------------------------------------------------------ prefill

    def prefill(
        self,
        request: GenerateRequest,
        ticket: TransferTicket,
        node: NodeId,
        epoch: int,
        sink: PrefillSink,
    ) -> int:
        handle = self._handle()
        prompt = self.prompts[handle] = Prompt(request, sink, ticket, node)

        def prefilled() -> None:
            if self.prompts.get(handle) is not prompt:
                return
            if mode == "fail":
                del self.prompts[handle]
                sink.on_error(EngineDied("the step failed"))
                return
            self._send(handle, prompt)
            handoff = _handoff(request, ticket.attempt)
            started = replace(handoff.started, sources=self.script.sources)
            handoff = replace(handoff, cached_tokens=self.script.cached, started=started)
            sink.on_prefilled(handoff)

        mode = self._later("prefill", prefilled)
        return handle

    def _send(self, handle: int, prompt: Prompt) -> None:
        def sent() -> None:
            if self.prompts.pop(handle, None) is None:
                return
            if mode == "fail":
                prompt.sink.on_error(TransferError("the path broke"))
                return
            self._site.carry(prompt)
            prompt.sink.on_sent()

        mode = self._later("send", sent)


_NOBODY: Any = (None, None)


def _ticket(handle: int, attempt: int, asked: GenerateRequest) -> TransferTicket:
    return TransferTicket(
        transfer=str(handle),
        attempt=attempt,
        epoch=1,
        slot=1,
        generation=1,
        first_token=0,
        tokens=len(asked.prompt),
        blocks=(1,),
    )


def _handoff(asked: GenerateRequest, attempt: int = 1) -> Handoff:
    return Handoff(
        tokens=len(asked.prompt),
        parts=1,
        first=tuple(FirstToken(1) for _ in range(asked.n)),
        started=FirstTokenStats(0, 0.0, 0.2, 0.2),
        checksums=((attempt, 0),),
    )


# ---------------------------------------------------------------- the queue


class PlayedClaim:
    """See `ports.PrefillClaim`."""

    def __init__(self, queue: PlayedQueue, host: Host, entry: Entry, number: int) -> None:
        self.item = entry.item
        self.decode = NodeId(entry.host.name)
        self.decode_epoch = entry.epoch
        self.owner, self.owner_epoch = entry.owner
        self.number = number
        self.host = host
        self.process = host.process
        self.outcome = ""
        self.is_open = False
        self._queue = queue

    def __repr__(self) -> str:
        return f"<claim {self.number}>"

    def opened(self) -> None:
        self.is_open = True

    def end(self, outcome: Any) -> None:
        assert not self.outcome, "a claim ends once"
        self.outcome = outcome
        self._queue.outcomes[outcome] += 1


@dataclass(eq=False)
class Entry:
    """One item in the played queue."""

    host: Host
    epoch: int
    item: PrefillItem
    listener: Any
    owner: tuple[NodeId, int]
    claims: list[PlayedClaim] = field(default_factory=list)


class PlayedQueue:
    """All queues of the cluster, and what the network would do to them."""

    def __init__(self, site: DisaggCluster) -> None:
        self.owner = (NodeId("router"), 1)
        self.delay = 0.01
        self.entries: dict[tuple[str, int, int], Entry] = {}
        self.claims: list[PlayedClaim] = []
        self.outcomes: Counter[str] = Counter()
        self.refuses = ""
        self.keeps = False
        """Nobody gets anything."""
        self.doubles = False
        """Two workers get each item."""
        self.waiting = 0
        self.known = True
        self.offers: dict[str, int] = {}
        self._site = site

    def give(self, entry: Entry, *, but: tuple[str, ...] = ()) -> None:
        """To whoever has credits, soon."""
        excluded = (*entry.item.excluded, *but)
        able = [
            host
            for host in self._site.prefills
            if host.up and host.name not in excluded and self.offers.get(host.name, 0) > 0
        ]
        if self.keeps:
            return
        if not able:
            entry.host.call_later(0.05, lambda: self._again(entry))
            return
        for host in able[: 2 if self.doubles else 1]:
            claim = PlayedClaim(self, host, entry, len(self.claims) + 1)
            self.claims.append(claim)
            entry.claims.append(claim)
            host.call_later(self.delay, partial(host.take, claim))

    def _again(self, entry: Entry) -> None:
        if self.entries.get((entry.host.name, entry.epoch, entry.item.request)) is entry:
            self.give(entry)

    def change_owner(self) -> None:
        """Another router, or another life of it: what is not open is queued anew."""
        self.owner = (NodeId("router"), self.owner[1] + 1)
        for key, entry in tuple(self.entries.items()):
            if not entry.host.up:
                del self.entries[key]
                continue
            entry.owner = self.owner
            entry.item = replace(entry.item, round=entry.item.round + 1)
            entry.host.call_later(0.0, partial(self._queue_again, entry))

    def _queue_again(self, entry: Entry) -> None:
        if self.entries.get((entry.host.name, entry.epoch, entry.item.request)) is entry:
            entry.listener.on_owner(*entry.owner, entry.item.round)
            self.give(entry)


class DecodeEnd:
    """See `ports.PrefillQueuePort`."""

    def __init__(self, queue: PlayedQueue, host: Host) -> None:
        self._queue = queue
        self._host = host

    def _key(self, request: int) -> tuple[str, int, int]:
        return (self._host.name, self._host.node.epoch, request)

    def state(self, model: str) -> QueueState | None:
        queue = self._queue
        return QueueState(workers=2, credits=4, waiting=queue.waiting) if queue.known else None

    def enqueue(self, item: PrefillItem, listener: Any) -> None:
        queue = self._queue
        if queue.refuses:
            listener.on_refused(queue.refuses)
            return
        entry = Entry(self._host, self._host.node.epoch, item, listener, queue.owner)
        queue.entries[self._key(item.request)] = entry
        listener.on_owner(*queue.owner, item.round)
        listener.on_queued(*queue.owner)
        queue.give(entry)

    def opened(self, request: int) -> None:
        self._queue.entries.pop(self._key(request), None)

    def cancel(self, request: int) -> None:
        entry = self._queue.entries.pop(self._key(request), None)
        if entry is None:
            return
        for claim in entry.claims:
            if not claim.outcome and not claim.is_open and claim.host.up:
                claim.host.call_later(self._queue.delay, partial(claim.host.drop, claim))

    def close(self) -> None:
        for key in [k for k in self._queue.entries if k[0] == self._host.name]:
            del self._queue.entries[key]


class PrefillEnd:
    """See `ports.ClaimSource`."""

    def __init__(self, host: Host, take: Any, stop: Any) -> None:
        self._host = host
        self.take, self.stop = take, stop

    def offer(self, model: str, compat_hash: str, credits: int, uncomputed_tokens: int) -> None:
        self._host.site.queue.offers[self._host.name] = credits

    def close(self) -> None:
        self._host.site.queue.offers.pop(self._host.name, None)


# ---------------------------------------------------------------- hosts


class Host:
    """One machine with one process."""

    def __init__(self, site: DisaggCluster, name: str, role: str) -> None:
        self.site = site
        self.name = name
        self.role = role
        self.script = Script()
        self.process: VirtualProcess | None = None
        self.lives = 0
        self.node: Node
        self.engine: PlayedEngine
        self.decode: DecodeHandler
        self.prefill: PrefillHandler
        self.chooser = DisaggPolicy("always")
        self.end: PrefillEnd
        self.metrics = Metrics()

    @property
    def up(self) -> bool:
        return self.process is not None

    def call_later(self, delay: float, action: Callable[[], None]) -> None:
        """In its process, if that lives."""
        if self.process is not None:
            self.site.loop.call_later(delay, action, context=self.process.context)

    def take(self, claim: PlayedClaim) -> None:
        if not claim.outcome:
            self.end.take(claim)

    def drop(self, claim: PlayedClaim) -> None:
        if not claim.outcome and not claim.is_open:
            self.end.stop(claim)

    def start(self) -> None:
        self.lives += 1
        process = self.process = VirtualProcess(f"{self.name}#{self.lives}")
        self.site.loop.start(process, self._live(), f"main {process.name}")

    async def _live(self) -> None:
        site = self.site
        config = NodeConfig(
            node=NodeId(self.name),
            role="router" if self.role == "seed" else "worker",
            listen=f"{self.name}:7000",
            join=() if self.role == "seed" else ("seed:7000",),
            cluster="test",
        )
        source = random.Random(site.random.getrandbits(64))
        node = self.node = Node(
            config,
            site.net.network(self.name),
            keys=lambda: (KEY,),
            entropy=source.randbytes,
            random=random.Random(site.random.getrandbits(64)),
            wall=lambda: 1_700_000_000 + site.loop.time(),
        )
        self.engine = PlayedEngine(site, self, self.script)
        self.metrics = Metrics()
        if self.role == "decode":
            queue = DecodeEnd(site.queue, self)
            self.decode = DecodeHandler(
                node, self.engine, queue, self.chooser, lambda names: 0, self.metrics
            )
        elif self.role == "prefill":

            def claims(take: Any, stop: Any) -> PrefillEnd:
                self.end = PrefillEnd(self, take, stop)
                return self.end

            self.prefill = PrefillHandler(node, self.engine, claims, lambda names: 0, self.metrics)
        await node.start()
        node.publish_card(NodeCard(role=config.role), {})
        if self.role == "prefill":
            self.prefill.changed()

    def kill(self) -> None:
        """kill -9."""
        process, self.process = self.process, None
        if process is None:
            return
        self.site.loop.kill(process)
        self.site.killed.append(process)
        self.site.net.crash(self.name)
        self.site.net.resume(self.name)
        self.site.queue.offers.pop(self.name, None)
        queue = self.site.queue
        for entry in [e for e in queue.entries.values() if e.host.up]:
            if any(c.host is self and not c.outcome for c in entry.claims):
                queue.give(entry)  # its router sees the stream end
        for key in [key for key, e in queue.entries.items() if e.host is self]:
            del queue.entries[key]

    def freeze(self) -> None:
        """SIGSTOP."""
        assert self.process is not None
        self.site.net.pause(self.name)
        self.site.loop.pause(self.process)

    def thaw(self) -> None:
        """SIGCONT."""
        if self.process is not None:
            self.site.loop.resume(self.process)
            self.site.net.resume(self.name)


class DisaggCluster:
    """See above."""

    def __init__(self, seed: int, prefills: int) -> None:
        self.random = random.Random(seed)
        self.loop = WorldLoop(random.Random(seed + 1))
        self.net = MemoryWorld(random.Random(seed + 2))
        self.queue = PlayedQueue(self)
        self.killed: list[VirtualProcess] = []
        self.seed = Host(self, "seed", "seed")
        self.d = Host(self, "d", "decode")
        self.prefills = [Host(self, f"p{i + 1}", "prefill") for i in range(prefills)]
        self.p = self.prefills[0]
        self.clients: list[Client] = []
        self.complaints: list[str] = []

    def complain(self, what: str) -> None:
        """A rule is broken."""
        if len(self.complaints) < 20:
            self.complaints.append(f"{self.loop.time():.2f}: {what}")

    @property
    def hosts(self) -> list[Host]:
        return [self.seed, self.d, *self.prefills]

    async def begin(self) -> None:
        for host in self.hosts:
            host.start()
        await self.until(self.converged)
        await self.until(lambda: len(self.queue.offers) == len(self.prefills))

    def converged(self) -> bool:
        up = {host.name for host in self.hosts if host.up}
        return all(
            host.up
            and hasattr(host, "node")
            and {member.node for member in host.node.registry} == up - {host.name}
            for host in self.hosts
        )

    async def until(self, met: Callable[[], bool], timeout: float = 30.0) -> float:
        """Wait until `met`; returns how long it took."""
        start = self.loop.time()
        while not met():
            assert self.loop.time() - start < timeout, "it did not come about"
            await asyncio.sleep(0.005)
        return self.loop.time() - start

    # ------------------------------------------------------------------ what is done to it

    def ask(self, asked: GenerateRequest) -> Client:
        """A request reaches the decode worker."""
        client = Client(asked)
        client.clock, client.asked = self.loop.time, self.loop.time()
        self.clients.append(client)

        def submit() -> None:
            try:
                client.handle = self.d.decode.submit(asked, client)
            except PdserveError as error:
                client.error = error

        self.d.call_later(0.0, submit)
        return client

    def cancel(self, client: Client) -> None:
        def abort() -> None:
            if client.handle and not client.over and not client.cancelled:
                client.cancelled = True
                self.d.decode.abort(client.handle)

        self.d.call_later(0.0, abort)

    def carry(self, prompt: Prompt) -> None:
        """Bytes on their way."""
        if self.d.up:
            self.d.call_later(0.0, lambda: self.d.engine.arrive(prompt.ticket))

    def state(self, client: Client) -> str:
        remote = self.d.decode._remote.get(client.handle)
        return "" if remote is None else remote.state.value

    async def reaches(self, client: Client, state: str) -> None:
        await self.until(lambda: self.state(client) == state)

    # ------------------------------------------------------------------ the end

    def left(self) -> list[str]:
        """What somebody still holds."""
        found = []
        if self.d.up:
            found += [repr(remote) for remote in self.d.decode._remote.values()]
            found += [f"d's engine: {handle}" for handle in self.d.engine.busy]
            found += [f"d's blocks: {key}" for key in self.d.engine.arrived]
        for host in self.prefills:
            if host.up:
                found += [repr(one) for one in host.prefill._claims.values()]
                found += [f"{host.name}'s engine: {handle}" for handle in host.engine.busy]
                found += [f"{host.name} renews {life}" for life in host.prefill._renewals]
        found += [f"queue: {key}" for key in self.queue.entries]
        live = [host.process for host in self.hosts if host.process is not None]
        found += [
            f"claim of {claim.host.name}"
            for claim in self.queue.claims
            if not claim.outcome and claim.process in live
        ]
        return found

    async def quiet(self, within: float = 8.0) -> float:
        """Nothing is left of anything, soon."""
        start = self.loop.time()
        while left := self.left():
            assert self.loop.time() - start < within, left
            await asyncio.sleep(0.01)
        for client in self.clients:
            assert not client.problems, client.problems
        assert not self.complaints, self.complaints
        return self.loop.time() - start

    async def close(self) -> None:
        for host in self.hosts:
            host.thaw()
            host.kill()

    def bury(self) -> None:
        for process in self.killed:
            self.loop.bury(process)


def on_site(
    prefills: int = 1, seed: int = 0
) -> Callable[[Callable[[DisaggCluster], Awaitable[None]]], Callable[[], None]]:
    """Run a test on a site, in virtual time."""

    def decorate(test: Callable[[DisaggCluster], Awaitable[None]]) -> Callable[[], None]:
        def run() -> None:
            play(test, prefills=prefills, seed=seed)

        run.__name__ = test.__name__
        run.__doc__ = test.__doc__
        return run

    return decorate


def play(
    test: Callable[[DisaggCluster], Awaitable[None]], *, prefills: int = 1, seed: int = 0
) -> DisaggCluster:
    """The same for tests with parameters; returns what there was."""
    site = DisaggCluster(seed, prefills)

    async def main() -> None:
        await site.begin()
        await test(site)

    loop = site.loop
    try:
        loop.run_until_complete(main())
        problems = list(loop.problems)
    finally:
        loop.run_until_complete(site.close())
        site.bury()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.calm()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    assert not problems, problems
    return site
