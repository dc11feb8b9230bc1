"""Bugs planted on purpose, to prove that the suites catch them.

Each entry removes one rule of the product, by replacing one named function for a while. Nothing in
the product knows of this file. A name that no longer exists fails at once.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from pdserve.engine_core.kv_transfer.connector import AttemptFenced
from pdserve.errors import DialFailed, StepFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["BUGS", "HANDOFF_BUGS", "MIGRATION_BUGS", "TRACE_BUGS", "PlantedBug", "planted"]


@dataclass(frozen=True, slots=True)
class PlantedBug:
    """One rule that is taken out."""

    module: str
    path: str
    """Class and function."""
    make: Callable[[Any], Any]
    """From the function to the one with the bug."""
    why: str
    """What goes wrong."""


@contextlib.contextmanager
def planted(name: str) -> Iterator[PlantedBug]:
    """The bug is in the product while this lasts."""
    bug = BUGS[name]
    owner: Any = importlib.import_module(bug.module)
    *classes, function = bug.path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    original = vars(owner)[function]
    setattr(owner, function, bug.make(original))
    try:
        yield bug
    finally:
        setattr(owner, function, original)


# ------------------------------------------------------------------------------ how it is done


def _never(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces a call by nothing."""
    return lambda *args, **kwargs: None


def _each(number: int, instead: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces every n-th call by `instead`."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def sometimes(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % number == 0:
                return instead(original, *args, **kwargs)
            return original(*args, **kwargs)

        return sometimes

    return make


def _skip(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    pass


def _again(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    original(*args, **kwargs)
    return original(*args, **kwargs)


def _tells_wall_time(original: Callable[..., Any]) -> Callable[..., Any]:
    """`RequestPhases.add_prompt`, with a clock that somebody sets."""

    def add_prompt(self: Any) -> Any:
        phases = original(self)
        time = self.time
        phases.time = lambda: time() + (12.0 if time() > 9.0 else 0.0)
        return phases

    return add_prompt


def _gone_stays(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Registry._gone`, and once more by and by."""

    def gone(self: Any, record: Any, reason: str) -> None:
        member = self.get(record.node)
        original(self, record, reason)
        if member is not None and member.epoch == record.epoch:
            self._members[record.node] = member
            original(self, record, reason)

    return gone


def _refuted_by_nobody(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Gossip._about_me`, but an accusation is taken lying down."""

    def about_me(self: Any, record: Any) -> None:
        if record.state.name != "SUSPECT":
            original(self, record)

    return about_me


def _forgets_card(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Node._tell_card`, but in the first life only."""

    def tell_card(self: Any, life: Any) -> None:
        if self.lives <= 1:
            original(self, life)

    return tell_card


def _keeps_finished(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_Channel._finish` of the worker, but what runs goes on."""

    def finish(self: Any) -> None:
        self.requests.clear()
        original(self)

    return finish


def _dead_connection(original: Callable[..., Any]) -> Callable[..., Any]:
    """`GossipService._dialled`, but a failure is not told."""

    async def dialled(self: Any, address: str) -> None:
        try:
            await self._network.dial(address)
        except DialFailed:
            return
        await original(self, address)

    return dialled


def _keeps_timer(original: Callable[..., Any]) -> Callable[..., Any]:
    """`GossipService.close`, but its timer stays."""

    async def close(self: Any) -> None:
        timer, self._timer = self._timer, None
        await original(self)
        self._timer = timer

    return close


async def _no_rejoin(self: Any, effect: Any) -> None:
    """`Node._rejoin`, undone."""


def _release_twice(original: Callable[..., Any]) -> Callable[..., Any]:
    """`RouterBooking.end`, without its memory."""

    def release(self: Any, outcome: str) -> None:
        original(self, outcome)
        self._ended = False
        original(self, outcome)

    return release


def _first_of_each_channel(original: Callable[..., Any]) -> Callable[..., Any]:
    """`RequestStreams.ask_to_move`, but one request of each channel when all are meant."""

    def ask_to_move(self: Any, handles: Any, reason: Any) -> int:
        if handles is None:
            firsts = [next(iter(one.requests.values()), None) for one in self._open]
            handles = {request.handle for request in firsts if request is not None}
        return int(original(self, handles, reason))

    return ask_to_move


def _quarter_of_room(original: Callable[..., Any]) -> Callable[..., Any]:
    """`over_bound`, but of a quarter of the bound."""

    def over_bound(config: Any, *args: Any) -> Any:
        return original(with_fields(config, hold_limit=max(1, config.hold_limit // 4)), *args)

    return over_bound


def _hasty(original: Callable[..., Any]) -> Callable[..., Any]:
    """`floor` of a suspicion, but a quarter of it."""
    return lambda config, n: original(config, n) / 4


def _no_copy_of_one(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Scheduler._plan_copies`, but not of a block that one token is in."""

    def plan_copies(self: Any, plan: Any) -> None:
        size = self._pool.block_size
        lone = {s.copy_from for s in self._forked if (s.prompt_len - 1) % size == 1}
        original(self, plan)
        plan.copies[:] = [copy for copy in plan.copies if copy[0] not in lone]

    return plan_copies


# ---------------------------------------------------------------------- handing prompts over


async def _at_once(*args: Any, **kwargs: Any) -> None:
    """Said to be done, and nothing was."""


def _frees_quarantined(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Incoming._end`, but its blocks are free at once."""

    def end(self: Any, attempt: Any) -> None:
        original(self, attempt)
        self._free(attempt.key)

    return end


def _leaks_shared(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Incoming._end`, but what it shared of the prefix cache stays held."""

    def end(self: Any, attempt: Any) -> None:
        attempt.shared = []
        original(self, attempt)

    return end


def _first_checksum_counts(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Incoming._fault_of_bytes`, but for the first block alone."""

    def fault_of_bytes(self: Any, attempt: Any, tokens: int) -> str:
        handoff = attempt.handoff
        attempt.handoff = replace(handoff, checksums=handoff.checksums[:1])
        try:
            return str(original(self, attempt, tokens))
        finally:
            attempt.handoff = handoff

    return fault_of_bytes


def _closes_without_fence(original: Callable[..., Any]) -> Callable[..., Any]:
    """`LoopKvConnector._fence` without asking the peer."""

    async def fence(self: Any, attempt: Any) -> None:
        del self._closing[attempt.key]
        self.emit(AttemptFenced(attempt.key))

    return fence


def _first_rail_counts(original: Callable[..., Any]) -> Callable[..., Any]:
    """`VerbsPath.notified`, but for the first of several rails."""

    def notified(self: Any, word: int) -> None:
        rails, self.peer_rails = self.peer_rails, 1
        original(self, word)
        self.peer_rails = rails

    return notified


def _releases_what_is_sent(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Outgoing._end`, but what is under way is free at once."""

    def end(self: Any, handle: int, *, silent: bool) -> None:
        prefill = self._prefills.get(handle)
        original(self, handle, silent=silent)
        if prefill is not None and prefill.under_way:
            for part, (blocks, complete) in prefill.under_way.items():
                self._pool.release(blocks)
                prefill.under_way[part] = [], complete
            self._let_go(prefill)

    return end


def _keeps_budget(original: Callable[..., Any]) -> Callable[..., Any]:
    """`BlockReservations.end`, but its room is not given back."""

    def end(self: Any, stem: Any) -> None:
        self.waiting.discard(stem)
        self.unbind(stem.handle)

    return end


def _filled_by_notice(original: property) -> property:
    """`Attempt.filled`, whatever parts have come."""
    return property(lambda attempt: attempt.handoff is not None)


# ---------------------------------------------------------------------- going on elsewhere


def _continues(**wrong: Any) -> Callable[..., Any]:
    """`Received.continuation`, with some fields as they were not to be."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def continuation(self: Any, request: Any) -> Any:
            return replace(original(self, request), **wrong)

        return continuation

    return make


def _redraws_seed(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Received.continuation`, with a seed of its own."""

    def continuation(self: Any, request: Any) -> Any:
        goes_on = original(self, request)
        if not self.any:
            return goes_on
        sampling = replace(goes_on.sampling, seed=goes_on.sampling.seed ^ 1)
        return replace(goes_on, sampling=sampling)

    return continuation


def _forgets_last(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Received.tokens`, but for the last one, which the client may not have seen."""
    return lambda self, choice: original(self, choice)[:-1]


def _stays_behind(original: Callable[..., Any]) -> Callable[..., Any]:
    """`DispatchedRequest._leave`, but the worker that is left goes on."""

    def leave(self: Any, attempt: Any) -> None:
        sequence, attempt.sequence = attempt.sequence, None
        original(self, attempt)
        attempt.sequence = sequence

    return leave


def _prepares_on(original: Callable[..., Any]) -> Callable[..., Any]:
    """`DispatchedRequest._finish`, but the next worker goes on preparing."""

    def finish(self: Any) -> None:
        task, self._task = self._task, None
        original(self)
        self._task = task

    return finish


def _steps_cost_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    """`migration_reason`, but a failed step is the request's end."""
    return lambda error: None if isinstance(error, StepFailed) else original(error)


def _begins_anew(original: property) -> property:
    """`DispatchedRequest._spent`, of nothing."""
    return property(lambda dispatched: 0.0)


BUGS: Final[dict[str, PlantedBug]] = {
    "release not sent": PlantedBug(
        "pdserve.frontend.dispatch.router_client",
        "RouterBooking.end",
        _never,
        "answers are not given back",
    ),
    "release sent twice": PlantedBug(
        "pdserve.frontend.dispatch.router_client",
        "RouterBooking.end",
        _release_twice,
        "answers are given back twice",
    ),
    "abort not forwarded": PlantedBug(
        "pdserve.worker.request_streams",
        "_FrontendStream._abort",
        _never,
        "engines work for nobody",
    ),
    "a lost channel ends nothing": PlantedBug(
        "pdserve.worker.request_streams",
        "_FrontendStream._finish",
        _keeps_finished,
        "requests of a dead frontend go on",
    ),
    "end of a booking not told": PlantedBug(
        "pdserve.worker.agent", "WorkerAgent._end", _never, "workers hold bookings for ever"
    ),
    "a token batch is lost": PlantedBug(
        "pdserve.frontend.dispatch.worker_stream",
        "WorkerStream._deliver",
        _each(97, _skip),
        "tokens are missing",
    ),
    "a token batch comes twice": PlantedBug(
        "pdserve.frontend.dispatch.worker_stream",
        "WorkerStream._deliver",
        _each(97, _again),
        "tokens double",
    ),
    "channel outlives its end": PlantedBug(
        "pdserve.frontend.dispatch.worker_stream", "WorkerStream._end", _never, "requests never end"
    ),
    "booking never expires": PlantedBug(
        "pdserve.router.bookings", "Bookings.expire", _never, "what was never placed is charged"
    ),
    "epoch not compared": PlantedBug(
        "pdserve.gossip.member_table",
        "RecordChange.new_life",
        lambda _: property(lambda change: change.old is None),
        "a later life is taken for the one before",
    ),
    "LinkDown dropped": PlantedBug(
        "pdserve.gossip.service", "GossipService.link_down", _never, "membership trusts dead links"
    ),
    "failed dials not told": PlantedBug(
        "pdserve.gossip.service",
        "GossipService._dialled",
        _dead_connection,
        "nobody is looked for again",
    ),
    "own death not heard": PlantedBug(
        "pdserve.runtime.node", "Node._rejoin", lambda original: _no_rejoin, "the dead stay"
    ),
    "card not told in a later life": PlantedBug(
        "pdserve.runtime.node", "Node._tell_card", _forgets_card, "nobody knows what it serves"
    ),
    "Gone told twice": PlantedBug(
        "pdserve.runtime.registry", "Registry._gone", _gone_stays, "deaths are told twice"
    ),
    "refutation not spoken": PlantedBug(
        "pdserve.gossip.core", "Gossip._about_me", _refuted_by_nobody, "the living are buried"
    ),
    "credit not returned": PlantedBug(
        "pdserve.wire.protocol", "Connection.consumed", _never, "streams come to a halt"
    ),
    "watermark not checked": PlantedBug(
        "pdserve.runtime.topics.reader", "LogReader._watermark", _never, "a lost event stays lost"
    ),
    "a pool's events are lost": PlantedBug(
        "pdserve.worker.kv_event_publisher",
        "KvEventPublisher.apply",
        _each(5, _skip),
        "routers hear of old pools",
    ),
    "removed blocks are not told": PlantedBug(
        "pdserve.worker.kv_event_publisher",
        "KvEventPublisher._remove",
        _never,
        "routers send prompts to what is gone",
    ),
    "a dead engine's blocks stay": PlantedBug(
        "pdserve.worker.kv_event_publisher",
        "KvEventPublisher._clear",
        _never,
        "a new engine is taken for a full one",
    ),
    "a snapshot is not put in place": PlantedBug(
        "pdserve.router.prefix_index.worker_events",
        "WorkerEventFeed.commit",
        _never,
        "who comes late knows nothing",
    ),
    "an index keeps dead workers": PlantedBug(
        "pdserve.router.prefix_index.index",
        "PrefixIndex.worker_gone",
        _never,
        "memory is never given back",
    ),
    "a router refuses at a quarter of its bound": PlantedBug(
        "pdserve.router.core", "over_bound", _quarter_of_room, "requests are refused without need"
    ),
    "suspicion is a quarter as long": PlantedBug(
        "pdserve.gossip.suspicion", "floor", _hasty, "the living are buried"
    ),
    "a block that one token is in is not copied": PlantedBug(
        "pdserve.engine_core.scheduler.scheduler",
        "Scheduler._plan_copies",
        _no_copy_of_one,
        "choices read what is not theirs",
    ),
    "gossip timer left behind": PlantedBug(
        "pdserve.gossip.service", "GossipService.close", _keeps_timer, "timers leak"
    ),
}

HANDOFF_BUGS: Final[dict[str, PlantedBug]] = {
    "blocks are freed, not quarantined": PlantedBug(
        "pdserve.engine_core.kv_transfer.receiver",
        "KvReceiver._end",
        _frees_quarantined,
        "a peer writes to others' blocks",
    ),
    "attempts end without a fence": PlantedBug(
        "pdserve.engine_core.kv_transfer.loop_connector",
        "LoopKvConnector._fence",
        _closes_without_fence,
        "a peer writes to others' blocks",
    ),
    "writers are not stopped": PlantedBug(
        "pdserve.transfer.rdma.verbs_path",
        "VerbsPath._fence",
        lambda original: _at_once,
        "a peer writes to others' blocks",
    ),
    "writers say too soon that they have stopped": PlantedBug(
        "pdserve.transfer.path_base",
        "PathBase.drain",
        lambda original: _at_once,
        "a peer writes to others' blocks",
    ),
    "the end of a path takes writes": PlantedBug(
        "pdserve.transfer.rdma.verbs_path",
        "VerbsPath._destroy",
        lambda original: _at_once,
        "what comes late lands in others' blocks",
    ),
    "a part has come when one rail says so": PlantedBug(
        "pdserve.transfer.rdma.verbs_path",
        "VerbsPath.notified",
        _first_rail_counts,
        "blocks are read before they are filled",
    ),
    "a handoff counts before its parts": PlantedBug(
        "pdserve.engine_core.kv_transfer.remote_prefill",
        "FillAttempt.filled",
        _filled_by_notice,
        "blocks are read before they are filled",
    ),
    "checksums are not compared": PlantedBug(
        "pdserve.engine_core.kv_transfer.receiver",
        "KvReceiver._fault_of_bytes",
        lambda original: lambda self, attempt, tokens: "",
        "wrong bytes are decoded from",
    ),
    "the first checksum alone is compared": PlantedBug(
        "pdserve.engine_core.kv_transfer.receiver",
        "KvReceiver._fault_of_bytes",
        _first_checksum_counts,
        "wrong bytes are decoded from",
    ),
    "blocks are released while they are sent": PlantedBug(
        "pdserve.engine_core.kv_transfer.sender",
        "KvSender._end",
        _releases_what_is_sent,
        "a peer is sent others' blocks",
    ),
    "shared blocks of an attempt stay held": PlantedBug(
        "pdserve.engine_core.kv_transfer.receiver", "KvReceiver._end", _leaks_shared, "blocks leak"
    ),
    "a reservation is not given back": PlantedBug(
        "pdserve.engine_core.scheduler.reservations",
        "BlockReservations.end",
        _keeps_budget,
        "soon nothing is admitted",
    ),
    "a lost attempt keeps its room": PlantedBug(
        "pdserve.engine_core.scheduler.reservations",
        "BlockReservations.unbind",
        _never,
        "the books of room are wrong",
    ),
    "paths to the dead stay": PlantedBug(
        "pdserve.engine_core.kv_transfer.peer_paths",
        "PeerPaths.peer_gone",
        lambda original: _at_once,
        "paths and books leak",
    ),
    "leases are not renewed": PlantedBug(
        "pdserve.worker.disagg.prefill_handler",
        "PrefillHandler._beat",
        _never,
        "what takes longer than a lease is never handed over",
    ),
    "a lease never lapses": PlantedBug(
        "pdserve.worker.disagg.remote_prefill",
        "RemotePrefillRequest._lapse",
        _never,
        "who waits for a worker that is cut off waits for ever",
    ),
    "handoffs are not forgotten": PlantedBug(
        "pdserve.worker.disagg.decode_handler", "DecodeHandler.forget", _never, "requests leak"
    ),
    "claims are not ended": PlantedBug(
        "pdserve.worker.disagg.queue.claims",
        "QueueClaimSource.end",
        _never,
        "queues count claims for ever",
    ),
    "an item that is open stays queued": PlantedBug(
        "pdserve.worker.disagg.queue.client", "PrefillQueueClient.opened", _never, "items leak"
    ),
}
"""Bugs of the handoff; also in `BUGS`."""

MIGRATION_BUGS: Final[dict[str, PlantedBug]] = {
    "output is not carried": PlantedBug(
        "pdserve.frontend.dispatch.migration.migration_state",
        "ReceivedTokens.continuation",
        _continues(output=[], ended=()),
        "clients get tokens again",
    ),
    "ended choices are not told": PlantedBug(
        "pdserve.frontend.dispatch.migration.migration_state",
        "ReceivedTokens.continuation",
        _continues(ended=()),
        "choices end twice",
    ),
    "the seed is drawn again": PlantedBug(
        "pdserve.frontend.dispatch.migration.migration_state",
        "ReceivedTokens.continuation",
        _redraws_seed,
        "other tokens than without a migration",
    ),
    "tokens that are held back are not carried": PlantedBug(
        "pdserve.frontend.dispatch.migration.migration_state",
        "ReceivedTokens.tokens",
        _forgets_last,
        "clients get tokens again",
    ),
    "a worker that is left goes on": PlantedBug(
        "pdserve.frontend.dispatch.dispatched_request",
        "DispatchedRequest._leave",
        _stays_behind,
        "engines work for nobody",
    ),
    "a warm-up outlives its request": PlantedBug(
        "pdserve.frontend.dispatch.dispatched_request",
        "DispatchedRequest._finish",
        _prepares_on,
        "engines work for nobody",
    ),
    "hints to migrate a request are ignored": PlantedBug(
        "pdserve.frontend.dispatch.dispatched_request",
        "DispatchedRequest.unwanted",
        _never,
        "drains take all their time",
    ),
    "a draining worker asks nobody": PlantedBug(
        "pdserve.worker.request_streams",
        "RequestStreams.ask_to_move",
        _never,
        "drains take all their time",
    ),
    "a draining worker asks for one request of each channel": PlantedBug(
        "pdserve.worker.request_streams",
        "RequestStreams.ask_to_move",
        _first_of_each_channel,
        "drains take all their time",
    ),
    "poison is not counted": PlantedBug(
        "pdserve.frontend.dispatch.migration.migration_state",
        "PoisonTracker.add",
        _never,
        "one request kills all workers",
    ),
    "a failed step is a request's end": PlantedBug(
        "pdserve.frontend.dispatch.dispatched_request",
        "migration_reason",
        _steps_cost_requests,
        "requests are lost",
    ),
    "a deadline begins anew": PlantedBug(
        "pdserve.frontend.dispatch.dispatched_request",
        "DispatchedRequest._spent",
        _begins_anew,
        "nothing ends in time",
    ),
    "a stalled core is not noticed": PlantedBug(
        "pdserve.engine.watchdog", "StallWatchdog.look", _never, "requests hang"
    ),
}
"""Bugs of migration; also in `BUGS`."""

TRACE_BUGS: Final = {
    "an attempt stays open when its worker is lost": PlantedBug(
        "pdserve.frontend.dispatch.dispatch_phases",
        "DispatchPhases.end_attempt",
        _never,
        "traces show a dead worker at work",
    ),
    "wall clock in a duration": PlantedBug(
        "pdserve.tracing.phases",
        "RequestPhases.add_prompt",
        _tells_wall_time,
        "a step of the clock is a phase",
    ),
    "traces are kept beyond their rate": PlantedBug(
        "pdserve.tracing.tracer",
        "Tracer._allowed",
        lambda original: lambda self, now: True,
        "a failing cluster drowns its collector",
    ),
    "what a move says is lost": PlantedBug(
        "pdserve.tracing.phases", "PromptPhases.add_move", _never, "moved requests are not kept"
    ),
}
"""Bugs of traces; also in `BUGS`."""

BUGS.update(HANDOFF_BUGS)
BUGS.update(TRACE_BUGS)
BUGS.update(MIGRATION_BUGS)
