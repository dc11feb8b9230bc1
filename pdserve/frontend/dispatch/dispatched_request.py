"""Runs one request on the cluster: from router to worker, and to another worker on failure.

Keeps the request's history: refusals, waiting time, start, and every token received. If a worker
dies, drains or stalls, another one continues after the last token received. A worker that asks to
move the request continues it until another takes over (`migrate_live`). `cluster_client` reaches
routers and workers. Owned by its opener; ends by `cancel`, an error, or its last token.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from msgspec.structs import replace

from pdserve.blocks.hashing import short_hashes
from pdserve.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineDied,
    EngineError,
    LinkError,
    NoWorker,
    Overloaded,
    PdserveError,
    Poisoned,
    Unavailable,
)
from pdserve.frontend.dispatch.live_migration import migrate_live
from pdserve.frontend.dispatch.migration_state import (
    Exclusions,
    PoisonTracker,
    ReceivedTokens,
    WorkerDeath,
    migration_reason,
    outweighs,
)
from pdserve.frontend.placement import Placement
from pdserve.ids import NodeLife
from pdserve.messages.routing import RouteRequest

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine

    from pdserve.engine.port import TokenSink
    from pdserve.frontend.config import FrontendConfig
    from pdserve.frontend.dispatch.migration_state import (
        LifeStatus,
        MigrationOutcome,
        MigrationReason,
    )
    from pdserve.frontend.dispatch.poison_isolation import PoisonIsolation
    from pdserve.frontend.dispatch.worker_stream import RemoteSequence
    from pdserve.frontend.routing_hints import RoutingHints
    from pdserve.ids import Epoch, NodeId, Seconds
    from pdserve.messages.request import GenerateRequest, TokenDelta
    from pdserve.messages.routing import RouteDecision
    from pdserve.messages.worker_stream import MigrationHintReason
    from pdserve.observe.metrics import Metrics

__all__ = ["Assignment", "ClusterPort", "DispatchedRequest", "no_worker_error"]

_log = logging.getLogger(__name__)

_ATTEMPTS: Final = 4
"""Workers that a new request may fail to reach before its client hears of it."""
_PAUSE: Final[Seconds] = 0.05
"""Before a router that is behind is asked again."""
_NOTICED: Final[Seconds] = 0.1
"""Waiting for a router or a worker that shortens a request's deadline."""
_APART: Final[Seconds] = 2.0
"""So long a worker that a request was lost at is left out, if it lives: another one is better, but
it is better than none."""
_ASK_AGAIN: Final[Seconds] = 1.0
"""A router that had nobody is asked so often, besides whenever there is news."""
_DOUBT: Final[Seconds] = 5.0
"""A request that may have killed as many workers as it may waits so long until that is known."""
_MOVES: Final = 3
"""As often a request moves because its worker would rather not have it; more would be restless."""
_PATIENCE: Final[Seconds] = 2.0
"""A router's answer about a request that has a place where it is."""
_ELSEWHERE: Final = (LinkError, Unavailable, Overloaded, EngineDied)
"""What one worker may answer that another need not."""


class ClusterPort(Protocol):
    """What a dispatched request needs of the cluster."""

    rerouted: int
    config: FrontendConfig
    metrics: Metrics
    trials: PoisonIsolation

    def now(self) -> Seconds: ...

    def block_size(self, model: str) -> int:
        """Tokens of the model's blocks; 0 if it is not served."""
        ...

    def epoch_of(self, worker: NodeId) -> Epoch | None:
        """Its present life; None: it is not in the cluster."""
        ...

    def standing(self, life: NodeLife) -> LifeStatus: ...

    def lacking(self, model: str, features: tuple[str, ...]) -> tuple[NodeId, ...]:
        """Workers that serve the model without one of these: of an earlier release."""
        ...

    def shares_kv(self, one: NodeId, other: NodeId) -> bool:
        """KV can be moved between the two."""
        ...

    async def route(self, dispatched: DispatchedRequest) -> tuple[NodeId, RouteDecision]:
        """A router and its answer."""
        ...

    async def place(
        self,
        begin: Callable[[], GenerateRequest],
        attempt: Assignment,
        router: NodeId,
        routed: RouteDecision,
    ) -> RemoteSequence | None:
        """Hand a request to the worker that was named; `begin` makes it, when the worker has been
        reached. None: in a life that is over."""
        ...

    async def warm(self, request: GenerateRequest, routed: RouteDecision, timeout: Seconds) -> None:
        """Have the worker that was named compute a request of which nothing is wanted."""
        ...

    def give_back(self, router: NodeId, routed: RouteDecision) -> None:
        """An answer that is not followed."""
        ...

    async def wait_news(self, *, timeout: Seconds = 1.0, at_least: Seconds = 0.0) -> None: ...

    def run(
        self, dispatched: DispatchedRequest, work: Coroutine[None, None, None]
    ) -> asyncio.Task[None]:
        """In the background; `DispatchedRequest.fail` if it is cut short."""
        ...


class Assignment:
    """The request at one worker, as that worker's sink."""

    __slots__ = (
        "_received",
        "_sink",
        "_tails",
        "begun",
        "booking",
        "dispatched",
        "life",
        "moving",
        "plain",
        "sequence",
        "unwanted",
    )

    def __init__(
        self,
        dispatched: DispatchedRequest,
        sink: TokenSink,
        received: ReceivedTokens,
        routed: RouteDecision,
    ) -> None:
        self.dispatched = dispatched
        self._sink = sink
        self._received = received
        self._tails = received.tails
        self.life = NodeLife(routed.worker, routed.epoch)
        self.booking = routed.booking
        self.sequence: RemoteSequence | None = None
        """None until it is known that the worker has taken it."""
        self.begun = False
        """A token has come from here."""
        self.plain = False
        """Deltas have nothing to look at but tokens, and the end."""
        self.moving: MigrationHintReason | None = None
        """Why another worker is looked for meanwhile."""
        self.unwanted: MigrationHintReason | None = None
        """The same, heard before it was known that the worker has taken it."""

    def on_delta(self, delta: TokenDelta) -> None:
        if not self.plain or delta.finish is not None:
            seen = self.dispatched.heard(self, delta)
            if seen is None:
                return
            delta = seen
        choice = delta.choice
        tail = self._tails[choice]
        tail += delta.tokens
        if len(tail) > 255:
            self._received.pack(choice)
        self._sink.on_delta(delta)

    def on_error(self, error: PdserveError) -> None:
        self.dispatched.failed(self, error)

    def on_moving(self, reason: MigrationHintReason) -> None:
        """The worker would rather not have it."""
        self.dispatched.unwanted(self, reason)


@dataclass(slots=True)
class _Migration:
    """One that has begun and come to no end yet."""

    reason: MigrationReason
    since: Seconds
    worker: NodeId
    words: str
    """What happened to the worker that had it."""


class DispatchedRequest:
    """See `backend.RequestHandle`."""

    __slots__ = (
        "_deaths",
        "_excluded",
        "_held",
        "_keep_on",
        "_last",
        "_migrated",
        "_migration",
        "_moves",
        "_names",
        "_needs",
        "_on_placed",
        "_over",
        "_sink",
        "_start",
        "_task",
        "_trial",
        "_tries",
        "_turned_away",
        "_ways",
        "attempt",
        "attempts",
        "hints",
        "received",
        "request",
    )

    def __init__(
        self,
        ways: ClusterPort,
        request: GenerateRequest,
        sink: TokenSink,
        hints: RoutingHints,
        on_placed: Callable[[Placement], None],
    ) -> None:
        self.request = request
        self.hints = hints
        self.attempts = 0
        """Answers of routers so far."""
        self.received = ReceivedTokens(request)
        self.attempt: Assignment | None = None
        """At the worker that has it, or is asked to take it."""
        self._ways = ways
        self._sink = sink
        self._on_placed = on_placed
        self._start = ways.now()
        self._names = short_hashes(request.block_names)
        self._needs = request.needs
        self._held: Seconds = 0.0
        self._tries = 0
        self._turned_away: Seconds = 0.0
        self._excluded = Exclusions()
        self._last: PdserveError | None = None
        self._deaths = PoisonTracker(ways.config.poison_after)
        self._trial: NodeId | None = None
        """Where it is tried, apart from others that workers may have died of."""
        self._migration: _Migration | None = None
        self._migrated = 0
        self._keep_on = False
        """A worker has had it: it is not given up for want of another one at once."""
        self._moves = 0
        self._over = False
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ what routers are asked

    def question(self) -> RouteRequest:
        """What a router is asked, now.

        Errors: `DeadlineExceeded`.
        """
        request, hints, received = self.request, self.hints, self.received
        remaining = self.remaining
        if remaining is not None and remaining <= 0:
            raise DeadlineExceeded("the request's time ran out while it waited for a worker")
        attempt = self.attempt
        return RouteRequest(
            request_id=request.request_id,
            attempt=self.attempts,
            model=request.model,
            prompt_tokens=len(request.prompt) + received.longest,
            max_tokens=max(0, request.sampling.max_tokens - received.shortest),
            n=max(1, request.n - len(received.ended)),
            priority=request.priority,
            excluded=(*hints.denied, *self.excluded()),
            allowed=hints.allowed,
            names=self._names,
            names_id=request.names_id if self._names else b"",
            block_size=self._ways.block_size(request.model) if self._names else 0,
            session_id=hints.session_id,
            tenant=hints.tenant,
            weight=hints.weight,
            waited=hints.waited + self._spent,
            deadline=remaining,
            slo_ttft=hints.slo_ttft if attempt is None and not self._keep_on else None,
            hold=attempt is None or attempt.moving == "drain",
        )

    def excluded(self) -> tuple[NodeId, ...]:
        """Workers that it has failed at, the one that it is to leave, and those that cannot do what
        it asks for, but have come since it was planned."""
        ways = self._ways
        found = self._excluded.at(ways.now(), ways.epoch_of) if self._excluded else ()
        if self._needs:
            found += tuple(
                node for node in ways.lacking(self.request.model, self._needs) if node not in found
            )
        if self.attempt is not None and self.attempt.life.node not in found:
            found = (*found, self.attempt.life.node)
        return found

    @property
    def patience(self) -> Seconds | None:
        """How long a router may take to answer; None: as long as the request has time."""
        attempt = self.attempt
        return None if attempt is None or attempt.moving == "drain" else _PATIENCE

    @property
    def remaining(self) -> Seconds | None:
        """Of the request's deadline; None: it has none."""
        deadline = self.request.deadline
        return None if deadline is None else deadline - self._spent

    @property
    def _spent(self) -> Seconds:
        return max(0.0, self._ways.now() - self._start)

    # ------------------------------------------------------------------ to the first worker

    async def dispatch(self) -> None:
        """Until a worker has taken it. Raises what `backend.Backend.open` raises."""
        ways, model = self._ways, self.request.model
        while self._tries < _ATTEMPTS:
            try:
                router, routed = await ways.route(self)
            except NoWorker:
                if self._last is None:
                    raise
                if not self._let_in_again():
                    raise no_worker_error(model, self._last) from None
                continue
            self._tries += 1
            try:
                placed = await self.place(router, routed)
            except _ELSEWHERE as error:
                self.count_out(NodeLife(routed.worker, routed.epoch), error)
                continue
            if placed:
                return
            await ways.wait_news(timeout=_PAUSE)  # of the life that the worker has begun
        raise no_worker_error(model, self._last)

    def _let_in_again(self) -> bool:
        """Whether workers that did not take it are asked once more, since it was held for so long
        after that."""
        if not self._excluded or self._ways.now() - self._turned_away < _APART:
            return False
        self._excluded = Exclusions()
        return True

    async def place(
        self, router: NodeId, routed: RouteDecision, leave: Assignment | None = None
    ) -> bool:
        """Hand it to the worker that was named; `leave`: where it is until then. False: in a life
        that is over. Raises what `ClusterPort.place` raises; it is nowhere then, if the worker was
        reached."""
        self.attempts += 1
        self._held += routed.held
        attempt = Assignment(self, self._sink, self.received, routed)

        def begin() -> GenerateRequest:
            if leave is not None:
                self._leave(leave)
            self.attempt = attempt
            self._note(router, routed)
            return self._request_now()

        try:
            sequence = await self._ways.place(begin, attempt, router, routed)
        except BaseException:
            if self.attempt is attempt:
                self.attempt = None
            raise
        if sequence is None:
            return False
        attempt.sequence = sequence
        if self._over or self.attempt is not attempt:  # it has ended within this turn
            sequence.cancel()
            return True
        if attempt.begun:
            self._shorten(attempt)
        if attempt.unwanted is not None:
            self.unwanted(attempt, attempt.unwanted)
        return True

    def _note(self, router: NodeId, routed: RouteDecision) -> None:
        """Before the worker is asked: its tokens may come at once."""
        predicted = routed.predicted_ttft
        overlap = routed.overlap_blocks
        self._on_placed(
            Placement(
                worker=routed.worker,
                router=router,
                policy=routed.policy,
                attempts=self.attempts,
                overlap_tokens=overlap * self._ways.block_size(self.request.model),
                predicted_ttft=(
                    None if predicted is None else self.hints.waited + self._spent + predicted
                ),
                held=self._held,
                migrations=self._migrated + (self._migration is not None),
            )
        )

    def _request_now(self) -> GenerateRequest:
        """With what has come, and the time that is left of its deadline; what is too short to
        matter is not worth a copy."""
        request = self.received.continuation(self.request)
        if self._deaths.suspect(self._ways.now(), self._ways.standing):
            request = replace(request, suspect=True)
        remaining = self.remaining
        if remaining is None or self._spent < _NOTICED:
            return request
        return replace(request, deadline=max(0.001, remaining))

    def count_out(self, life: NodeLife, error: PdserveError) -> None:
        """A worker that was asked to take it did not."""
        _log.info("worker %s did not take a request: %s", life.node, error)
        self._ways.rerouted += 1
        self._last = error
        self._turned_away = self._ways.now()
        self._leave_out(life)

    def _leave_out(self, life: NodeLife) -> None:
        self._excluded.add(life, self._ways.now() + _APART if self._keep_on else None)

    # ------------------------------------------------------------------ what comes back

    def heard(self, attempt: Assignment, delta: TokenDelta) -> TokenDelta | None:
        """A delta to be looked at, as the sink is to have it; None: nobody wants it."""
        if self._over or attempt is not self.attempt:
            return None
        if not attempt.begun and (delta.tokens or delta.finish is not None):
            attempt.begun = True
            attempt.plain = self.request.sampling.prompt_logprobs is None
            self._end_trial()
            self._note_progress()
            self._shorten(attempt)
        if delta.prompt_logprobs is not None:
            delta = self.received.scored_once(delta)
        if delta.finish is not None:
            self.received.ended.add(delta.choice)
            if len(self.received.ended) == self.request.n:
                self._finish()
        return delta

    def _shorten(self, attempt: Assignment) -> None:
        """What is never to go on elsewhere need not be kept."""
        if not self._ways.config.migration and attempt.sequence is not None:
            attempt.sequence.sink = self._sink

    def _note_progress(self) -> None:
        self._deaths.clear()
        migration, self._migration = self._migration, None
        if migration is None:
            return
        self._migrated += 1
        metrics = self._ways.metrics
        metrics.migrations.labels(migration.reason, "completed").inc()
        if self.received.any:
            metrics.migration_gap.observe(self._ways.now() - migration.since)

    def end_choice(self, choice: int) -> None:
        """See `backend.RequestHandle`."""
        self.received.ended.add(choice)

    def failed(self, attempt: Assignment, error: PdserveError) -> None:
        """The worker that had it has not: another may."""
        if self._over or attempt is not self.attempt:
            return
        self.attempt = None
        alone = self._end_trial()
        if attempt.moving is not None and self._task is not None:
            self._task.cancel()
        reason = migration_reason(error)
        if isinstance(error, Overloaded) and not attempt.begun:
            self._refused(attempt, error)
        elif reason is not None and self._ways.config.migration:
            self._lost(attempt, reason, error, alone=alone)
        else:
            self.fail(error)

    def _refused(self, attempt: Assignment, error: Overloaded) -> None:
        """Its queue was full when the request reached it: another may have room."""
        if not self._keep_on and self._tries >= _ATTEMPTS:
            self.fail(error)
            return
        self.count_out(attempt.life, error)
        self._run(self._carry_on if self._keep_on else self.dispatch)

    def _lost(
        self, attempt: Assignment, reason: MigrationReason, error: PdserveError, *, alone: bool
    ) -> None:
        _log.info("worker %s has lost a request: %s", attempt.life.node, error)
        self._begin_migration(attempt, reason, error.message)
        self._leave_out(attempt.life)
        if not attempt.begun:
            self._deaths.add(WorkerDeath(attempt.life, reason, self._ways.now(), alone))
        self._run(self._carry_on)

    def _begin_migration(self, attempt: Assignment, reason: MigrationReason, words: str) -> None:
        now = self._ways.now()
        if not self._keep_on:
            self._keep_on = True
            self._excluded.relax(now + _APART)
        since = now if self._migration is None else self._migration.since
        self._migration = _Migration(reason, since, attempt.life.node, words)

    # ------------------------------------------------------------------ to the next worker

    def _run(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        try:
            self._task = self._ways.run(self, self._guarded(work))
        except PdserveError as closed:  # this process is going away
            self.fail(closed)

    async def _guarded(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        try:
            await work()
        except PdserveError as error:
            self.fail(error)
        except Exception as error:
            _log.exception("a request could not be sent on")
            self.fail(EngineError(f"{type(error).__name__} in the frontend"))

    async def _carry_on(self) -> None:
        """Until another worker has taken it, or none has been found for long. Raises `NoWorker`,
        `Poisoned`, `DeadlineExceeded`, and what no worker can cure."""
        ways = self._ways
        until = ways.now() + ways.config.worker_wait
        while True:
            await self._weigh_deaths()
            try:
                router, routed = await ways.route(self)
            except (Unavailable, Overloaded) as error:
                if not self._is_left_out(error):
                    self._last = error
                await self._wait(until)
                continue
            until += routed.held
            try:
                if self._deaths.suspect(ways.now(), ways.standing):
                    until += await self._begin_trial(router, routed)
                if await self.place(router, routed):
                    return
            except (DeadlineExceeded, Poisoned):
                raise
            except PdserveError as error:  # one worker took it: what another says is its own limit
                self._end_trial()
                self.count_out(NodeLife(routed.worker, routed.epoch), error)
            else:
                self._end_trial()
                await ways.wait_news(timeout=_PAUSE)
            self._check_time(until)

    def _is_left_out(self, error: PdserveError) -> bool:
        """Routers have nobody because those who did not take it are left out: what those said is
        the cause."""
        ways = self._ways
        return (
            isinstance(error, NoWorker)
            and self._last is not None
            and not isinstance(self._last, NoWorker)
            and bool(self._excluded.at(ways.now(), ways.epoch_of))
        )

    async def _begin_trial(self, router: NodeId, routed: RouteDecision) -> Seconds:
        """When no other that workers may have died of is tried there; how long that took. The first
        token ends it, and whatever else ends the attempt."""
        ways, worker = self._ways, routed.worker
        asked = ways.now()
        try:
            await ways.trials.begin(worker)
        except BaseException:
            ways.give_back(router, routed)
            raise
        self._trial = worker
        return ways.now() - asked

    def _end_trial(self) -> bool:
        """Whether there was one."""
        worker, self._trial = self._trial, None
        if worker is not None:
            self._ways.trials.end(worker)
        return worker is not None

    async def _wait(self, until: Seconds) -> None:
        """For a worker to come, or to be allowed again."""
        now = self._check_time(until)
        ends = [until, now + _ASK_AGAIN, self._excluded.next_end(now)]
        if self.remaining is not None:
            ends.append(now + self.remaining)
        timeout = min(end for end in ends if end is not None) - now
        await self._ways.wait_news(timeout=max(_PAUSE, timeout), at_least=_PAUSE)

    def _check_time(self, until: Seconds) -> Seconds:
        now = self._ways.now()
        if now < until:
            return now
        lost, wait = self._migration, self._ways.config.worker_wait
        what = "" if lost is None else f"worker {lost.worker} is lost ({lost.words}); "
        hide = self._last is None or isinstance(self._last, LinkError)
        last = "" if hide else f": {self._last}"
        raise NoWorker(
            f"{what}no other worker took the request for {self.request.model!r} within "
            f"{wait:g} s{last}",
            retry_after=1.0,
        )

    async def _weigh_deaths(self) -> None:
        """Raises `Poisoned`. Waits, within bounds, where it is not known whether workers died."""
        ways, deaths = self._ways, self._deaths
        until = ways.now() + _DOUBT
        while True:
            dead = deaths.condemn(ways.standing)
            if dead:
                one = len(dead) == 1
                who = "a worker" if one else f"{len(dead)} workers"
                how = "" if one else "one after another and "
                last = "" if self._migration is None else f" (the last: {self._migration.words})"
                raise Poisoned(
                    f"{who} died of this request, {how}before it brought a token there: "
                    f"{', '.join(dead)}{last}; it is given to no other, and sent again it may do "
                    "the same"
                )
            wait = until - ways.now()
            if not deaths.may_condemn(ways.standing) or wait <= 0:
                return
            await ways.wait_news(timeout=wait, at_least=_PAUSE)

    # ------------------------------------------------------------------ elsewhere, if possible

    def unwanted(self, attempt: Assignment, reason: MigrationHintReason) -> None:
        """Its worker, or a router, would rather have it served elsewhere."""
        if self._over or attempt is not self.attempt or not self._ways.config.migration:
            return
        if attempt.sequence is None:  # whoever waits for that would not know that it was left
            if attempt.unwanted is None or outweighs(reason, attempt.unwanted):
                attempt.unwanted = reason
            return
        if attempt.moving is not None:
            if outweighs(reason, attempt.moving):
                attempt.moving = reason  # whoever looks for another worker sees it
            return
        late = reason == "queue" and (attempt.begun or self._trial is not None)
        if late or (reason != "drain" and self._moves >= _MOVES):
            return
        attempt.moving = reason
        self._run(partial(self._move, attempt))

    async def _move(self, attempt: Assignment) -> None:
        try:
            await migrate_live(self, self._ways, attempt)
        except Exception:  # a bug; the request has a worker, or finds one below
            _log.exception("a request could not be moved")
        if self.attempt is attempt:
            assert attempt.moving is not None  # it was set by whoever began this
            self._ways.metrics.migrations.labels(attempt.moving, "stayed").inc()
            attempt.moving = None
        elif self.attempt is None and not self._over:  # it has left, and was not taken
            await self._carry_on()

    def _leave(self, attempt: Assignment) -> None:
        """The short stop: what has come until now is all that comes from there."""
        assert attempt.moving is not None  # else nobody leaves
        self._end_trial()
        self._moves += attempt.moving != "drain"
        self.attempt = None
        self._begin_migration(attempt, attempt.moving, "it was to be relieved")
        self._leave_out(attempt.life)
        if attempt.sequence is not None:
            attempt.sequence.cancel()

    # ------------------------------------------------------------------ the end

    def fail(self, error: PdserveError) -> None:
        """It ends so, unless it is over."""
        if self._over:
            return
        outcome: MigrationOutcome = "failed"
        if isinstance(error, Poisoned):
            outcome = "poison"
            self._ways.metrics.poisoned_requests.inc()
        elif isinstance(error, NoWorker):
            outcome = "no_worker"
        elif isinstance(error, Cancelled):
            outcome = "cancelled"
        self._close(outcome)
        self._sink.on_error(error)

    def cancel(self) -> None:
        """See `backend.RequestHandle`."""
        self._close("cancelled")

    def _finish(self) -> None:
        """The last token is here."""
        self._over = True
        if self._task is not None:
            self._task.cancel()

    def _close(self, outcome: MigrationOutcome) -> None:
        migration, self._migration = self._migration, None
        if migration is not None:
            self._ways.metrics.migrations.labels(migration.reason, outcome).inc()
        self._over = True
        self._end_trial()
        if self._task is not None:
            self._task.cancel()
        if self.attempt is not None and self.attempt.sequence is not None:
            self.attempt.sequence.cancel()


def no_worker_error(model: str, last: PdserveError | None) -> PdserveError:
    """What a client hears when no worker is left to ask: what the last one said, if one spoke;
    addresses that did not answer are the operator's concern."""
    if last is None:
        return NoWorker(f"no worker takes requests for {model!r} at the moment", retry_after=1.0)
    if isinstance(last, LinkError):
        return NoWorker(f"no worker of {model!r} could be reached", retry_after=1.0)
    return last
