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
from pdserve.observe.logs import about
from pdserve.tracing.phases import AttemptPhase, MovePhase, RoutePhase, in_words

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
    from pdserve.observe.metrics import Metrics, ModelMetrics
    from pdserve.tracing.phases import PromptPhases

__all__ = ["Assignment", "ClusterPort", "DispatchedRequest", "no_worker_error"]

_log = logging.getLogger(__name__)

_ATTEMPTS: Final = 4
"""Number of workers that a new request may fail to reach before its client gets an error."""
_PAUSE: Final[Seconds] = 0.05
"""Seconds before a router is asked again whose view of the cluster was out of date."""
_CATCH_UP: Final[Seconds] = 2.0
"""Seconds that routers get to learn that a worker has restarted."""
_NOTICED: Final[Seconds] = 0.1
"""Waiting time in seconds from which on the deadline sent to the worker is adjusted."""
_APART: Final[Seconds] = 2.0
"""Seconds for which a worker that lost the request is excluded, if it lives: another worker is
better, but this one is better than none."""
_ASK_AGAIN: Final[Seconds] = 1.0
"""Seconds after which routers that found no worker are asked again; membership news comes
sooner."""
_DOUBT: Final[Seconds] = 5.0
"""Seconds to wait until it is known whether lost workers died, when one more death would make the
request poison."""
_MOVES: Final = 3
"""Most migrations per request that a worker may ask for, drains not counted; more would only
shuttle it."""
_PATIENCE: Final[Seconds] = 2.0
"""Seconds for a router to answer about a request that has a worker already."""
_ELSEWHERE: Final = (LinkError, Unavailable, Overloaded, EngineDied)
"""Errors of one worker that another worker may not have."""


class ClusterPort(Protocol):
    """What a dispatched request needs of the cluster; `cluster_client.ClusterClient` implements
    it."""

    rerouted: int
    config: FrontendConfig
    metrics: Metrics
    trials: PoisonIsolation

    def now(self) -> Seconds: ...

    def block_size(self, model: str) -> int:
        """Tokens per KV block of the model; 0 if it is not served."""
        ...

    def epoch_of(self, worker: NodeId) -> Epoch | None:
        """The epoch of the worker's present life; None if it is not a member."""
        ...

    def standing(self, life: NodeLife) -> LifeStatus: ...

    def lacking(self, model: str, features: tuple[str, ...]) -> tuple[NodeId, ...]:
        """Workers that serve the model without one of these features: those of an earlier
        release."""
        ...

    def shares_kv(self, one: NodeId, other: NodeId) -> bool:
        """True if KV can be moved between the two workers."""
        ...

    async def route(self, dispatched: DispatchedRequest) -> tuple[NodeId, RouteDecision]:
        """Asks routers until one decides; returns the router and its decision."""
        ...

    async def place(
        self,
        begin: Callable[[], GenerateRequest],
        attempt: Assignment,
        router: NodeId,
        routed: RouteDecision,
    ) -> RemoteSequence | None:
        """Hands the request to the worker of the decision. `begin` makes the request once the
        worker is reached. Returns None if that life of the worker is over."""
        ...

    async def warm(self, request: GenerateRequest, routed: RouteDecision, timeout: Seconds) -> None:
        """Lets the worker of the decision compute a request whose output is discarded."""
        ...

    def give_back(self, router: NodeId, routed: RouteDecision) -> None:
        """Tells the router that its decision is not followed."""
        ...

    async def wait_news(self, *, timeout: Seconds = 1.0, at_least: Seconds = 0.0) -> None: ...

    def run(
        self, dispatched: DispatchedRequest, work: Coroutine[None, None, None]
    ) -> asyncio.Task[None]:
        """Runs `work` in the background; calls `DispatchedRequest.fail` if it is cut short."""
        ...


class Assignment:
    """The request at one worker. Implements `TokenSink` for that worker's output."""

    __slots__ = (
        "_received",
        "_sink",
        "_tails",
        "begun",
        "booking",
        "dispatched",
        "life",
        "moving",
        "phase",
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
        """None until the worker has accepted the request."""
        self.begun = False
        """True once a token has come from this worker."""
        self.plain = False
        """True if deltas need no check except for the end of a choice."""
        self.moving: MigrationHintReason | None = None
        """The reason why another worker is searched while this one continues; None if none is."""
        self.unwanted: MigrationHintReason | None = None
        """The reason for a move, received before the worker's acceptance; None if none was."""
        self.phase: AttemptPhase | None = None
        """The record of this attempt; None: nothing is recorded."""

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
        """Called when the worker or a router asks to move the request."""
        self.dispatched.unwanted(self, reason)


@dataclass(slots=True)
class _Migration:
    """A migration in progress."""

    reason: MigrationReason
    since: Seconds
    worker: NodeId
    words: str
    """What happened to the previous worker."""
    began: Seconds
    """`since` on the clock of the request's phases; 0: nothing is recorded."""


class DispatchedRequest:
    """One request on the cluster. Implements `backend.RequestHandle`."""

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
        "_phases",
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
        "moved",
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
        phases: PromptPhases | None = None,
    ) -> None:
        self.request = request
        self.hints = hints
        self.moved: Seconds = 0.0
        self.attempts = 0
        """Number of router decisions so far."""
        self.received = ReceivedTokens(request)
        self.attempt: Assignment | None = None
        """The worker that has the request, or is asked to take it."""
        self._ways = ways
        self._sink = sink
        self._on_placed = on_placed
        self._phases = phases
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
        """The worker at which the request is tried alone, see `poison_isolation`."""
        self._migration: _Migration | None = None
        self._migrated = 0
        self._keep_on = False
        """True once a worker has had the request: then it waits longer for another one."""
        self._moves = 0
        self._over = False
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ routing requests

    def route_request(self) -> RouteRequest:
        """The routing request, from the request's present state.

        Errors: `DeadlineExceeded`.
        """
        request, hints, received = self.request, self.hints, self.received
        remaining = self.remaining
        if remaining is not None and remaining <= 0:
            raise DeadlineExceeded("the request's deadline passed while it waited for a worker")
        attempt = self.attempt
        return RouteRequest(
            request_id=request.request_id,
            attempt=self.attempts,
            model=request.model,
            prompt_tokens=request.prompt_tokens + received.longest,
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
            lora=request.lora,
            waited=hints.waited + self._spent,
            deadline=remaining,
            slo_ttft=hints.slo_ttft if attempt is None and not self._keep_on else None,
            hold=attempt is None or attempt.moving == "drain",
            trace=self._phases is not None and self._phases.traced,
        )

    def excluded(self) -> tuple[NodeId, ...]:
        """Workers to exclude: those that failed, the present one, and those that lack a feature
        which the request needs."""
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
        """Seconds that a router may take to answer; None: until the request's deadline."""
        attempt = self.attempt
        return None if attempt is None or attempt.moving == "drain" else _PATIENCE

    @property
    def remaining(self) -> Seconds | None:
        """Seconds until the request's deadline; None if it has none."""
        deadline = self.request.deadline
        return None if deadline is None else deadline - self._spent

    @property
    def _spent(self) -> Seconds:
        return max(0.0, self._ways.now() - self._start)

    async def route(self) -> tuple[NodeId, RouteDecision]:
        """Asks routers for a worker. Errors: those of `ClusterPort.route`."""
        phases = self._phases
        if phases is None:
            return await self._ways.route(self)
        start, why = phases.time(), self._why
        try:
            router, routed = await self._ways.route(self)
        except BaseException as error:
            phases.add_route(RoutePhase(start, phases.time(), why, error=in_words(error)))
            raise
        overlap = routed.overlap_blocks * self._ways.block_size(self.request.model)
        phases.add_route(RoutePhase(start, phases.time(), why, router, routed, overlap))
        return router, routed

    @property
    def _why(self) -> str:
        """Why another worker is wanted, in a word."""
        if self.attempt is not None and self.attempt.moving is not None:
            return self.attempt.moving
        if self._migration is not None:
            return self._migration.reason
        return "refused" if self.attempts else "first"

    # ------------------------------------------------------------------ first worker

    async def dispatch(self) -> None:
        """Returns when a worker has accepted the request. Errors: as `backend.Backend.open`."""
        ways, model = self._ways, self.request.model
        stale_since: Seconds | None = None
        while self._tries < _ATTEMPTS:
            try:
                router, routed = await self.route()
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
            # The worker has restarted, and the router does not know it yet: that is no attempt.
            self._tries -= 1
            stale_since = ways.now() if stale_since is None else stale_since
            if ways.now() - stale_since > _CATCH_UP:
                break
            await ways.wait_news(timeout=_PAUSE)
        raise no_worker_error(model, self._last)

    def _let_in_again(self) -> bool:
        """True if excluded workers are allowed again, because the last refusal is long enough
        ago."""
        if not self._excluded or self._ways.now() - self._turned_away < _APART:
            return False
        self._excluded = Exclusions()
        return True

    async def place(
        self, router: NodeId, routed: RouteDecision, leave: Assignment | None = None
    ) -> bool:
        """Hands the request to the worker of the decision. `leave`: the worker that has it until
        then. Returns False if the router meant a life of the worker that is over. Errors: those of
        `ClusterPort.place`; if the worker was reached, no worker has the request afterwards."""
        phase = self._note_attempt(routed)
        self.attempts += 1
        self._held += routed.held
        attempt = Assignment(self, self._sink, self.received, routed)
        attempt.phase = phase

        def begin() -> GenerateRequest:
            if leave is not None:
                self._leave(leave)
            self.attempt = attempt
            self._note(router, routed)
            if phase is not None and self._phases is not None:
                phase.sent = self._phases.time()
                phase.tokens_before = self.received.longest if self._keep_on else 0
            return self._request_now(routed)

        try:
            sequence = await self._ways.place(begin, attempt, router, routed)
        except BaseException as error:
            if self.attempt is attempt:
                self.attempt = None
            self._end_phase(attempt, _end_of(error, phase), error)
            raise
        if sequence is None:
            self._end_phase(attempt, "restarted")
            return False
        attempt.sequence = sequence
        # The request may have ended, or lost this attempt, in the turn in which it was accepted.
        if self._over or self.attempt is not attempt:
            sequence.cancel()
            self._end_phase(attempt, "cancelled")
            return True
        if phase is not None and self._phases is not None:
            phase.accepted = self._phases.time()
        if attempt.begun:
            self._shorten(attempt)
        if attempt.unwanted is not None:
            self.unwanted(attempt, attempt.unwanted)
        return True

    def _note_attempt(self, routed: RouteDecision) -> AttemptPhase | None:
        phases = self._phases
        if phases is None:
            return None
        number = self.attempts + 1
        return phases.add_attempt(
            AttemptPhase(number, routed.worker, routed.epoch, self._why, phases.time())
        )

    def _end_phase(self, attempt: Assignment, how: str, error: BaseException | None = None) -> None:
        """Closes the record of an attempt, unless it is closed."""
        if attempt.phase is not None and self._phases is not None:
            words = "" if error is None else in_words(error)
            attempt.phase.close(self._phases.time(), how, words)

    def _note(self, router: NodeId, routed: RouteDecision) -> None:
        """Reports the placement. Called before the worker is asked, because its tokens may come at
        once."""
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

    def _request_now(self, routed: RouteDecision) -> GenerateRequest:
        """The request with the tokens so far, the remaining deadline and the decision's sources of
        KV. A deadline that has hardly changed is not worth a copy."""
        request = self.received.continuation(self.request)
        if routed.kv_sources:
            request = replace(request, kv_sources=routed.kv_sources)
        if self._deaths.suspect(self._ways.now(), self._ways.standing):
            request = replace(request, suspect=True)
        if self._phases is not None and self._phases.traced:
            request = replace(request, trace=True, trace_id=self._phases.trace_id)
        remaining = self.remaining
        if remaining is None or self._spent < _NOTICED:
            return request
        return replace(request, deadline=max(0.001, remaining))

    @property
    def _about(self) -> dict[str, object]:
        """For the log: these lines are written outside of the request's own task."""
        traced = b"" if self._phases is None else self._phases.trace_id
        return about(replace(self.request, trace_id=traced))

    def count_out(self, life: NodeLife, error: PdserveError) -> None:
        """Records that a worker did not take the request, and excludes it."""
        _log.info("worker %s did not take a request: %s", life.node, error, extra=self._about)
        self._ways.rerouted += 1
        self._last = error
        self._turned_away = self._ways.now()
        self._leave_out(life)

    def _leave_out(self, life: NodeLife) -> None:
        self._excluded.add(life, self._ways.now() + _APART if self._keep_on else None)

    # ------------------------------------------------------------------ output of workers

    def heard(self, attempt: Assignment, delta: TokenDelta) -> TokenDelta | None:
        """Processes a delta that needs a check; returns it as the sink gets it, or None if it is
        dropped."""
        if self._over or attempt is not self.attempt:
            return None
        if not attempt.begun and (delta.tokens or delta.finish is not None):
            attempt.begun = True
            if attempt.phase is not None and self._phases is not None:
                attempt.phase.first = self._phases.time()
                attempt.phase.started = delta.started
            attempt.plain = self.request.sampling.prompt_logprobs is None
            self._end_trial()
            self._note_progress()
            self._shorten(attempt)
        if delta.prompt_logprobs is not None:
            delta = self.received.scored_once(delta)
        if delta.finish is not None:
            if attempt.phase is not None:
                attempt.phase.finished(delta.finish)
            self.received.ended.add(delta.choice)
            if len(self.received.ended) == self.request.n:
                self._finish()
        return delta

    def _shorten(self, attempt: Assignment) -> None:
        """Connects the worker directly to the sink if migration is off: then no tokens need be
        kept."""
        if not self._ways.config.migration and attempt.sequence is not None:
            attempt.sequence.sink = self._sink

    def _note_progress(self) -> None:
        self._deaths.clear()
        migration = self._end_migration("completed")
        if migration is None:
            return
        self._migrated += 1
        metrics = self._metrics
        metrics.migrated(migration.reason, "completed")
        if self.received.any:
            gap = self._ways.now() - migration.since
            self.moved += gap
            metrics.migration_gap.observe(gap)

    def _end_migration(self, outcome: MigrationOutcome) -> _Migration | None:
        """Ends the migration in progress, if there is one, and returns it."""
        migration, self._migration = self._migration, None
        phases = self._phases
        if migration is not None and phases is not None:
            now = phases.time()
            target = (
                "" if outcome != "completed" or self.attempt is None else self.attempt.life.node
            )
            phases.add_move(
                MovePhase(
                    min(migration.began, now),
                    now,
                    migration.reason,
                    migration.worker,
                    target,
                    outcome,
                )
            )
        return migration

    def output(self, choice: int) -> list[int]:
        """Output tokens of a choice so far; without migration they are not kept."""
        return self.received.tokens(choice)

    def end_choice(self, choice: int) -> None:
        """Ends one choice; it does not move to another worker."""
        self.received.ended.add(choice)

    def failed(self, attempt: Assignment, error: PdserveError) -> None:
        """Handles an error of the worker: finds another worker if that may help, else ends the
        request."""
        if self._over or attempt is not self.attempt:
            return
        self.attempt = None
        alone = self._end_trial()
        if attempt.moving is not None and self._task is not None:
            self._task.cancel()
        reason = migration_reason(error)
        refused = isinstance(error, Overloaded) and not attempt.begun
        self._end_phase(attempt, "refused" if refused else reason or "failed", error)
        if isinstance(error, Overloaded) and not attempt.begun:
            self._refused(attempt, error)
        elif reason is not None and self._ways.config.migration:
            self._lost(attempt, reason, error, alone=alone)
        else:
            self.fail(error)

    def _refused(self, attempt: Assignment, error: Overloaded) -> None:
        """Handles a full queue at the worker: another worker may have room."""
        if not self._keep_on and self._tries >= _ATTEMPTS:
            self.fail(error)
            return
        self.count_out(attempt.life, error)
        self._run(self._carry_on if self._keep_on else self.dispatch)

    def _lost(
        self, attempt: Assignment, reason: MigrationReason, error: PdserveError, *, alone: bool
    ) -> None:
        _log.info("worker %s lost a request: %s", attempt.life.node, error, extra=self._about)
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
        began = 0.0 if self._phases is None else self._phases.time()
        since = now
        if self._migration is not None:
            since, began = self._migration.since, self._migration.began
        self._migration = _Migration(reason, since, attempt.life.node, words, began)

    # ------------------------------------------------------------------ next worker

    def _run(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        try:
            self._task = self._ways.run(self, self._guarded(work))
        except PdserveError as closed:
            # This process is closing.
            self.fail(closed)

    async def _guarded(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        try:
            await work()
        except PdserveError as error:
            self.fail(error)
        except Exception as error:
            _log.exception("a request could not be sent to another worker", extra=self._about)
            self.fail(EngineError(f"{type(error).__name__} in the frontend"))

    async def _carry_on(self) -> None:
        """Finds another worker for a request that has lost its own; returns when one has accepted
        it. Errors: `NoWorker` after `worker_wait`, `Poisoned`, `DeadlineExceeded`, and errors that
        no other worker would cure."""
        ways = self._ways
        until = ways.now() + ways.config.worker_wait
        while True:
            await self._weigh_deaths()
            try:
                router, routed = await self.route()
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
            except PdserveError as error:
                # A worker has accepted this request before, so a refusal tells of this worker only.
                self._end_trial()
                self.count_out(NodeLife(routed.worker, routed.epoch), error)
            else:
                self._end_trial()
                await ways.wait_news(timeout=_PAUSE)
            self._check_time(until)

    def _is_left_out(self, error: PdserveError) -> bool:
        """True if routers find no worker only because the workers that refused are excluded: their
        errors are the cause to report."""
        ways = self._ways
        return (
            isinstance(error, NoWorker)
            and self._last is not None
            and not isinstance(self._last, NoWorker)
            and bool(self._excluded.at(ways.now(), ways.epoch_of))
        )

    async def _begin_trial(self, router: NodeId, routed: RouteDecision) -> Seconds:
        """Waits until no other suspect request is tried at that worker; returns the seconds waited.
        The trial ends with the first token, or with the attempt."""
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
        """Ends the trial; returns False if there was none."""
        worker, self._trial = self._trial, None
        if worker is not None:
            self._ways.trials.end(worker)
        return worker is not None

    async def _wait(self, until: Seconds) -> None:
        """Waits for a new worker, or until an excluded one is allowed again."""
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
        """Waits, for a bounded time, until it is known whether the lost workers died. Errors:
        `Poisoned` if too many did."""
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
                    f"{who} died while running this request, {how}before its first token there: "
                    f"{', '.join(dead)}{last}; it is not retried, and sent again it may do "
                    "the same"
                )
            wait = until - ways.now()
            if not deaths.may_condemn(ways.standing) or wait <= 0:
                return
            await ways.wait_news(timeout=wait, at_least=_PAUSE)

    # ------------------------------------------------------------------ live migration

    def unwanted(self, attempt: Assignment, reason: MigrationHintReason) -> None:
        """Handles a hint that another worker should serve the request: searches one, while the
        present worker continues."""
        if self._over or attempt is not self.attempt or not self._ways.config.migration:
            return
        if attempt.sequence is None:
            # `place` still waits for the worker's answer and would not notice that the request
            # left.
            if attempt.unwanted is None or outweighs(reason, attempt.unwanted):
                attempt.unwanted = reason
            return
        if attempt.moving is not None:
            if outweighs(reason, attempt.moving):
                # The search that is running reads the new reason.
                attempt.moving = reason
            return
        late = reason == "queue" and (attempt.begun or self._trial is not None)
        if late or (reason != "drain" and self._moves >= _MOVES):
            return
        attempt.moving = reason
        self._run(partial(self._move, attempt))

    async def _move(self, attempt: Assignment) -> None:
        try:
            await migrate_live(self, self._ways, attempt)
        except Exception:
            # This is a bug. The request still has a worker, or finds one below.
            _log.exception("a request could not be moved", extra=self._about)
        if self.attempt is attempt:
            assert attempt.moving is not None
            self._metrics.migrated(attempt.moving, "stayed")
            attempt.moving = None
        elif self.attempt is None and not self._over:
            # The request has left this worker, and no other one has accepted it.
            await self._carry_on()

    def _leave(self, attempt: Assignment) -> None:
        """Leaves the worker: no further output of it is used."""
        assert attempt.moving is not None
        self._end_phase(attempt, "moved")
        self._end_trial()
        self._moves += attempt.moving != "drain"
        self.attempt = None
        self._begin_migration(attempt, attempt.moving, "it asked to move the request")
        self._leave_out(attempt.life)
        if attempt.sequence is not None:
            attempt.sequence.cancel()

    # ------------------------------------------------------------------ the end

    def fail(self, error: PdserveError) -> None:
        """Ends the request with `error`, unless it has ended."""
        if self._over:
            return
        outcome: MigrationOutcome = "failed"
        if isinstance(error, Poisoned):
            outcome = "poison"
            self._metrics.poisoned_requests.inc()
        elif isinstance(error, NoWorker):
            outcome = "no_worker"
        elif isinstance(error, Cancelled):
            outcome = "cancelled"
        self._close(outcome, error)
        self._sink.on_error(error)

    @property
    def _metrics(self) -> ModelMetrics:
        return self._ways.metrics.of_model(self.request.model)

    def cancel(self) -> None:
        """Cancels the request at its worker, and every search for another. Idempotent."""
        self._close("cancelled")

    @property
    def _has_ended(self) -> bool:
        """True if the worker has sent all its tokens past this object, see `_shorten`."""
        sequence = None if self.attempt is None else self.attempt.sequence
        return sequence is not None and sequence.choices == 0

    def _finish(self) -> None:
        """Marks the request as ended: its last token has come."""
        self._over = True
        if self._phases is not None and self.attempt is not None:
            self._phases.close(self.attempt.phase, "finished")
        if self._task is not None:
            self._task.cancel()

    def _close(self, outcome: MigrationOutcome, error: PdserveError | None = None) -> None:
        migration = self._end_migration(outcome)
        if migration is not None:
            self._metrics.migrated(migration.reason, outcome)
        if self._phases is not None and not self._phases.over:
            how = "finished" if self._has_ended else "failed" if error is not None else "cancelled"
            phase = None if self.attempt is None else self.attempt.phase
            self._phases.close(phase, how, "" if error is None else in_words(error))
        self._over = True
        self._end_trial()
        if self._task is not None:
            self._task.cancel()
        if self.attempt is not None and self.attempt.sequence is not None:
            self.attempt.sequence.cancel()


def _end_of(error: BaseException, phase: AttemptPhase | None) -> str:
    """How an attempt ended that the worker did not accept, in a word."""
    if not isinstance(error, PdserveError):
        return "cancelled"
    return "refused" if phase is not None and phase.sent else "unreachable"


def no_worker_error(model: str, last: PdserveError | None) -> PdserveError:
    """The error for a client when no worker is left to ask: the last worker's own error, if it
    answered. Addresses that did not answer are the operator's concern."""
    if last is None:
        return NoWorker(f"no worker takes requests for {model!r} at the moment", retry_after=1.0)
    if isinstance(last, LinkError):
        return NoWorker(f"no worker of {model!r} could be reached", retry_after=1.0)
    return last
