"""The router's state and decisions without its sockets: workers, bookings, prefix index, predictor,
policy, and the queue of held requests.

    offer ─┬─ refused                                   raised
           ├─ placed at once                            returned
           └─ held ─┬─ placed, refused, expired         `QueuedRequest.answer`
                    └─ withdrawn by its frontend        no answer

Each request gets exactly one of these. While a worker is *open* (little predicted work ahead, and
room for a sequence), the first held request is placed: the policy chooses among all workers that
may take it. A request that must not be held, because a worker already serves it, is placed at an
open worker or refused. The service calls `look` after every event that may free room (`stirred`),
and at the time that `next_look` names.

The service turns messages into calls here, and results into answers and publications. News of
members and load goes to every part; what other routers publish about single bookings goes to
`bookings` alone.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from math import inf, log
from operator import attrgetter
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.blocks.hashing import SHORT_HASH_BYTES
from pdserve.errors import (
    ConfigError,
    DeadlineExceeded,
    Draining,
    ModelNotFound,
    Overloaded,
    PdserveError,
)
from pdserve.ids import NodeLife
from pdserve.messages.demand import ModelTimes
from pdserve.messages.routing import Candidate, RouteDecision, RoutingPreview
from pdserve.perf_model.predictor import Observation, Predictor
from pdserve.router.admission_control import (
    MAX_WAIT_SHARE,
    best_chance,
    drain_time,
    over_bound,
    too_late,
    waits_too_long,
    worth_waiting,
)
from pdserve.router.admission_queue import AdmissionQueue, PlacedRequest, QueuedRequest
from pdserve.router.bookings import BookingEnd, Bookings, DecisionBasis
from pdserve.router.demand import DemandCounters, HeldDemand, LearntTimes
from pdserve.router.drain_rate import DrainRate
from pdserve.router.eligibility import RouteRejection, candidates, explain_eligibility
from pdserve.router.kv_sources import (
    KvHolder,
    count_copies,
    kv_sources,
    longest_first,
    most_copies,
)
from pdserve.router.onboarding import BlocksBySource, onboarding_plans
from pdserve.router.policies.base import Explains, RoutingState
from pdserve.router.prefix_index.index import PrefixIndex
from pdserve.router.rebalance import (
    MAX_ATTEMPTS,
    RebalanceGroup,
    Rebalancer,
    RebalanceTarget,
    waiting_bookings,
)
from pdserve.router.worker_filter import WorkerFilter, WorkerFilters, WorkerSet
from pdserve.router.worker_table import WorkerTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.handoff import QueueState
    from pdserve.messages.request import FirstTokenStats
    from pdserve.messages.routing import RouteRequest, WorkerLoad
    from pdserve.messages.tiers import KvSource
    from pdserve.perf_model.prediction_error import ErrorSummary
    from pdserve.perf_model.remote_prefill import RemotePrefillEstimate
    from pdserve.router.bookings import Booking
    from pdserve.router.config import RouterConfig
    from pdserve.router.onboarding import Onboarding
    from pdserve.router.policies.base import Policy, WorkerView
    from pdserve.router.rebalance import WaitingBooking
    from pdserve.router.worker_table import ModelView, WorkerFacts

__all__ = ["RouterCore", "RouterCounters"]

_log = logging.getLogger(__name__)

_LOOK_AGAIN: Final[Seconds] = 0.25
"""Interval at which held requests are examined at least, whatever was predicted."""
_LATE: Final[Seconds] = 0.001
"""Added to a predicted time, so that it has surely passed."""


def _reusable(request: RouteRequest) -> bytes:
    """Names of the blocks that an engine can take from its cache: the prompt's last token is always
    computed, so not the block that ends with it."""
    blocks = (request.prompt_tokens - 1) // request.block_size if request.block_size else 0
    return request.names[: SHORT_HASH_BYTES * max(0, blocks)]


@dataclass(slots=True)
class RouterCounters:
    """Counters since the start. `offered` is the sum of the ends and of what is held now."""

    offered: int = 0
    placed: int = 0
    refused: int = 0
    expired: int = 0
    """Held beyond their deadlines."""
    withdrawn: int = 0
    """Held, then withdrawn."""
    held: int = 0
    """Ever held; each also counts under its end, or still waits."""
    held_seconds: float = 0.0
    """Time held, of those that were placed."""
    prompt_tokens: int = 0
    """Prompt tokens of own bookings whose first token has come."""
    expected_tokens: int = 0
    """The part of `prompt_tokens` that was believed to be cached at the decision."""
    cached_tokens: int = 0
    """The part of `prompt_tokens` that the worker found cached."""
    waited_seconds: float = 0.0
    """Time from the decision to the first token, where it was predicted."""
    predicted_seconds: float = 0.0
    """The predictions for `waited_seconds`."""
    moves_asked: int = 0
    """Bookings that frontends were told to move to another worker."""
    copies_kept: int = 0
    """Decisions for a worker that was expected to fetch a prefix, and to keep it."""
    copies_let_go: int = 0
    """The same, where enough workers had it already."""


class RouterCore:
    """The decisions of one router. Methods take the time and do not wait."""

    def __init__(
        self,
        config: RouterConfig,
        policy: Policy,
        random: Random,
        on_end: Callable[[Booking, BookingEnd], None] = lambda booking, why: None,
        clock: Callable[[], Seconds] = lambda: 0.0,
        predictor: Predictor | None = None,
        queue_of: Callable[[str], QueueState | None] = lambda model: None,
    ) -> None:
        """`on_end` is called once for each booking made here, when it ends. `clock` gives the time
        where a call does not. `queue_of` gives the state of a model's prefill queue."""
        self._config = config
        self._policy = policy
        self._random = random
        self._queue_of = queue_of
        self._clock = clock
        self._wants_routed = bool(getattr(policy, "needs_routed", False))
        self.predictor = predictor or Predictor()
        self.index = PrefixIndex(config, remember=self._wants_routed)
        self.bookings = Bookings(config, random, self._ended(on_end), self._predict, clock)
        self.pool = WorkerTable(
            config,
            self.bookings,
            speed=self.predictor.speed,
            predict=lambda worker, tokens: self._predict(worker, tokens, 0),
            known_blocks=lambda worker: self.index.known_blocks(worker.node),
        )
        self.numbers = RouterCounters()
        self.demand = DemandCounters()
        self.decisions: Counter[str] = Counter()
        """Number of decisions by the policy that made them, or by its fallback."""
        self.stirred = False
        """True if a change may let a held request go."""
        self.draining = False
        """True if the router holds no more requests."""
        self._rebalancer = Rebalancer()
        self._queues: dict[str, AdmissionQueue] = {}
        """Queues by the model name of the request; only queues with waiting requests."""
        self._paces: dict[str, DrainRate] = {}
        """Drain rates of these queues."""
        self._asked = 0
        self._looking = False

    # ------------------------------------------------------------------ news

    def worker(self, now: Seconds, facts: WorkerFacts) -> None:
        """A worker appeared, or its facts changed."""
        self.bookings.worker_up(facts.worker)
        self.index.worker_up(facts.worker)
        self.pool.put(now, facts)
        self.stirred = True

    def gone(self, now: Seconds, life: NodeLife) -> None:
        """A member's life has ended, of any role."""
        self.bookings.worker_gone(life)
        self.bookings.frontend_gone(life)
        self.bookings.peer_gone(life)
        self.index.worker_gone(life)
        self.predictor.worker_gone(life)
        self.pool.gone(now, life)
        for item in [item for item in self._held() if item.frontend == life]:
            self.withdraw(item)
        self.stirred = True

    def load(self, worker: NodeLife, load: WorkerLoad | None, now: Seconds = 0.0) -> None:
        """A worker's newest load report; None: reports no longer arrive."""
        self.pool.report(worker, load, now)
        if load is None:
            self.bookings.report_lost(worker)
        else:
            self.bookings.reported(worker)
            if model := self.pool.model_of(worker.node):
                self.predictor.report(now, model, worker, load)
        self.stirred = True

    def holds(
        self, now: Seconds, worker: NodeLife, id: int, started: FirstTokenStats | None
    ) -> None:
        """A worker has a booking's request; `started`: also its first token."""
        booking = self.bookings.held(worker, id, started)
        if started is None:
            return
        self.stirred = True
        if booking is not None:
            if booking.dispatch is not None:
                self.demand.first_token(now, booking.dispatch.model)
            self._learn(now, booking, started)

    def let_go(self, worker: NodeLife, id: int) -> None:
        """A worker no longer has a booking's request."""
        self.bookings.let_go(worker, id)

    def sweep(self, now: Seconds) -> None:
        """Drop expired entries; call it every `RouterConfig.sweep_interval`."""
        self.bookings.expire(now)
        self.bookings.pass_to(now)
        self.pool.forget(now)
        self.index.sweep(now)

    def _ended(
        self, on_end: Callable[[Booking, BookingEnd], None]
    ) -> Callable[[Booking, BookingEnd], None]:
        def ended(booking: Booking, why: BookingEnd) -> None:
            self.stirred = True
            if booking.dispatch is not None and why is not BookingEnd.NEVER_SEEN:
                now, model = self._clock(), booking.dispatch.model
                self.demand.kv_held(now, model, booking.prompt_tokens, now - booking.placed)
            on_end(booking, why)

        return ended

    def _learn(self, now: Seconds, booking: Booking, started: FirstTokenStats) -> None:
        numbers, dispatch = self.numbers, booking.dispatch
        cached = min(started.cached_tokens, booking.prompt_tokens)
        numbers.prompt_tokens += booking.prompt_tokens
        numbers.expected_tokens += booking.cached_tokens
        numbers.cached_tokens += cached
        if dispatch is None:
            return
        if dispatch.predicted_ttft is not None:
            numbers.waited_seconds += now - booking.placed
            numbers.predicted_seconds += dispatch.predicted_ttft
        seen = Observation(
            model=dispatch.model,
            worker=booking.worker,
            prompt_tokens=booking.prompt_tokens,
            cached_tokens=cached,
            work_seconds=started.work_seconds,
            queue_seconds=started.queue_seconds,
            prefill_seconds=started.prefill_seconds,
            predicted_ttft=dispatch.predicted_ttft,
            predicted_work=booking.work / 1e6,
            sequences=dispatch.sequences,
            kv_tokens=dispatch.kv_tokens,
            load_age=dispatch.load_age,
            received_tokens=started.received_tokens,
            prefill_cached=started.prefill_cached if _computed_remotely(started) else None,
            elsewhere_wait=dispatch.elsewhere_wait,
        )
        self.predictor.observe(now, seen)

    def _predict(self, worker: NodeLife, prompt_tokens: int, cached_tokens: int) -> Seconds:
        """Predicted prefill seconds at that worker; 0 if a prefill worker is sooner."""
        name = self.pool.model_of(worker.node)
        cached = min(cached_tokens, max(0, prompt_tokens - 1))
        here = self.predictor.model(name).prefill(prompt_tokens, cached)
        here *= self.predictor.speed(worker)
        facts = self.pool.facts(worker.node)
        if facts is not None and facts.decode:
            elsewhere = self._elsewhere(name)
            if elsewhere is not None and elsewhere.ttft(prompt_tokens, cached) < here:
                return 0.0
        return here

    def _elsewhere(self, model: str) -> RemotePrefillEstimate | None:
        return self.predictor.elsewhere(model, self._queue_of)

    # ------------------------------------------------------------------ requests

    def offer(
        self,
        now: Seconds,
        frontend: NodeLife,
        request: RouteRequest,
        answer: Callable[[PlacedRequest | PdserveError], None],
    ) -> PlacedRequest | QueuedRequest:
        """Decide on a request and book its worker, or hold it. A held request's `answer` is called
        once with the result, unless it is withdrawn.

        Errors: `ModelNotFound`, `NotReady`, `NoWorker`, `Overloaded`, `Draining`,
        `DeadlineExceeded`; `ConfigError` if the policy fails.
        """
        self.numbers.offered += 1
        try:
            _check_time(request)
            return self._offer(now, frontend, request, answer)
        except Exception as error:
            self.numbers.refused += 1
            if _is_new(request) and not isinstance(error, ModelNotFound):
                self._arrived(now, request, *self._least_work(now, request))
            self._note_refusal(now, request, error)
            raise

    def withdraw(self, item: QueuedRequest) -> bool:
        """Drop a held request without an answer; False if it has one, or was withdrawn."""
        queue = self._queues.get(item.request.model)
        if queue is None or not queue.remove(item):
            return False
        self._forget_empty(item.request.model)
        self.numbers.withdrawn += 1
        return True

    def close(self) -> None:
        """The router stops: held requests, and new ones, are refused with `Draining`."""
        self.draining = True
        for item in list(self._held()):
            self._drop(item, _leaving())

    def undo_close(self) -> None:
        """The router goes on: requests are held again."""
        self.draining = False

    def send_away(self) -> None:
        """Refuse all held requests after an internal failure; their frontends ask another
        router."""
        for item in list(self._held()):
            self._drop(item, _broken())

    def _offer(
        self,
        now: Seconds,
        frontend: NodeLife,
        request: RouteRequest,
        answer: Callable[[PlacedRequest | PdserveError], None],
    ) -> PlacedRequest | QueuedRequest:
        model = request.model
        queue = self._queues.get(model)
        state: RoutingState | None = None
        if queue is None or request.slo_ttft is not None:
            state = self._state(now, request)
            if request.slo_ttft is not None:
                self._refuse_hopeless(now, request, state)
            if queue is None and self._may_go(now, model, state) and request.hold:
                return self._place_new(now, frontend, request, state)
        if not request.hold:
            return self._place_new(now, frontend, request, self._only_open(now, request))
        workers = self._candidates(now, request) if state is None else state.workers
        if self.draining:
            raise _leaving()
        return self._hold(now, frontend, request, workers, answer)

    def _place_new(
        self, now: Seconds, frontend: NodeLife, request: RouteRequest, state: RoutingState
    ) -> PlacedRequest:
        """As `_place`, for a request that was not held."""
        placed = self._place(now, frontend, request, state)
        if _is_new(request):
            cached = _most_cached(request, state)
            work = state.model.prefill(request.prompt_tokens, cached)
            self._arrived(now, request, cached, work)
        return placed

    def _only_open(self, now: Seconds, request: RouteRequest) -> RoutingState:
        """The snapshot of workers that would begin the request soon, for a request that already has
        a worker. Errors: `Overloaded` if there are none, or if other requests wait for them."""
        state = self._state(now, request)
        work = self._config.hold_work if self._holding(state) else inf
        workers = tuple(worker for worker in state.workers if worker.is_open(now, work))
        if not workers or request.model in self._queues:
            raise Overloaded(
                "no other worker has room now",
                retry_after=self._drain_time(now, request.model, state.workers),
            )
        return replace(state, workers=workers)

    def _refuse_hopeless(self, now: Seconds, request: RouteRequest, state: RoutingState) -> None:
        """Errors: `Overloaded` if no worker can keep the client's limit."""
        queue = self._queues.get(request.model)
        ahead = 0.0
        if queue is not None:
            cost = self._least_cost(now, request, state.workers)
            ahead = queue.ahead(request, cost, now) / self._pace(now, request.model, state.workers)
        self._refuse_late(now, request, state, ahead)

    def _refuse_late(
        self, now: Seconds, request: RouteRequest, state: RoutingState, ahead: Seconds
    ) -> None:
        """Errors: `Overloaded` if the wait leaves the request too small a chance to be in time."""
        age = max(self.pool.load_age(now, worker.node) for worker in state.workers)
        name = self.pool.model_of(state.workers[0].node)
        alone = chance = best_chance(self.predictor, name, request, state, 0.0, age)
        if ahead:
            chance = best_chance(self.predictor, name, request, state, ahead, age)
        if not worth_waiting(chance, alone):
            raise too_late(request, self._drain_time(now, request.model, state.workers))

    def _refuse_endless(
        self, now: Seconds, request: RouteRequest, workers: tuple[WorkerView, ...], cost: Seconds
    ) -> None:
        """Errors: `Overloaded` if the request would wait for most of the time to its deadline."""
        queue = self._queues.get(request.model)
        if queue is None or request.deadline is None or request.attempt:
            return  # who was let in before is not sent away
        wait = queue.ahead(request, cost, now) / self._pace(now, request.model, workers)
        if wait > MAX_WAIT_SHARE * request.deadline:
            drain = self._drain_time(now, request.model, workers)
            raise waits_too_long(wait, request.deadline, drain)

    def _hold(
        self,
        now: Seconds,
        frontend: NodeLife,
        request: RouteRequest,
        workers: tuple[WorkerView, ...],
        answer: Callable[[PlacedRequest | PdserveError], None],
    ) -> QueuedRequest:
        self._make_room(now, request, workers)
        deadline = None if request.deadline is None else now + request.deadline
        cached, cost = self._least(now, request, workers)
        self._refuse_endless(now, request, workers, cost)
        if _is_new(request):
            self._arrived(now, request, cached, cost)
        self._asked += 1
        item = QueuedRequest(request, frontend, answer, now, cost, deadline, self._asked)
        queue = self._queues.get(request.model)
        if queue is None:
            queue = self._queues[request.model] = AdmissionQueue(self._config.queue_order)
            self._paces[request.model] = DrainRate(now)
        elif queue.filters:  # who waits there need not be why this one would
            self.stirred = True
        queue.push(item)
        self.numbers.held += 1
        return item

    def _make_room(
        self, now: Seconds, request: RouteRequest, workers: tuple[WorkerView, ...]
    ) -> None:
        """Errors: `Overloaded` at a bound, unless a request of lower priority can be refused
        instead."""
        queue = self._queues.get(request.model)
        if queue is None or request.attempt:
            return
        size = sum(one.bytes for one in self._queues.values())
        drain = self._drain_time(now, request.model, workers)
        refusal = over_bound(self._config, len(queue), size, drain)
        if refusal is None:
            return
        victim = queue.last_below(request.priority)
        if victim is None:
            raise refusal
        self._drop(victim, refusal)

    def _least_cost(
        self, now: Seconds, request: RouteRequest, workers: tuple[WorkerView, ...]
    ) -> Seconds:
        """Predicted seconds at the worker with the longest cached prefix; orders the queue."""
        return self._least(now, request, workers)[1]

    def _least(
        self, now: Seconds, request: RouteRequest, workers: tuple[WorkerView, ...]
    ) -> tuple[int, Seconds]:
        """The prompt tokens that the worker with the longest prefix has, and the predicted seconds
        of the others, at speed 1."""
        found = self.index.find(now, _reusable(request), request.names_id)
        most = max((found.own_blocks(w.node) for w in workers), default=0)
        cached = min(most * request.block_size, max(0, request.prompt_tokens - 1))
        name = self.pool.model_of(workers[0].node) if workers else request.model
        return cached, self.predictor.model(name).prefill(request.prompt_tokens, cached)

    def _drain_time(self, now: Seconds, model: str, workers: tuple[WorkerView, ...]) -> Seconds:
        queue = self._queues.get(model)
        held = queue.work / self._pace(now, model, workers) if queue else 0.0
        return drain_time(now, workers, held, self._config.retry_after)

    def _pace(self, now: Seconds, model: str, workers: tuple[WorkerView, ...]) -> float:
        """Held work that begins per second."""
        pace = self._paces.get(model)
        return len(workers) if pace is None else pace.rate(now, len(workers))

    # ------------------------------------------------------------------ demand

    def _least_work(self, now: Seconds, request: RouteRequest) -> tuple[int, Seconds]:
        """As `_least`, among all workers of the model."""
        view = self.pool.view(now, request.model)
        return self._least(now, request, (*view.sound, *view.doubtful))

    def _arrived(self, now: Seconds, request: RouteRequest, cached: int, work: Seconds) -> None:
        tokens, choices = request.prompt_tokens, request.n
        self.demand.arrived(now, request.model, tokens, cached, choices, work)

    def _note_refusal(self, now: Seconds, request: RouteRequest, error: Exception) -> None:
        """Counts a request that ends here without a worker. After other errors its frontend asks
        another router."""
        if isinstance(error, Overloaded | DeadlineExceeded) and not request.attempt:
            self.demand.refused(now, request.model)

    def held_demand(self, now: Seconds, model: str) -> HeldDemand:
        """The requests of a model that wait here. O(their number)."""
        queue = self._queues.get(model)
        if queue is None:
            return HeldDemand()
        oldest = min((item.arrived for item in queue), default=now)
        return HeldDemand(len(queue), queue.work, max(0.0, now - oldest))

    def learnt_times(self, model: str) -> LearntTimes:
        """What the predictor has learnt of a model."""
        known = self.predictor.model(model)
        times = ModelTimes(
            known.base,
            known.per_token,
            known.per_pair,
            known.step_base,
            known.step_sequence,
            known.step_token,
            known.fitted,
        )
        poor = self.predictor.poor(model) is not None
        return LearntTimes(times, self.predictor.speeds(model), poor)

    # ------------------------------------------------------------------ one decision

    def _candidates(self, now: Seconds, request: RouteRequest) -> tuple[WorkerView, ...]:
        """Workers that may take the request. Errors: those of its rejection."""
        return self._among(request, self.pool.view(now, request.model))

    def _among(self, request: RouteRequest, model: ModelView) -> tuple[WorkerView, ...]:
        adapted = self.pool.with_lora(request.lora) if request.lora else None
        found = candidates(request, model, adapted)
        if isinstance(found, RouteRejection):
            raise found.error(self._config.retry_after)
        return found

    def _state(self, now: Seconds, request: RouteRequest) -> RoutingState:
        """The snapshot for the policy. Errors: those of the request's rejection."""
        model = self.pool.view(now, request.model)
        workers = self._among(request, model)
        if self.bookings.full:
            raise Overloaded(
                f"this router has {len(self.bookings)} requests in flight, which is its limit",
                retry_after=self._drain_time(now, request.model, workers),
            )
        last = model.last
        if last is None:  # routers that start together should not begin at the same worker
            last = self._random.choice(workers).node
        index, queue = self.index, self._queues.get(request.model)
        found = index.find(now, _reusable(request), request.names_id)
        name = self.pool.model_of(workers[0].node)
        learnt = self.predictor.model(name)
        holders = self._holders(request) if self.pool.tiered else ()
        routed = self._wants_routed
        return RoutingState(
            workers=workers,
            last=last,
            count=self.numbers.placed,
            now=now,
            overlaps=found.overlaps,
            lower=found.lower,
            routed=index.routed(now, request.names) if routed else _NOTHING,
            routed_blocks=index.routed_blocks() if routed else _NOTHING,
            model=learnt,
            elsewhere=self._elsewhere(name),
            held=len(queue) if queue else 0,
            open_work=0.0 if self.predictor.poor(name) else self._config.hold_work,
            holders=holders,
            onboarding=onboarding_plans(
                request,
                workers,
                found.overlaps,
                found.lower,
                holders,
                learnt,
                now,
                most_copies(self._config.kv_copies, len(workers)),
            )
            if self.pool.tiered
            else _NO_PLANS,
        )

    def _holders(self, request: RouteRequest) -> tuple[KvHolder, ...]:
        """Workers that can send leading blocks of the prompt, longest first."""
        told = self.index.holders(_reusable(request), request.names_id)
        if not told:
            return ()
        return longest_first(
            KvHolder(life, told[life][1], told[life][0], view.kv, view.occupancy)
            for view in self.pool.senders(request.model)
            if (life := NodeLife(view.node, view.epoch)) in told
            and view.node not in request.excluded
        )

    def _sources(
        self, request: RouteRequest, state: RoutingState, chosen: WorkerView
    ) -> tuple[KvSource, ...]:
        """Workers that have more of the prompt than the chosen one has in all its tiers."""
        if not chosen.kv.transfers:
            return ()
        own = state.own_blocks(chosen.node)
        if not any(state.own_blocks(node) > own for node in state.overlaps.keys() | state.lower):
            return ()
        most = most_copies(self._config.kv_copies, len(state.workers))

        def keeps(blocks: int) -> bool:
            return count_copies(blocks, state.overlaps, state.lower) < most

        return kv_sources(chosen, own, state.holders or self._holders(request), keeps)

    def _place(
        self,
        now: Seconds,
        frontend: NodeLife,
        request: RouteRequest,
        state: RoutingState,
        held: Seconds = 0.0,
    ) -> PlacedRequest:
        """Let the policy choose, and book the worker. Errors: `ConfigError` if the policy fails."""
        chosen = self._choose(request, state)
        worker = NodeLife(chosen.node, chosen.epoch)
        cached = state.cached_tokens(request, chosen)
        goes = state.elsewhere if state.goes_elsewhere(request, chosen) else None
        plan = state.onboarding.get(chosen.node) if goes is None else None
        work = state.model.prefill(request.prompt_tokens, cached) * chosen.speed
        if goes is not None:  # a prefill worker computes the prompt, so it delays no request there
            work = 0.0
        if plan is not None:
            cached, work = plan.tokens, plan.compute
        ttft = state.ttft(request, chosen)
        name = self.pool.model_of(chosen.node)
        policy = self._policy_name(name)
        dispatch = DecisionBasis(
            name,
            policy,
            ttft,
            chosen.sequences,
            chosen.kv_tokens,
            self.pool.load_age(now, chosen.node),
            None if goes is None else goes.wait,
            request.attempt,
            bool(request.allowed or request.lora),
        )
        sources = self._sources(request, state, chosen)
        kept = plan is None or plan.kept
        if kept:  # else it is there for no other request
            self.index.placed(now, worker, request.names, request.names_id)
        lanes = () if plan is None else tuple(plan.sizes.items())
        booking = self.bookings.place(
            now, worker, frontend, request.n, request.prompt_tokens, cached, work, dispatch, lanes
        )
        self.pool.chosen(request.model, chosen.node)
        self.numbers.placed += 1
        if plan is not None and plan.peer is not None:
            self.numbers.copies_kept += kept
            self.numbers.copies_let_go += not kept
        self.decisions[policy] += 1
        basis = (len(state.workers), state.held, chosen.sequences) if request.trace else (0, 0, 0)
        routed = RouteDecision(
            worker.node,
            worker.epoch,
            booking.id,
            policy,
            state.overlaps.get(chosen.node, 0) if plan is None else plan.blocks.own,
            ttft,
            held,
            *basis,
            kv_sources=sources,
        )
        return PlacedRequest(booking, routed)

    def _choose(self, request: RouteRequest, state: RoutingState) -> WorkerView:
        """The policy's choice. A failure is not `NoWorker`: frontends would think that this router
        has just started."""
        try:
            chosen = self._policy(request, state, self._random)
            _check_offered(chosen, state)
        except Exception as error:
            _log.exception("the policy %s failed", self._config.policy)
            words = "this router's log says how"
            raise ConfigError(f"the policy {self._config.policy} failed; {words}") from error
        return chosen

    def _policy_name(self, model: str) -> str:
        poor = self.predictor.model(model)
        if poor.blind:
            return f"{self._config.policy} (requests)"
        if self.predictor.poor(model):
            return f"{self._config.policy} (tokens)"
        return self._config.policy

    # ------------------------------------------------------------------ who waits

    def _may_go(self, now: Seconds, model: str, state: RoutingState) -> bool:
        """True if some worker is open, or requests are never held."""
        if not self._holding(state):
            return True
        work = self._config.hold_work
        return any(worker.is_open(now, work) for worker in state.workers)

    def _holding(self, state: RoutingState) -> bool:
        """True if requests may be held. Without reliable predictions, holding would only leave
        workers idle."""
        if self._config.hold_work <= 0:
            return False
        return not self.predictor.poor(self.pool.model_of(state.workers[0].node))

    def look(self, now: Seconds) -> None:
        """Place or refuse held requests where possible. Calls their `answer`, which may call
        `offer` but not `look`."""
        if self._looking:
            return
        self.stirred, self._looking = False, True
        try:
            for model in list(self._queues):
                self._expire(now, model)
                self._let_go(now, model)
        finally:
            self._looking = False

    def _expire(self, now: Seconds, model: str) -> None:
        queue = self._queues.get(model)
        for item in queue.expired(now) if queue is not None else ():
            self._drop(item, self._overdue(now, item))

    def _overdue(self, now: Seconds, item: QueuedRequest) -> PdserveError:
        held, request = now - item.arrived, item.request
        if item.deadline is None or now < item.deadline:
            workers = self.pool.view(now, request.model).sound
            return too_late(request, self._drain_time(now, request.model, workers))
        return DeadlineExceeded(
            f"the deadline passed while it waited {held:.1f} s in the router for a worker"
        )

    def _drop(self, item: QueuedRequest, error: PdserveError) -> None:
        """Answer a held request with an error, unless it was withdrawn meanwhile."""
        queue = self._queues.get(item.request.model)
        if queue is None or not queue.remove(item):
            return
        self._forget_empty(item.request.model)
        if isinstance(error, DeadlineExceeded):
            self.numbers.expired += 1
        else:
            self.numbers.refused += 1
        self._note_refusal(self._clock(), item.request, error)
        item.answer(error)

    def _forget_empty(self, model: str) -> None:
        if not self._queues[model]:
            del self._queues[model], self._paces[model]

    def _let_go(self, now: Seconds, model: str) -> None:
        """Place held requests in order while some worker is open."""
        self._refuse_impossible(now, model)
        while (queue := self._queues.get(model)) is not None:
            fits = self._fits(now, queue, self.pool.view(now, model))
            item = queue.take(fits) if fits else None
            if item is None:
                return
            self._paces[model].began(now, item.cost)
            self._forget_empty(model)
            self._answer(now, item)

    def _all_workers(self, filters: WorkerFilters, view: ModelView) -> WorkerSet:
        """All workers that may be chosen; the same object until workers come, go or change."""
        if filters.all_workers is None or filters.version != view.version:
            filters.all_workers = self._crowd(view.sound, view.doubtful)
            filters.version = view.version
        return filters.all_workers

    def _crowd(self, sound: Iterable[WorkerView], doubtful: Iterable[WorkerView]) -> WorkerSet:
        names, others = (frozenset(worker.node for worker in some) for some in (sound, doubtful))
        return WorkerSet(names, others, self.pool.with_lora)

    def _answer(self, now: Seconds, item: QueuedRequest) -> None:
        """Place a request that was taken out of its queue."""
        held = now - item.arrived
        try:
            state = self._state(now, item.request)
            if item.request.slo_ttft is not None:
                self._refuse_late(now, item.request, state, held)
            outcome: PlacedRequest | PdserveError = self._place(
                now, item.frontend, item.request, state, held
            )
        except PdserveError as error:
            self.numbers.refused += 1
            self._note_refusal(now, item.request, error)
            outcome = error
        except Exception:  # a bug: the frontend leaves a router that fails inside
            _log.exception("a held request could not be placed")
            self.numbers.refused += 1
            outcome = _broken()
        else:
            self.numbers.held_seconds += held
        item.answer(outcome)

    def _refuse_impossible(self, now: Seconds, model: str) -> None:
        """Refuse held requests that no worker can take any more. This changes only when workers do;
        each request was checked when it came."""
        view = self.pool.view(now, model)
        no_worker = not (view.sound or view.doubtful)
        queue = self._queues.get(model)
        if queue is None or not (no_worker or queue.filters):
            return
        filters = queue.filters
        all_workers = self._all_workers(filters, view)
        hopeless = {
            worker_filter
            for worker_filter in filters
            if not filters.possible(worker_filter, all_workers)
        }
        if not (no_worker or hopeless):
            return
        for item in [item for item in queue if no_worker or item.worker_filter in hopeless]:
            try:
                self._among(item.request, view)
            except PdserveError as error:
                self._drop(item, error)

    def _fits(
        self, now: Seconds, queue: AdmissionQueue, view: ModelView
    ) -> Callable[[QueuedRequest], bool] | None:
        """Tells whether a held request can be placed now; None: none can."""
        work = self._config.hold_work
        usual = view.sound or view.doubtful
        if self.bookings.full or not usual:
            return None
        if not self._holding(RoutingState(usual, usual[0].node)):
            return lambda item: item.deadline is None or now < item.deadline
        sound, doubtful = (
            [worker for worker in those if worker.is_open(now, work)]
            for those in (view.sound, view.doubtful)
        )
        if not (sound or doubtful):
            return None
        free = bool(sound if view.sound else doubtful)
        filters, open_ = queue.filters, self._crowd(sound, doubtful)
        all_workers = self._all_workers(filters, view)

        def fits(item: QueuedRequest) -> bool:
            if item.deadline is not None and now + item.cost >= item.deadline:
                return False  # not even its first token would come in time
            worker_filter = item.worker_filter
            return (
                free
                if worker_filter is None
                else filters.is_open(worker_filter, all_workers, open_)
            )

        return fits

    def next_look(self, now: Seconds) -> Seconds | None:
        """The time at which `look` may have work without an event; None: no request waits."""
        if not self._queues:
            return None
        moments = [now + _LOOK_AGAIN]
        for model, queue in self._queues.items():
            if queue.next_deadline is not None:
                moments.append(queue.next_deadline)
            view = self.pool.view(now, model)
            moments += [
                moment
                for worker in view.sound or view.doubtful
                if (moment := _opening(worker, self._config.hold_work)) is not None
                and moment > now - _LATE  # who has been open for longer is not what they wait for
            ]
        return max(now, min(moments)) + _LATE

    def _held(self) -> Iterator[QueuedRequest]:
        for queue in self._queues.values():
            yield from queue

    @property
    def held(self) -> int:
        """Number of held requests."""
        return sum(map(len, self._queues.values()))

    def prediction(self) -> ErrorSummary | None:
        """Actual against predicted times to first token, of the model with the largest error; None:
        too few samples."""
        known = [each.all for each in self.predictor.calibration() if each.all.count]
        return max(known, key=lambda summary: abs(log(max(summary.p50, _TINY))), default=None)

    # ------------------------------------------------------------------ rebalancing

    def rebalance(self, now: Seconds) -> list[Booking]:
        """Own bookings whose requests another worker would begin sooner. Call it a few times a
        second, and tell their frontends."""
        groups = [group for model in self.pool.served() if (group := self._group(now, model))]
        moves = self._rebalancer.look(now, groups)
        found = [self.bookings.own_there(id) for id in moves]
        self.numbers.moves_asked += len(moves)
        return [booking for booking in found if booking is not None]

    def _group(self, now: Seconds, model: str) -> RebalanceGroup | None:
        """Waiting bookings of a model and workers with room; None: none could move."""
        workers = self.pool.view(now, model).sound
        if len(workers) < 2 or not any(worker.prefills for worker in workers):
            return None
        movable = [one for worker in workers for one in self._waiting(now, worker)]
        if not movable:
            return None
        learnt, speeds = self.predictor.model(model), {w.node: w.speed for w in workers}
        places = [
            RebalanceTarget(w.node, w.wait(now), w.max_sequences - w.sequences, w.prefills == 0)
            for w in workers
            if w.sequences < w.max_sequences and w.blocks_used <= _FULL * w.blocks_total
        ]
        return RebalanceGroup(
            movable,
            places,
            lambda node, tokens: learnt.prefill(tokens, 0) * speeds[node],
            trusted=not self.predictor.poor(model),
        )

    def _waiting(self, now: Seconds, worker: WorkerView) -> Iterator[WaitingBooking]:
        """Own bookings at a worker that may move: it has them, and has not begun them."""
        report = self.pool.report_of(worker.node)
        if report is None or not report.waiting:
            return
        since, unstarted = self.bookings.unstarted(worker.node)
        those = waiting_bookings(now, unstarted, since, report.waiting)
        if worker.decode and sum(one.prompt_tokens for one in those) > report.uncomputed_tokens:
            return  # their KV is on its way, of some of them: moving would send it again
        for one in those:
            booking = self.bookings.own_there(one.booking)
            dispatch = None if booking is None else booking.dispatch
            if dispatch is None or dispatch.fixed or dispatch.attempt > MAX_ATTEMPTS:
                continue
            if dispatch.elsewhere_wait is None:  # else it waits for a prefill worker
                yield one

    # ------------------------------------------------------------------ explaining

    def explain(self, now: Seconds, request: RouteRequest) -> RoutingPreview:
        """What would be decided now, and why. Changes nothing."""
        queue = self._queues.get(request.model)
        held, policy = len(queue) if queue else 0, self._config.policy
        adapted = self.pool.with_lora(request.lora) if request.lora else None
        known = self.pool.workers(request.model)
        found = self.index.find(now, _reusable(request), request.names_id).overlaps
        plans, sources = _NO_PLANS, _NO_SOURCES
        worker_filter = WorkerFilter.of(request)
        standings = {
            view.node: explain_eligibility(worker_filter, view, how, adapted) for how, view in known
        }
        terms: Mapping[NodeId, Mapping[str, float]] = {}
        chosen, ttft, refusal = None, None, ""
        try:
            state = self._state(now, request)
        except PdserveError as error:
            refusal = error.message
        else:
            plans = state.onboarding
            policy = self._policy_name(self.pool.model_of(state.workers[0].node))
            if isinstance(self._policy, Explains):
                terms = self._policy.terms(request, state)
            refusal = self._not_now(now, request, state)
            if not refusal:
                best = self._policy(request, state, Random(0))
                chosen, plan = best.node, plans.get(best.node)
                work = state.model.prefill(
                    request.prompt_tokens, state.cached_tokens(request, best)
                )
                wait = best.wait(now)
                ttft = wait + work * best.speed if plan is None else plan.ttft(wait)
                sources = self._sources(request, state, best)
        listed = tuple(
            Candidate(
                worker=node,
                standing=how,
                chosen=node == chosen,
                overlap_blocks=found.get(node, 0),
                terms={name: float(value) for name, value in terms.get(node, {}).items()},
                sources=_by_source(plans.get(node), found.get(node, 0)),
            )
            for node, how in standings.items()
        )
        return RoutingPreview(
            policy=policy,
            candidates=listed,
            worker=chosen,
            refusal=refusal,
            held=held,
            predicted_ttft=ttft,
            kv_sources=sources,
        )

    def _not_now(self, now: Seconds, request: RouteRequest, state: RoutingState) -> str:
        """Why a request would be refused or held; empty: it would be placed at once."""
        if request.slo_ttft is not None:
            try:
                self._refuse_hopeless(now, request, state)
            except Overloaded as error:
                return error.message
        if request.model in self._queues or not self._may_go(now, request.model, state):
            return "held: every worker has enough to do"
        return ""

    # ------------------------------------------------------------------ for tests

    def check(self) -> None:
        """Raise `AssertionError` unless every request is accounted for. O(all)."""
        numbers = self.numbers
        ends = numbers.placed + numbers.refused + numbers.expired + numbers.withdrawn
        assert numbers.offered == ends + self.held
        assert numbers.placed == self.bookings.placed
        assert all(self._queues.values())
        for queue in self._queues.values():
            queue.check()
        self.bookings.check()
        self.index.check()


def _opening(worker: WorkerView, work: Seconds) -> Seconds | None:
    """The time at which the worker will be open if nothing but time changes; None: never."""
    if worker.sequences >= worker.max_sequences or worker.work - 0.9 * worker.head >= work:
        return None
    return worker.as_of + worker.work - work


_node = attrgetter("node")

_TINY: Final = 1e-9
_FULL: Final = 0.9
"""A worker whose pool is fuller than this gets no moved requests."""
_NOTHING: Final[Mapping[NodeId, int]] = MappingProxyType({})
_NO_SOURCES: Final[tuple[KvSource, ...]] = ()
_NO_PLANS: Final[Mapping[NodeId, Onboarding]] = MappingProxyType({})


def _by_source(plan: Onboarding | None, device: int) -> dict[str, int]:
    """Blocks that a worker would reuse, by where they come from."""
    blocks = BlocksBySource(device) if plan is None else plan.blocks
    return {source: count for source, count in blocks._asdict().items() if count}


def _computed_remotely(started: FirstTokenStats) -> bool:
    """True if a prefill worker computed the prompt; KV that only moves is `moved`."""
    return bool(started.received_tokens) and started.prefill.startswith("remote")


def _is_new(request: RouteRequest) -> bool:
    """True if no router has been asked for the request before."""
    return not (request.attempt or request.asked)


def _most_cached(request: RouteRequest, state: RoutingState) -> int:
    """Prompt tokens that the worker with the most of them has in all its tiers."""
    if state.lower:
        most = max(state.own_blocks(node) for node in state.overlaps.keys() | state.lower)
    else:
        most = max(state.overlaps.values(), default=0)
    return min(most * request.block_size, max(0, request.prompt_tokens - 1))


def _check_time(request: RouteRequest) -> None:
    """Errors: `DeadlineExceeded` if no time is left."""
    if request.deadline is not None and request.deadline <= 0:
        raise DeadlineExceeded("the request's deadline had passed when it reached the router")


def _leaving() -> PdserveError:
    return Draining("this router is draining", retry_after=1.0)


def _broken() -> PdserveError:
    return PdserveError("internal error in the router; see its log")


def _check_offered(chosen: WorkerView, state: RoutingState) -> None:
    """Errors: `ValueError` if the policy chose a worker that it was not offered."""
    workers, node = state.workers, chosen.node
    index = bisect_left(workers, node, key=_node)  # they are sorted
    if index == len(workers) or workers[index].node != node:
        raise ValueError(f"the policy chose {node!r}, which it was not offered")
