"""Runs the router role on a node: answers routing requests, and keeps the router's view current.

    serves      Route, ReleaseBooking, Explain, and the prefill queues (`prefill_queue`)
    follows     load, sequences and KV events of workers, bookings of other routers
    publishes   its own bookings, and the demand that it sees

`core` decides everything. This file turns messages and topics into its calls, and calls
`RouterCore.look` for held requests: at the end of each turn of the event loop in which something
happened that may place one, and by a timer at the time that the core names. The code that starts
the role owns it, and calls `close` before it closes the node.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from msgspec.structs import replace

from pdserve.blocks.hashing import SHORT_HASH_BYTES
from pdserve.errors import Overloaded, PdserveError
from pdserve.ids import NodeLife
from pdserve.messages.demand import DEMAND, DemandReport
from pdserve.messages.handoff import PREFILL_TOPIC, QueueReport
from pdserve.messages.kv_events import KV
from pdserve.messages.request import FirstTokenStats
from pdserve.messages.routing import (
    BOOKINGS,
    LOAD,
    SEQUENCES,
    BookingRecord,
    ReleaseBooking,
    RouteDecision,
    RouteRequest,
    RouterMigrationHint,
    RoutingPreview,
    WorkerLoad,
    booking_key,
    booking_of,
)
from pdserve.messages.status import RouterStats
from pdserve.router.admission_queue import PlacedRequest
from pdserve.router.core import RouterCore
from pdserve.router.prefill_queue.service import PrefillQueueService
from pdserve.router.worker_table import WorkerFacts
from pdserve.runtime.model_catalog import build_catalog
from pdserve.runtime.paced_timer import PacedTimer
from pdserve.runtime.peers.handlers import answers, hears
from pdserve.runtime.registry import MemberChanged, MemberGone
from pdserve.runtime.rpc_methods import EXPLAIN, MOVE, RELEASE, ROUTE
from pdserve.runtime.topics.replicated_set import SetView
from pdserve.wire.codec import decoder, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.handoff import PrefillItem, QueueState
    from pdserve.messages.node import NodeCard
    from pdserve.net.base import IncomingCall, Peer
    from pdserve.net.timers import Timer
    from pdserve.observe.degraded import Degradations
    from pdserve.router.admission_queue import QueuedRequest
    from pdserve.router.bookings import Booking, BookingEnd
    from pdserve.router.config import RouterConfig
    from pdserve.router.policies.base import Policy
    from pdserve.router.prefill_queue.queue import QueueStreamId
    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import Member, MemberEvent
    from pdserve.runtime.topics.service import StateTopic, Topics

__all__ = ["RouterService"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

SETTLE: Final[Seconds] = 0.3
"""Time for a router that has joined to receive workers and their load before frontends ask it."""
_SETTLE_LIMIT: Final[Seconds] = 3.0
"""Most time that a router which has joined waits for the cards of the workers that it knows."""

_BEAT: Final[Seconds] = 0.1
"""Interval at which a router with work publishes, so that silence differs from idleness."""
_BEAT_KEY: Final = booking_key(0)
"""The key of no booking."""
_IDLE: Final = b""
_REBALANCE: Final[Seconds] = 0.25
"""Interval of looking for requests to move."""
_DEMAND: Final[Seconds] = 1.0
"""Interval of reports of the demand while there is some."""
_BUSY_FOR: Final[Seconds] = 1.0
"""A router counts as busy for so long after its last decision."""

_decode_load = decoder(WorkerLoad)
_decode_started = decoder(FirstTokenStats)
_decode_booked = decoder(BookingRecord)
_decode_release = decoder(ReleaseBooking)
_decode_queues = decoder(QueueReport)


def _fullness(state: QueueState) -> tuple[int, int]:
    return state.waiting, state.claimed


class RouterService:
    """The router role of one node. Call `open` once the node has joined."""

    def __init__(
        self,
        config: RouterConfig,
        policy: Policy,
        node: Node,
        topics: Topics,
        card: NodeCard,
        degradations: Degradations,
        on_move: Callable[[], None] = lambda: None,
    ) -> None:
        """`card`: the fields of the card that every node has. `on_move` is called for each request
        that another worker would begin sooner, after its frontend has been told."""
        self._queues: dict[NodeId, QueueReport] = {}
        """Prefill queues of other routers."""
        self.core = RouterCore(
            config, policy, node.random, self._booking_ended, node.now, queue_of=self._queue_of
        )
        self._config = config
        self._on_move = on_move
        self._node = node
        self._degradations = degradations
        self._bookings = topics.publish_set(BOOKINGS)
        self._demand: StateTopic[DemandReport] = topics.publish_state(
            DEMAND, encode, on_subscribe=self._follow_demand
        )
        self.prefill = PrefillQueueService(
            node, topics, overlap=self._prefix_of, claimed=self._prefills
        )
        self._card = replace(card, topics=topics.names)
        self._conflicts: Mapping[NodeId, str] = {}
        self._conflict_words = ""
        self._blind: frozenset[NodeId] = frozenset()
        """Workers whose content is guessed."""
        self.routed = 0
        self.refused = 0
        self.released = 0
        """Answers that frontends have given back: each one once, unless a message was lost."""
        self._draining = False
        self._open = False
        """Frontends may ask: the card is published."""
        self._looks = False
        """A look is due at the end of this turn."""
        self._flushes = False
        self._timer: Timer | None = None
        self._timer_at: Seconds = 0.0
        self._beats = 0
        self._decided: Seconds = float("-inf")
        self._noted: dict[str, str] = {}
        node.host(self)
        node.on_member(self._on_member)
        topics.subscribe_state(LOAD, _decode_load, self._on_load, self._on_load_gone)
        topics.subscribe_state(PREFILL_TOPIC, _decode_queues, self._on_queues, self._on_queues_gone)
        topics.subscribe_log(SEQUENCES, self._follow_sequences)
        topics.subscribe_log(BOOKINGS, self._follow_bookings)
        self._kv = topics.subscribe_log(KV, self.core.index.target)
        self._swept: Seconds = float("-inf")
        self._sweeps_paced = PacedTimer(node.timers, config.sweep_interval, self._sweep)
        self._sweeps_paced.start()
        self._beats_paced = PacedTimer(node.timers, _BEAT, self._beat)
        self._beats_paced.start()
        self._demand_paced = PacedTimer(node.timers, _DEMAND, self._tell_demand)
        self._moves_paced = PacedTimer(node.timers, _REBALANCE, self._rebalance)
        if config.rebalance:
            self._moves_paced.start()

    def open(self, settle: Seconds = SETTLE) -> None:
        """The node has joined: take routing requests once the view has settled, after `settle`
        seconds at the earliest."""
        until = self._node.now() + _SETTLE_LIMIT
        self._node.timers.call_later(settle, partial(self._settle, until))

    def _settle(self, until: Seconds) -> None:
        """Publish the card, so that frontends ask, once each worker's card is known."""
        if self._node.now() < until and self._lacks_cards():
            self._node.timers.call_later(SETTLE, partial(self._settle, until))
            return
        self._open = True
        self._node.publish_card(self._card, {})

    def _lacks_cards(self) -> bool:
        workers = self._node.registry.by_role("worker")
        return any(m.card is None and m.reachable and not m.suspect for m in workers)

    def drain(self) -> None:
        """Send frontends to other routers from now on, if there are any, with the requests held
        here."""
        self._draining = True
        self._card = replace(self._card, draining=True)
        self._node.publish_card(self._card, {})
        if self._others():
            self.core.close()
            self.prefill.drain()

    def undo_drain(self) -> None:
        """Take part in routing again. Idempotent."""
        self._draining = False
        self._card = replace(self._card, draining=False)
        self.core.undo_close()
        self.prefill.undo_drain()
        if self._open:
            self._node.publish_card(self._card, {})

    def close(self) -> None:
        """Refuse all held requests. Idempotent."""
        self.core.close()
        self.prefill.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _others(self) -> bool:
        """True if another router accepts requests."""
        routers = self._node.registry.by_role("router")
        return any(m.card is not None and not m.card.draining for m in routers)

    def unready_reason(self) -> str | None:
        """For probes; a router can always answer, if only that there is no worker."""
        if self._draining:
            return "draining: frontends ask other routers"
        if not self._node.lives:
            return "joining the cluster"
        return None if self._open else "learning which workers there are"

    # ------------------------------------------------------------------ frontends

    @answers(ROUTE)
    def _route(self, request: RouteRequest, call: IncomingCall) -> RouteDecision | None:
        if self._node.now() - self._swept > 2 * self._config.sweep_interval:
            self._sweep()  # after a rest: nothing that has expired takes part in the decision
        self._sweeps_paced.wake()
        self._demand_paced.wake()
        try:
            outcome = self.core.offer(
                self._node.now(), call.life, request, partial(self._answer, call)
            )
        except Exception:
            self.refused += 1
            raise
        if isinstance(outcome, PlacedRequest):
            return self._placed(outcome)
        call.on_cancel = partial(self._withdraw, outcome)
        self._stir()
        self._arm()
        return None

    def _placed(self, placement: PlacedRequest) -> RouteDecision:
        booking = placement.booking
        self.routed += 1
        self._decided = booking.placed
        self._beats_paced.wake()
        self._moves_paced.wake()
        self._bookings.put(booking_key(booking.id), encode(booking.record))
        self._flush_soon()
        return placement.routed

    def _answer(self, call: IncomingCall, outcome: PlacedRequest | PdserveError) -> None:
        """Send the result of a held request."""
        if not isinstance(outcome, PlacedRequest):
            self.refused += 1
            call.fail(outcome)
        elif call.done:
            self.core.bookings.release(outcome.booking.id)
        else:
            call.reply(self._placed(outcome))

    def _withdraw(self, item: QueuedRequest) -> None:
        self.core.withdraw(item)

    @answers(EXPLAIN)
    def _explain(self, request: RouteRequest, call: IncomingCall) -> RoutingPreview:
        return self.core.explain(self._node.now(), request)

    @hears(RELEASE)
    def _released(self, release: ReleaseBooking, frontend: Peer) -> None:
        if release.booking:
            self.released += 1
            self.core.bookings.release(release.booking)
        if release.ended is not None:
            self.core.demand.ended(self._node.now(), release.ended)
            self._demand_paced.wake()
        self._stir()

    def _booking_ended(self, booking: Booking, why: BookingEnd) -> None:
        self._bookings.drop(booking_key(booking.id))
        self._flush_soon()

    def _flush_soon(self) -> None:
        """Publish to other routers at the end of this turn of the event loop, all changes
        together."""
        if not self._flushes:
            self._flushes = True
            self._node.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushes = False
        self._bookings.flush()

    def numbers(self) -> RouterStats:
        """Numbers for status and top."""
        core = self.core
        numbers, ratios = core.numbers, core.prediction()
        return RouterStats(
            routed=self.routed,
            refused=self.refused,
            bookings=len(core.bookings),
            held=core.held,
            ever_held=numbers.held,
            held_seconds=numbers.held_seconds,
            policy=self._config.policy,
            decisions=dict(core.decisions),
            prompt_tokens=numbers.prompt_tokens,
            expected_tokens=numbers.expected_tokens,
            cached_tokens=numbers.cached_tokens,
            prediction=0.0 if ratios is None else ratios.p50,
            index_blocks=core.index.counters["blocks"],
            prefill=self.prefill.states(),
            prefill_events=dict(self.prefill.counters),
            moves_asked=numbers.moves_asked,
            copies_kept=numbers.copies_kept,
            copies_let_go=numbers.copies_let_go,
        )

    def _follow_demand(self) -> None:
        """A planner begins to follow the demand: it gets a report at once, and then by the timer,
        which runs only while somebody follows."""
        self._node.call_soon(self._begin_demand)

    def _begin_demand(self) -> None:
        self._demand_paced.stop()
        self._demand_paced.start()

    def _tell_demand(self) -> bool:
        """Publish the demand. Returns True while there is some."""
        if not self._demand.subscribers:
            self._demand_paced.stop()
            return False
        core, now = self.core, self._node.now()
        busy = core.demand.changed or core.held > 0 or len(core.bookings) > 0
        held, learnt = partial(core.held_demand, now), core.learnt_times
        self._demand.set(
            core.demand.report(now, core.bookings.part, held, learnt, resting=not busy)
        )
        return busy

    # ------------------------------------------------------------------ rebalancing

    def _rebalance(self) -> bool:
        """Tell frontends which of their requests another worker would begin sooner. Returns True if
        there are any."""
        if self._draining:
            return False
        for booking in self.core.rebalance(self._node.now()):
            if booking.frontend is None:
                continue  # another router's
            try:
                self._node.ref(*booking.frontend).tell(MOVE, RouterMigrationHint(booking.id))
            except PdserveError as error:
                _log.debug("%s is not told to move a request: %s", booking.frontend, error)
            else:
                self._on_move()
        return len(self.core.bookings) > 0

    # ------------------------------------------------------------------ prefill queues

    def _prefix_of(self, now: Seconds, item: PrefillItem) -> Mapping[NodeId, int]:
        """Cached leading blocks by worker; the prompt's last token is always computed."""
        blocks = (item.prompt_tokens - 1) // item.block_size if item.block_size else 0
        names = item.names[: SHORT_HASH_BYTES * max(0, blocks)]
        return self.core.index.find(now, names, item.names_id).overlaps

    def _prefills(self, now: Seconds, item: PrefillItem, worker: QueueStreamId) -> None:
        """A prefill worker has claimed an item: its blocks count as cached there at once."""
        life = NodeLife(worker.node, worker.epoch)
        try:
            self.core.index.placed(now, life, item.names, item.names_id)
        except Overloaded as error:
            _log.debug(
                "blocks of a prefill at %s are not counted as cached: %s", worker.node, error
            )

    def _on_queues(self, member: Member, report: QueueReport) -> None:
        self._queues[member.node] = report

    def _on_queues_gone(self, member: Member) -> None:
        self._queues.pop(member.node, None)

    def _queue_of(self, model: str) -> QueueState | None:
        """The model's prefill queue, whichever router owns it."""
        own = self.prefill.state(model)
        others = [report.queues.get(model) for report in self._queues.values()]
        known = [state for state in (own, *others) if state is not None and state.workers]
        return max(known, key=_fullness, default=None)

    # ------------------------------------------------------------------ who waits

    def _stir(self) -> None:
        """Examine held requests at the end of this turn of the event loop, if that may help."""
        if self.core.stirred and not self._looks and self.core.held:
            self._looks = True
            self._node.call_soon(self._look)

    def _look(self) -> None:
        self._looks = False
        try:
            self.core.look(self._node.now())
        except Exception:  # a bug: no request waits here for what does not come
            _log.exception("held requests could not be examined")
            self.core.send_away()
        self._arm()

    def _arm(self) -> None:
        """Set the timer for the core's next look."""
        when = self.core.next_look(self._node.now())
        if when is None or (self._timer is not None and self._timer_at <= when):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._node.timers.call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._look()

    # ------------------------------------------------------------------ members

    def _on_member(self, event: MemberEvent) -> None:
        member, now = event.member, self._node.now()
        life = NodeLife(member.node, member.epoch)
        if isinstance(event, MemberGone):
            self.core.gone(now, life)
            self._sweeps_paced.wake()
            self._judge_index()
        elif member.role == "router":
            self.core.bookings.peer_up(life)
        if member.role == "worker":
            if not isinstance(event, MemberChanged) or event.before.card is not member.card:
                self._judge_models()
            if not isinstance(event, MemberGone):
                self._tell_core(member)
        self._stir()

    def _judge_models(self) -> None:
        """A worker that offers another model under a taken name gets no requests."""
        conflicts = build_catalog(self._node.registry).conflicts
        changed = {*conflicts, *self._conflicts} if conflicts != self._conflicts else ()
        self._conflicts = conflicts
        for node in changed:
            member = self._node.registry.get(node)
            if member is not None:
                self._tell_core(member)
        words = "; ".join(f"worker {node}: {why}" for node, why in sorted(conflicts.items()))
        if words != self._conflict_words:
            self._conflict_words = words
            self._degradations.clear("model_conflict")
            if words:
                self._degradations.add("model_conflict", words)

    def _tell_core(self, member: Member) -> None:
        facts = WorkerFacts.of(member)
        if member.node in self._conflicts:
            facts = WorkerFacts(facts.worker, ())
        self.core.worker(self._node.now(), facts)
        self._tell_index(member)

    def _tell_index(self, member: Member) -> None:
        """Tell the index whether a worker publishes KV events, once it offers a model."""
        card = member.card
        if card is None:
            return
        events = KV in card.topics if card.models else None
        life = NodeLife(member.node, member.epoch)
        self.core.index.worker_up(life, events=events, names_id=card.names_id)
        self._judge_index()

    def _judge_index(self) -> None:
        """Report a degradation for workers without KV events."""
        blind = frozenset(self.core.index.approximate)
        if blind != self._blind:
            self._blind = blind
            self._degradations.clear("approximate_index")
            if blind:
                self._degradations.add(
                    "approximate_index",
                    f"no KV events from {', '.join(sorted(blind))}: what they hold is guessed from "
                    "what was sent there",
                )

    # ------------------------------------------------------------------ workers and routers

    def _on_load(self, member: Member, load: WorkerLoad) -> None:
        self.core.load(NodeLife(member.node, member.epoch), load, self._node.now())
        self._stir()

    def _on_load_gone(self, member: Member) -> None:
        self.core.load(NodeLife(member.node, member.epoch), None)
        self._stir()

    def _follow_sequences(self, member: Member) -> SetView:
        worker, core = NodeLife(member.node, member.epoch), self.core

        def changed(puts: Mapping[bytes, bytes], drops: Collection[bytes]) -> None:
            now = self._node.now()
            for key, value in puts.items():
                started = _decode_started(value) if value else None
                core.holds(now, worker, booking_of(key), started)
            for key in drops:
                core.let_go(worker, booking_of(key))
            self._stir()

        return SetView(changed)

    def _follow_bookings(self, member: Member) -> SetView:
        router, bookings = NodeLife(member.node, member.epoch), self.core.bookings

        def changed(puts: Mapping[bytes, bytes], drops: Collection[bytes]) -> None:
            beat = puts.get(_BEAT_KEY)
            bookings.peer_beat(self._node.now(), router, beat != _IDLE)
            self._beats_paced.wake()
            self._sweeps_paced.wake()
            for key, value in puts.items():
                if key != _BEAT_KEY:
                    bookings.peer_placed(router, _decode_booked(value))
            for key in drops:
                if key != _BEAT_KEY:
                    bookings.peer_ended(router, booking_of(key))
            self.core.stirred = True
            self._stir()

        return SetView(changed)

    def _sweep(self) -> bool:
        """Drop what has expired. Returns True while there is work."""
        now = self._swept = self._node.now()
        self.core.sweep(now)
        if self.core.index.full:  # with room again, the missing blocks are asked for
            self._kv.recheck()
        self._note_degraded()
        self._stir()
        return bool(self.core.held) or self._busy(now) or self.core.bookings.peers_work

    def _beat(self) -> bool:
        """Publish that this router has work, and check which routers have fallen silent. Returns
        True while one of them has work."""
        now, bookings = self._node.now(), self.core.bookings
        bookings.judge_peers(now)
        busy = self._busy(now)
        if busy and any(True for _ in self._node.registry.by_role("router")):
            self._beats += 1
            self._bookings.put(_BEAT_KEY, encode(self._beats))
            self._flush_soon()
        elif self._beats:
            self._beats = 0
            self._bookings.put(_BEAT_KEY, _IDLE)
            self._flush_soon()
        return busy or bookings.peers_work

    def _busy(self, now: Seconds) -> bool:
        return len(self.core.bookings) > 0 or now - self._decided < _BUSY_FOR

    def _note_degraded(self) -> None:
        """Report degradations as they begin and end."""
        predictor = self.core.predictor
        poor = (predictor.poor(each.model) for each in predictor.calibration())
        full = f"blocks of some workers are not indexed: {self._config.index_max_blocks} are known"
        notes = {
            "prediction_poor": "; ".join(why for why in poor if why),
            "index_full": full if self.core.index.full else "",
        }
        for name, words in notes.items():
            if self._noted.get(name, "") != words:
                self._noted[name] = words
                self._degradations.clear(name)
                if words:
                    self._degradations.add(name, words)
