"""The life of one request on the cluster: its worker, and another one if that fails.

Keeps the request's history: refusals, waiting time, start, and every token received. If a worker
dies, drains or stalls, another one continues after the last token received. A worker that asks to
move the request continues it until another takes over (`migrate_live`). Asks `router_client` for a
worker and sends the request over `worker_streams`; neither calls back, and what a worker sends
comes to the `Assignment`. Owned by its opener; ends by `cancel`, an error, or its last token.
"""

from __future__ import annotations

import logging
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
    NotReady,
    NoWorker,
    Overloaded,
    PdserveError,
    Poisoned,
    Unavailable,
)
from pdserve.frontend.dispatch.assignment import Assignment
from pdserve.frontend.dispatch.dispatch_phases import DispatchPhases, end_of
from pdserve.frontend.dispatch.migration.live_migration import migrate_live
from pdserve.frontend.dispatch.migration.migration_record import MigrationRecord
from pdserve.frontend.dispatch.migration.migration_state import (
    ReceivedTokens,
    migration_reason,
    outweighs,
)
from pdserve.frontend.dispatch.poison_guard import PoisonGuard
from pdserve.frontend.dispatch.refusals import Refusals
from pdserve.frontend.dispatch.router_client import no_worker_error
from pdserve.frontend.dispatch.worker_stream import ACCEPT_TIMEOUT
from pdserve.frontend.placement import Placement
from pdserve.messages.routing import RouteRequest
from pdserve.observe.logs import about

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine

    from pdserve.engine.port import TokenSink
    from pdserve.frontend.config import FrontendConfig
    from pdserve.frontend.dispatch.cluster_members import ClusterMembers
    from pdserve.frontend.dispatch.migration.migration_record import MigrationInProgress
    from pdserve.frontend.dispatch.migration.migration_state import (
        MigrationOutcome,
        MigrationReason,
    )
    from pdserve.frontend.dispatch.poison_isolation import PoisonIsolation
    from pdserve.frontend.dispatch.router_client import RouterBooking, RouterClient
    from pdserve.frontend.dispatch.worker_streams import WorkerStreams
    from pdserve.frontend.routing_hints import RoutingHints
    from pdserve.ids import NodeId, NodeLife, Seconds
    from pdserve.messages.demand import EndedRequest
    from pdserve.messages.request import GenerateRequest, TokenDelta
    from pdserve.messages.routing import RequestOutcome, RouteDecision
    from pdserve.messages.worker_stream import MigrationHintReason
    from pdserve.observe.metrics import Metrics, ModelMetrics
    from pdserve.tracing.phases import PromptPhases

__all__ = ["DispatchContext", "DispatchedRequest"]

_log = logging.getLogger(__name__)

_ATTEMPTS: Final = 4
"""Number of workers that a new request may fail to reach before its client gets an error."""
_PAUSE: Final[Seconds] = 0.05
"""Seconds before a router is asked again whose view of the cluster was out of date."""
_CATCH_UP: Final[Seconds] = 2.0
"""Seconds that routers get to learn that a worker has restarted."""
_NOTICED: Final[Seconds] = 0.1
"""Waiting time in seconds from which on the deadline sent to the worker is adjusted."""
_ASK_AGAIN: Final[Seconds] = 1.0
"""Seconds after which routers that found no worker are asked again; membership news comes
sooner."""
_MOVES: Final = 3
"""Most migrations per request that a worker may ask for, drains not counted; more would only
shuttle it."""
_PATIENCE: Final[Seconds] = 2.0
"""Seconds for a router to answer about a request that has a worker already."""
_ELSEWHERE: Final = (LinkError, Unavailable, Overloaded, EngineDied)
"""Errors of one worker that another worker may not have."""


class DispatchContext(Protocol):
    """What the requests of one frontend share; `cluster_client.ClusterClient` implements it."""

    rerouted: int

    @property
    def config(self) -> FrontendConfig: ...

    @property
    def metrics(self) -> Metrics: ...

    @property
    def members(self) -> ClusterMembers: ...

    @property
    def routers(self) -> RouterClient: ...

    @property
    def workers(self) -> WorkerStreams: ...

    @property
    def trials(self) -> PoisonIsolation: ...

    def now(self) -> Seconds: ...

    def run(
        self, dispatched: DispatchedRequest, work: Coroutine[None, None, None]
    ) -> asyncio.Task[None]:
        """Runs `work` in the background; calls `DispatchedRequest.fail` if it is cut short."""
        ...


class DispatchedRequest:
    """One request on the cluster. Implements `backend.RequestHandle`."""

    __slots__ = (
        "_context",
        "_held",
        "_metrics",
        "_migrations",
        "_names",
        "_on_placed",
        "_over",
        "_poison",
        "_refusals",
        "_sink",
        "_start",
        "_task",
        "attempt",
        "attempts",
        "ended",
        "hints",
        "phases",
        "received",
        "request",
    )

    def __init__(
        self,
        context: DispatchContext,
        request: GenerateRequest,
        sink: TokenSink,
        hints: RoutingHints,
        on_placed: Callable[[Placement], None],
        phases: PromptPhases | None = None,
        ended: Callable[[], EndedRequest | None] = lambda: None,
    ) -> None:
        """`ended`: as in `backend.Backend.open`."""
        self.request = request
        self.ended = ended
        self.hints = hints
        self.attempts = 0
        """Number of router decisions so far."""
        self.received = ReceivedTokens(request)
        self.attempt: Assignment | None = None
        """The worker that has the request, or is asked to take it."""
        self.phases = DispatchPhases(phases)
        self._context = context
        self._metrics: ModelMetrics = context.metrics.of_model(request.model)
        self._sink = sink
        self._on_placed = on_placed
        self._start = context.now()
        self._names = short_hashes(request.block_names)
        self._held: Seconds = 0.0
        self._refusals = Refusals()
        self._poison = PoisonGuard(context.config.poison_after, context.members, context.trials)
        self._migrations = MigrationRecord()
        self._over = False
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ questions to routers

    def route_request(self) -> RouteRequest:
        """The question to a router, from the request's present state. Errors:
        `DeadlineExceeded`."""
        request, hints, received = self.request, self.hints, self.received
        spent, deadline = self._spent, request.deadline
        remaining = None if deadline is None else deadline - spent
        if remaining is not None and remaining <= 0:
            raise DeadlineExceeded("the request's deadline passed while it waited for a worker")
        attempt, is_new = self.attempt, not self._refusals.had_worker
        return RouteRequest(
            request_id=request.request_id,
            attempt=self.attempts,
            model=request.model,
            prompt_tokens=request.prompt_tokens + received.longest,
            max_tokens=max(0, request.sampling.max_tokens - received.shortest),
            n=max(1, request.n - len(received.ended)),
            priority=request.priority,
            excluded=(*hints.denied, *self._excluded()),
            allowed=hints.allowed,
            names=self._names,
            names_id=request.names_id if self._names else b"",
            block_size=self._block_size if self._names else 0,
            session_id=hints.session_id,
            tenant=hints.tenant,
            weight=hints.weight,
            lora=request.lora,
            waited=hints.waited + spent,
            deadline=remaining,
            slo_ttft=hints.slo_ttft if attempt is None and is_new else None,
            hold=attempt is None or attempt.moving == "drain",
            trace=self.phases.traced,
        )

    def _excluded(self) -> tuple[NodeId, ...]:
        """Workers to exclude: those that failed, the present one, and those that lack a feature
        which the request needs."""
        members, needs = self._context.members, self.request.needs
        found = self._refusals.excluded(members.now(), members.epoch_of)
        if needs:
            lacking = members.lacking(self.request.model, needs)
            found += tuple(node for node in lacking if node not in found)
        if self.attempt is not None and self.attempt.life.node not in found:
            found = (*found, self.attempt.life.node)
        return found

    @property
    def remaining(self) -> Seconds | None:
        """Seconds until the request's deadline; None if it has none."""
        deadline = self.request.deadline
        return None if deadline is None else deadline - self._spent

    @property
    def _spent(self) -> Seconds:
        return max(0.0, self._context.now() - self._start)

    @property
    def _block_size(self) -> int:
        return self._context.members.block_size(self.request.model)

    async def route(self) -> RouterBooking:
        """Asks routers for a worker. Errors: those of `RouterClient.route`."""
        attempt, phases = self.attempt, self.phases
        patience = None if attempt is None or attempt.moving == "drain" else _PATIENCE
        start, why = phases.time(), self._why
        try:
            booking = await self._context.routers.route(self.route_request(), patience)
        except BaseException as error:
            phases.not_routed(start, why, error)
            raise
        phases.routed(start, why, booking, self._block_size)
        return booking

    @property
    def _why(self) -> str:
        """Why another worker is wanted, in a word."""
        if self.attempt is not None and self.attempt.moving is not None:
            return self.attempt.moving
        if self._migrations.current is not None:
            return self._migrations.current.reason
        return "refused" if self.attempts else "first"

    # ------------------------------------------------------------------ first worker

    async def dispatch(self) -> None:
        """Returns when a worker has accepted the request. Errors: as `backend.Backend.open`."""
        refusals, model = self._refusals, self.request.model
        stale_since: Seconds | None = None
        while refusals.tries < _ATTEMPTS:
            try:
                booking = await self.route()
            except (NoWorker, NotReady):
                if refusals.last is None:
                    raise
                if not refusals.let_in_again(self._context.now()):
                    raise no_worker_error(model, refusals.last) from None
                continue
            refusals.tries += 1
            try:
                placed = await self.place(booking)
            except _ELSEWHERE as error:
                self.refused(booking.life, error)
                continue
            if placed:
                return
            # The worker has restarted, and the router does not know it yet: that is no attempt.
            refusals.tries -= 1
            now = self._context.now()
            stale_since = now if stale_since is None else stale_since
            if now - stale_since > _CATCH_UP:
                break
            await self._context.members.wait_change(timeout=_PAUSE)
        raise no_worker_error(model, refusals.last)

    # ------------------------------------------------------------------ to a worker

    async def place(self, booking: RouterBooking, leave: Assignment | None = None) -> bool:
        """Hands the request to the worker of a booking. `leave`: the worker that has it until then.
        Returns False if the router meant a life of the worker that is over.

        Errors: `LinkError`, those of the worker; if the worker was reached, no worker has the
        request afterwards. The booking ends with the request there, or here.
        """
        decision, phases = booking.decision, self.phases
        phase = phases.add_attempt(self.attempts + 1, decision, self._why)
        self.attempts += 1
        self._held += decision.held
        attempt = Assignment(self, self._sink, self.received, decision)
        attempt.phase = phase
        outcome: RequestOutcome = "unreached"
        try:
            stream = await self._context.workers.stream(attempt.life)
            if stream is None:
                booking.end(outcome)
                phases.end_attempt(phase, "restarted")
                return False
            outcome = "failed"
            self._become(attempt, booking, leave)
            attempt.sequence = await stream.open(
                self._request_now(decision),
                decision.booking,
                attempt,
                booking.end,
                timeout=ACCEPT_TIMEOUT,
                on_moving=attempt.on_moving,
            )
        except BaseException as error:
            booking.end(outcome)
            if self.attempt is attempt:
                self.attempt = None
            phases.end_attempt(phase, end_of(error, phase), error)
            raise
        self._accepted(attempt)
        return True

    def _become(
        self, attempt: Assignment, booking: RouterBooking, leave: Assignment | None
    ) -> None:
        """Takes this worker for the request's own, and reports it. The worker has not been asked
        yet, because its tokens may come at once."""
        booking.hold(attempt)
        if leave is not None:
            self._leave(leave)
        self.attempt = attempt
        decision, predicted = booking.decision, booking.decision.predicted_ttft
        self._on_placed(
            Placement(
                worker=decision.worker,
                router=booking.router,
                policy=decision.policy,
                attempts=self.attempts,
                overlap_tokens=decision.overlap_blocks * self._block_size,
                predicted_ttft=(
                    None if predicted is None else self.hints.waited + self._spent + predicted
                ),
                held=self._held,
                migrations=self._migrations.number,
            )
        )
        before = self.received.longest if self._refusals.had_worker else 0
        self.phases.sent(attempt.phase, before)

    def _accepted(self, attempt: Assignment) -> None:
        """The worker has taken the request, which may have ended, or lost this attempt, in the same
        turn."""
        assert attempt.sequence is not None
        if self._over or self.attempt is not attempt:
            attempt.sequence.cancel()
            self.phases.end_attempt(attempt.phase, "cancelled")
            return
        self.phases.accepted(attempt.phase)
        if attempt.begun:
            self._shorten(attempt)
        if attempt.unwanted is not None:
            self.unwanted(attempt, attempt.unwanted)

    def _request_now(self, decision: RouteDecision) -> GenerateRequest:
        """The request with the tokens so far, the remaining deadline and the decision's sources of
        KV. A deadline that has hardly changed is not worth a copy."""
        request = self.received.continuation(self.request)
        if decision.kv_sources:
            request = replace(request, kv_sources=decision.kv_sources)
        if self._poison.suspect:
            request = replace(request, suspect=True)
        if self.phases.traced:
            request = replace(request, trace=True, trace_id=self.phases.trace_id)
        spent, deadline = self._spent, request.deadline
        if deadline is None or spent < _NOTICED:
            return request
        return replace(request, deadline=max(0.001, deadline - spent))

    @property
    def _about(self) -> dict[str, object]:
        """For the log: these lines are written outside of the request's own task."""
        return about(replace(self.request, trace_id=self.phases.trace_id))

    def refused(self, life: NodeLife, error: PdserveError) -> None:
        """Records that a worker did not take the request, and excludes it."""
        _log.info("worker %s did not take a request: %s", life.node, error, extra=self._about)
        self._context.rerouted += 1
        self._refusals.refused(life, error, self._context.now())

    # ------------------------------------------------------------------ output of workers

    def heard(self, attempt: Assignment, delta: TokenDelta) -> TokenDelta | None:
        """Processes a delta that needs a check; returns it as the sink gets it, or None if it is
        dropped."""
        if self._over or attempt is not self.attempt:
            return None
        if not attempt.begun and (delta.tokens or delta.finish is not None):
            attempt.begun = True
            self.phases.first(attempt.phase, delta)
            attempt.plain = self.request.sampling.prompt_logprobs is None
            self._poison.end_trial()
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
        if not self._context.config.migration and attempt.sequence is not None:
            attempt.sequence.sink = self._sink

    def _note_progress(self) -> None:
        self._poison.clear()
        if self._migrations.current is None:
            return
        migration = self._end_migration("completed")
        if migration is not None and self.received.any:
            gap = self._context.now() - migration.since
            self._migrations.moved += gap
            self._metrics.migration_gap.observe(gap)

    def _end_migration(self, outcome: MigrationOutcome) -> MigrationInProgress | None:
        """Ends the migration in progress, if there is one, and returns it."""
        if self._migrations.current is None:
            return None
        return self._migrations.end(outcome, self.attempt, self.phases, self._metrics)

    @property
    def moved(self) -> Seconds:
        """Seconds between two workers during which no token came, so far."""
        return self._migrations.moved

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
        alone = self._poison.end_trial()
        if attempt.moving is not None and self._task is not None:
            self._task.cancel()
        reason = migration_reason(error)
        refused = isinstance(error, Overloaded) and not attempt.begun
        self.phases.end_attempt(attempt.phase, "refused" if refused else reason or "failed", error)
        if refused:
            self._turned_away(attempt, error)
        elif reason is not None and self._context.config.migration:
            self._lost(attempt, reason, error, alone=alone)
        else:
            self.fail(error)

    def _turned_away(self, attempt: Assignment, error: PdserveError) -> None:
        """Handles a full queue at the worker: another worker may have room."""
        had_worker = self._refusals.had_worker
        if not had_worker and self._refusals.tries >= _ATTEMPTS:
            self.fail(error)
            return
        self.refused(attempt.life, error)
        self._run(self._carry_on if had_worker else self.dispatch)

    def _lost(
        self, attempt: Assignment, reason: MigrationReason, error: PdserveError, *, alone: bool
    ) -> None:
        _log.info("worker %s lost a request: %s", attempt.life.node, error, extra=self._about)
        self._begin_migration(attempt, reason, error.message)
        if not attempt.begun:
            self._poison.lost(attempt.life, reason, alone=alone)
        self._run(self._carry_on)

    def _begin_migration(self, attempt: Assignment, reason: MigrationReason, words: str) -> None:
        now = self._context.now()
        self._refusals.lost_worker(now)
        self._migrations.begin(attempt, reason, words, now, self.phases.time())
        self._refusals.leave_out(attempt.life, now)

    # ------------------------------------------------------------------ next worker

    def _run(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        try:
            self._task = self._context.run(self, self._guarded(work))
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
        context, refusals = self._context, self._refusals
        until = context.now() + context.config.worker_wait
        while True:
            await self._poison.weigh(self._migrations.words)
            try:
                booking = await self.route()
            except (Unavailable, Overloaded) as error:
                if not refusals.hide(error, context.now(), context.members.epoch_of):
                    refusals.last = error
                await self._wait(until)
                continue
            until += booking.decision.held
            try:
                if self._poison.suspect:
                    until += await self._begin_trial(booking)
                if await self.place(booking):
                    return
            except (DeadlineExceeded, Poisoned):
                raise
            except PdserveError as error:
                # A worker has accepted this request before, so a refusal tells of this worker only.
                self._poison.end_trial()
                self.refused(booking.life, error)
            else:
                self._poison.end_trial()
                await context.members.wait_change(timeout=_PAUSE)
            self._check_time(until)

    async def _begin_trial(self, booking: RouterBooking) -> Seconds:
        """As `PoisonGuard.begin_trial`."""
        try:
            return await self._poison.begin_trial(booking.decision.worker)
        except BaseException:
            booking.end("unreached")
            raise

    async def _wait(self, until: Seconds) -> None:
        """Waits for a new worker, or until an excluded one is allowed again."""
        now = self._check_time(until)
        ends = [until, now + _ASK_AGAIN, self._refusals.next_end(now)]
        if self.remaining is not None:
            ends.append(now + self.remaining)
        timeout = min(end for end in ends if end is not None) - now
        await self._context.members.wait_change(timeout=max(_PAUSE, timeout), at_least=_PAUSE)

    def _check_time(self, until: Seconds) -> Seconds:
        now = self._context.now()
        if now < until:
            return now
        lost, wait = self._migrations.current, self._context.config.worker_wait
        what = "" if lost is None else f"worker {lost.worker} is lost ({lost.words}); "
        raise NoWorker(
            f"{what}no other worker took the request for {self.request.model!r} within "
            f"{wait:g} s{self._refusals.words}",
            retry_after=1.0,
        )

    # ------------------------------------------------------------------ live migration

    def unwanted(self, attempt: Assignment, reason: MigrationHintReason) -> None:
        """Handles a hint that another worker should serve the request: searches one, while the
        present worker continues."""
        if self._over or attempt is not self.attempt or not self._context.config.migration:
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
        late = reason == "queue" and (attempt.begun or self._poison.on_trial)
        if late or (reason != "drain" and self._migrations.wished >= _MOVES):
            return
        attempt.moving = reason
        self._run(partial(self._move, attempt))

    async def _move(self, attempt: Assignment) -> None:
        try:
            await migrate_live(self, self._context, attempt)
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
        self.phases.end_attempt(attempt.phase, "moved")
        self._poison.end_trial()
        self._migrations.wished += attempt.moving != "drain"
        self.attempt = None
        self._begin_migration(attempt, attempt.moving, "it asked to move the request")
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

    def cancel(self) -> None:
        """Cancels the request at its worker, and every search for another. Idempotent."""
        self._close("cancelled")

    def _finish(self) -> None:
        """Marks the request as ended: its last token has come."""
        self._over = True
        self.phases.finished(self.attempt)
        if self._task is not None:
            self._task.cancel()

    def _close(self, outcome: MigrationOutcome, error: PdserveError | None = None) -> None:
        self._end_migration(outcome)
        sequence = None if self.attempt is None else self.attempt.sequence
        # Its worker may have sent all its tokens past this object, see `_shorten`.
        all_sent = sequence is not None and sequence.choices == 0
        self.phases.close(self.attempt, error, ended=all_sent)
        self._over = True
        self._poison.end_trial()
        if self._task is not None:
            self._task.cancel()
        if sequence is not None:
            sequence.cancel()
        # The worker's end of the request refers to this object: the cycle would keep both until
        # the garbage collector runs.
        self.attempt = None
