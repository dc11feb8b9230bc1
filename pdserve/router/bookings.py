"""Keeps a router's bookings, so that a decision counts as load of its worker at once.

    placed ──held──▶ seen ──report──▶ counted        at its worker
       └───────────────┴─────────────────┴─▶ ended   exactly once, for one reason (`BookingEnd`)

A worker's load is what it reports, plus what the report cannot contain yet: bookings that the
worker has not confirmed, and those that it took after its last report. Without a report, all
bookings count. Nothing counts twice or is lost, in whatever order messages come: what a worker says
it holds is kept apart from the bookings (`_Account.fresh`, `.reported`), and only `place` and a
peer router's message make a booking. So a late message of a worker revives nothing that has ended,
and no memory of ended bookings is needed.

Bytes that a worker is expected to bring up from its tiers for a booking count like that, too.

Until its first token a booking also weighs by its prompt: the tokens that were not believed to be
cached, and their predicted prefill time. The worker's report of the first token ends this part, as
does the booking's end. Times are kept in whole microseconds, so that sums return to zero.

Only a booking that its worker never reported expires (`RouterConfig.booking_ttl`). Bookings of
other routers count like own ones, but end when their router says so, or dies. While a busy router
has not been heard for a moment, its believed placements are blended with this router's own: both
serve the same cluster, and routing by stale news sends everything to the same workers.

Pure: time and randomness are arguments. The router's service owns it and passes on the news of
members, of the topics `load`, `sequences` and `bookings`, and of frontends. For each life, news
comes between its `…_up` and its `…_gone`; news outside is ignored. Ends of own bookings are
reported through `on_end`. Own bookings are bounded here; those of others, and the ids that workers
hold, are bounded by their publishers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

from pdserve.ids import Bytes, NodeLife
from pdserve.messages.routing import BookingRecord
from pdserve.messages.tiers import LaneName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from random import Random

    from pdserve.ids import Epoch, NodeId, Seconds
    from pdserve.messages.request import FirstTokenStats
    from pdserve.router.config import RouterConfig

__all__ = ["BookedLoad", "Booking", "BookingEnd", "Bookings", "DecisionBasis", "PendingPrefills"]

LaneBytes = tuple[tuple[LaneName, Bytes], ...]
"""Bytes by lane."""

_COUNTER_BITS = 32
_PART_BITS = 31
_MICRO = 1_000_000
_NEWEST = 0.1
"""Weight of a new observation in a moving average."""
_TRUSTED: Final[Seconds] = 0.3
"""A busy router's news counts in full for this many seconds after it was last heard."""
_WORTHLESS: Final[Seconds] = 1.0
"""After this many seconds it counts for nothing; in between, its weight falls evenly."""
_WINDOW: Final[Seconds] = 180.0
_BUCKETS: Final = 12


class BookingEnd(Enum):
    """Why a booking ended."""

    LET_GO = "let_go"
    """Its worker no longer has the request."""
    RELEASED = "released"
    """Its frontend ended it."""
    WORKER_GONE = "worker_gone"
    FRONTEND_GONE = "asker_gone"
    NEVER_SEEN = "never_seen"
    """Its worker did not report it in time."""

    __hash__ = object.__hash__  # Enum's own is written in Python


class BookedLoad(NamedTuple):
    """The load of some bookings."""

    sequences: int
    prompt_tokens: int


class PendingPrefills(NamedTuple):
    """The additional load of bookings without a first token, and statistics of recent ones."""

    requests: int = 0
    sequences: int = 0
    tokens: int = 0
    """Prompt tokens that are not believed to be cached."""
    work: Seconds = 0.0
    """Predicted prefill seconds, each prompt counted in full."""
    head: Seconds = 0.0
    """The oldest booking's part of `work`."""
    as_of: Seconds = 0.0
    """Since when that booking is the oldest."""
    strangers: int = 0
    """Requests that the worker has without a first token, and that have no booking here."""
    left: int = 0
    """Sequences in the worker's last report that have ended since."""
    ttft: Seconds = 0.0
    """Recent mean seconds from the decision to the first token; 0: unknown."""
    window: Seconds = 0.0
    """Work placed in the last three minutes, in seconds."""


class DecisionBasis(NamedTuple):
    """What an own decision rested on, to compare it with the result."""

    model: str
    policy: str = ""
    predicted_ttft: Seconds | None = None
    sequences: int = 0
    """Sequences at the worker before the decision."""
    kv_tokens: int = 0
    load_age: Seconds = 0.0
    elsewhere_wait: Seconds | None = None
    """Predicted wait in the prefill queue, if remote prefill was predicted; None: it was not."""
    attempt: int = 0
    """How often the request had been placed before."""
    fixed: bool = False
    """True if only some workers of the model could take the request."""


class Booking(Struct, frozen=True):
    """A request's place at one worker."""

    id: int
    worker: NodeLife
    sequences: int
    prompt_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that are believed to be in the worker's pool."""
    work: int = 0
    """Predicted microseconds to compute the other prompt tokens."""
    placed: Seconds = 0.0
    """The time when it was placed, or when this router received it."""
    dispatch: DecisionBasis | None = None
    """The frontend's id of the request; own bookings only."""
    owner: NodeLife | None = None
    """The router that placed it; None: this one."""
    frontend: NodeLife | None = None
    """The frontend that asked; own bookings only."""
    lanes: LaneBytes = ()
    """Bytes that the worker is expected to move for it through its lanes; own bookings only."""

    @property
    def record(self) -> BookingRecord:
        """The booking as it is published to other routers."""
        node, epoch = self.worker
        return BookingRecord(
            self.id, node, epoch, self.sequences, self.prompt_tokens, self.cached_tokens
        )

    @property
    def uncached(self) -> int:
        """Prompt tokens to compute, at least one."""
        return max(1, self.prompt_tokens - self.cached_tokens)


@dataclass(slots=True)
class _Window:
    """A sum over the last minutes, in coarse buckets."""

    buckets: list[int] = field(default_factory=lambda: [0] * _BUCKETS)
    sum: int = 0
    at: int = 0
    """Number of the newest bucket since the clock's zero."""

    def add(self, now: Seconds, amount: int) -> None:
        self.pass_to(now)
        self.buckets[self.at % _BUCKETS] += amount
        self.sum += amount

    def pass_to(self, now: Seconds) -> bool:
        """Drop old buckets; True if there were any."""
        at = int(now * _BUCKETS / _WINDOW)
        if at <= self.at:
            return False
        before = self.sum
        for number in range(max(self.at + 1, at - _BUCKETS + 1), at + 1):
            self.sum -= self.buckets[number % _BUCKETS]
            self.buckets[number % _BUCKETS] = 0
        self.at = at
        return self.sum != before


@dataclass(slots=True)
class _Account:
    """One worker's life: the bookings charged to it, and the requests that it says it holds."""

    epoch: Epoch
    open: dict[int, Booking] = field(default_factory=dict)
    sequences: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of all bookings in `open`."""

    fresh: set[int] = field(default_factory=set)
    """Requests that it holds since its last report, booked here or not."""
    reported: set[int] = field(default_factory=set)
    """Requests that it holds and that its last report contains."""
    reported_sequences: int = 0
    reported_tokens: int = 0
    """Prompt tokens of bookings that are in `open` and in `reported`."""
    left: int = 0
    """Sequences in the last report that have ended since."""

    started: set[int] = field(default_factory=set)
    """Requests that it holds and whose first token has come."""
    strangers: set[int] = field(default_factory=set)
    """Requests that it holds without a first token and that are not in `open`."""
    prefill: dict[int, Booking] = field(default_factory=dict)
    """Bookings in `open` without a first token, oldest first."""
    prefill_sequences: int = 0
    prefill_tokens: int = 0
    work: int = 0
    """Predicted work of all in `prefill`, in microseconds."""
    head_since: Seconds = 0.0
    """Since when the first in `prefill` is the first."""
    window: _Window = field(default_factory=_Window)
    ttft: Seconds = 0.0
    reserving: set[int] = field(default_factory=set)
    """Bookings in `open` whose bytes count in `reserved`."""
    reserved: Counter[LaneName] = field(default_factory=Counter)
    """Bytes by lane that no report can contain yet."""

    def charge(self, now: Seconds, booking: Booking) -> None:
        id = booking.id
        if id in self.open:
            return
        self.open[id] = booking
        self._add(booking, 1)
        self.window.add(now, booking.work)
        self._reserve(booking)
        self.strangers.discard(id)
        if id not in self.started:
            if not self.prefill:
                self.head_since = now
            self.prefill[id] = booking
            self.prefill_sequences += booking.sequences
            self.prefill_tokens += booking.uncached
            self.work += booking.work

    def discharge(self, now: Seconds, booking: Booking) -> bool:
        """Remove a booking's charge; False if it was not charged."""
        id = booking.id
        if self.open.get(id) is not booking:
            return False
        self._add(booking, -1)
        self._unreserve(booking)
        del self.open[id]
        if self.end_prefill(now, booking) and (id in self.fresh or id in self.reported):
            self.strangers.add(id)
        return True

    def end_prefill(self, now: Seconds, booking: Booking) -> bool:
        """Remove a booking from `prefill`; False if it is not there."""
        id, prefill = booking.id, self.prefill
        if id not in prefill:
            return False
        first = next(iter(prefill)) == id
        del prefill[id]
        if first:
            self.head_since = now
        self.prefill_sequences -= booking.sequences
        self.prefill_tokens -= booking.uncached
        self.work -= booking.work
        return True

    def start(self, now: Seconds, id: int) -> Booking | None:
        """A held request's first token has come; returns its booking if that is new."""
        if id in self.started:
            return None
        self.started.add(id)
        self.strangers.discard(id)
        booking = self.prefill.get(id)
        if booking is not None:
            self.end_prefill(now, booking)
            self._unreserve(booking)
            took = max(0.0, now - booking.placed)
            self.ttft += (took - self.ttft) * (_NEWEST if self.ttft else 1.0)
        return booking

    def _add(self, booking: Booking, sign: int) -> None:
        self.sequences += sign * booking.sequences
        self.prompt_tokens += sign * booking.prompt_tokens
        if booking.id in self.reported:
            self._add_reported(booking, sign)

    def _add_reported(self, booking: Booking, sign: int) -> None:
        self.reported_sequences += sign * booking.sequences
        self.reported_tokens += sign * booking.prompt_tokens

    def _reserve(self, booking: Booking) -> None:
        """Count the booking's bytes as backlog, until a report contains them."""
        id = booking.id
        if booking.lanes and id not in self.reported and id not in self.started:
            self.reserving.add(id)
            for lane, size in booking.lanes:
                self.reserved[lane] += size

    def _unreserve(self, booking: Booking) -> None:
        if booking.id in self.reserving:
            self.reserving.discard(booking.id)
            for lane, size in booking.lanes:
                self.reserved[lane] -= size

    def report(self) -> None:
        """A report arrived; it contains all that the worker holds."""
        for id in self.fresh:
            if id in self.open:
                self._add_reported(self.open[id], 1)
                self._unreserve(self.open[id])
        self.reported |= self.fresh
        self.fresh.clear()
        self.left = 0

    def report_lost(self) -> None:
        """The worker's reports no longer arrive."""
        self.fresh |= self.reported
        self.reported.clear()
        self.reported_sequences = self.reported_tokens = self.left = 0

    def let_go(self, id: int, sequences: int = 1) -> None:
        """The worker no longer holds a request. Call it when nothing is charged for it."""
        self.fresh.discard(id)
        if id in self.reported:
            self.reported.discard(id)
            self.left += sequences
        self.started.discard(id)
        self.strangers.discard(id)

    @property
    def unreported(self) -> BookedLoad:
        return BookedLoad(
            self.sequences - self.reported_sequences, self.prompt_tokens - self.reported_tokens
        )


class Bookings:
    """The bookings of one router, and what it knows of other routers' bookings."""

    def __init__(
        self,
        config: RouterConfig,
        random: Random,
        on_end: Callable[[Booking, BookingEnd], None] = lambda booking, why: None,
        predict: Callable[[NodeLife, int, int], Seconds] = lambda worker, prompt, cached: 0.0,
        clock: Callable[[], Seconds] = lambda: 0.0,
    ) -> None:
        """`on_end` is called once for each own booking; it must not call back. `predict` gives a
        worker's prefill time for so many prompt tokens, so many of them cached. `clock` is for
        events without a time."""
        self._clock = clock
        self._config = config
        self._on_end = on_end
        self._predict = predict
        self.part = random.randrange(1, 1 << _PART_BITS) << _COUNTER_BITS  # 0 means "none"
        """Upper half of all ids; another process of this router draws another one."""
        self._count = 0
        self._accounts: dict[NodeId, _Account] = {}
        self._own: dict[int, Booking] = {}
        self._unseen: dict[int, Seconds] = {}
        """Own bookings that their worker has not reported: when they run out, earliest first."""
        self._by_frontend: dict[NodeLife, dict[int, Booking]] = {}
        self._peers: dict[NodeLife, dict[int, Booking]] = {}
        """What each router has open, whether or not its worker is known here."""
        self._beats: dict[NodeLife, Seconds | None] = {}
        """The last time at which each router sent something; None: it said that it is idle."""
        self._trust: dict[NodeLife, float] = {}
        """Weights below 1 of the bookings of routers that sent nothing lately."""
        self.placed = 0
        """Number of bookings that were ever placed."""
        self.ended: Counter[BookingEnd] = Counter()
        """Number of bookings that ever ended, by reason; `placed` is the sum of these and
        `len()`."""
        self.touched: set[NodeId] = set()
        """Workers whose load may have changed; the user of this set empties it."""

    def __len__(self) -> int:
        """Own bookings that have not ended."""
        return len(self._own)

    # ------------------------------------------------------------------ decisions

    @property
    def full(self) -> bool:
        """True if no further booking may be made."""
        return len(self._own) >= self._config.max_bookings

    def place(
        self,
        now: Seconds,
        worker: NodeLife,
        frontend: NodeLife,
        sequences: int,
        prompt_tokens: int,
        cached_tokens: int = 0,
        work: Seconds = 0.0,
        dispatch: DecisionBasis | None = None,
        lanes: LaneBytes = (),
    ) -> Booking:
        """Book a worker. Errors: `ValueError` if it is not up, or at the bound."""
        account = self._account(worker)
        if account is None or self.full:
            raise ValueError(f"{worker.node} cannot be booked")
        booking = Booking(
            self._next_id(account),
            worker,
            sequences,
            prompt_tokens,
            cached_tokens,
            round(work * _MICRO),
            now,
            dispatch,
            frontend=frontend,
            lanes=lanes,
        )
        self._own[booking.id] = booking
        self._unseen[booking.id] = now + self._config.booking_ttl
        self._by_frontend.setdefault(frontend, {})[booking.id] = booking
        account.charge(now, booking)
        self.touched.add(worker.node)
        self.placed += 1
        return booking

    def release(self, id: int) -> bool:
        """The frontend has ended the booking; False if it had ended before, or is not ours."""
        booking = self._own.get(id)
        if booking is None:
            return False
        self._end(booking, BookingEnd.RELEASED)
        return True

    def expire(self, now: Seconds) -> int:
        """End bookings that no worker reported in time; returns their number."""
        passed = []
        for id, deadline in self._unseen.items():
            if deadline > now:
                break
            passed.append(id)
        for id in passed:
            self._end(self._own[id], BookingEnd.NEVER_SEEN)
        return len(passed)

    def load(self, worker: NodeId) -> BookedLoad:
        """The load to add to the worker's report; without a report, all bookings there. Zero for a
        worker that is not up."""
        account = self._accounts.get(worker)
        return account.unreported if account else BookedLoad(0, 0)

    def prefills(self, worker: NodeId) -> PendingPrefills:
        """The bookings there without a first token, summed. O(1), unless a peer router is
        silent."""
        account = self._accounts.get(worker)
        if account is None:
            return _NO_PREFILLS
        count, tokens, work = len(account.prefill), account.prefill_tokens, account.work
        if self._trust:
            count, tokens, work = self._blended(account)
        head = next(iter(account.prefill.values())).work if account.prefill else 0
        return PendingPrefills(
            count,
            account.prefill_sequences,
            tokens,
            work / _MICRO,
            min(head, work) / _MICRO,
            account.head_since,
            len(account.strangers),
            account.left,
            account.ttft,
            account.window.sum / _MICRO,
        )

    def reserved(self, worker: NodeId) -> Mapping[LaneName, Bytes]:
        """Bytes by lane to add to the worker's report: of bookings that it cannot contain yet."""
        account = self._accounts.get(worker)
        return Counter() if account is None else account.reserved

    def unstarted(self, worker: NodeId) -> tuple[Seconds, tuple[Booking, ...]]:
        """The bookings there without a first token, oldest first, and since when the first of them
        is the oldest."""
        account = self._accounts.get(worker)
        if account is None:
            return 0.0, ()
        return account.head_since, tuple(account.prefill.values())

    def own_there(self, id: int) -> Booking | None:
        """An own booking that its worker has confirmed; None: there is no such booking."""
        booking = self._own.get(id)
        return None if booking is None or id in self._unseen else booking

    def _blended(self, account: _Account) -> tuple[int, int, int]:
        """The sums, with each silent peer's part moved towards this router's own."""
        parts: dict[NodeLife | None, list[int]] = {None: [0, 0, 0]}
        for silent in self._trust:
            parts[silent] = [0, 0, 0]
        for booking in account.prefill.values():
            part = parts.setdefault(booking.owner, [0, 0, 0])
            part[0] += 1
            part[1] += booking.uncached
            part[2] += booking.work
        own, sums = parts[None], [0.0, 0.0, 0.0]
        for owner, part in parts.items():
            trust = 1.0 if owner is None else self._trust.get(owner, 1.0)
            for i in range(3):
                sums[i] += trust * part[i] + (1.0 - trust) * own[i]
        return round(sums[0]), round(sums[1]), round(sums[2])

    def occupied(self, worker: NodeId) -> int:
        """Sequences booked there, and other requests that it holds: known at once, where a report
        takes time."""
        account = self._accounts.get(worker)
        return account.sequences + len(account.strangers) if account else 0

    def pass_to(self, now: Seconds) -> None:
        """Advance the time: drop old statistics."""
        for node, account in self._accounts.items():
            if account.window.sum and account.window.pass_to(now):
                self.touched.add(node)

    # ------------------------------------------------------------------ members

    def worker_up(self, worker: NodeLife) -> None:
        """Begin a worker's life; an earlier life of the node ends. Idempotent."""
        account = self._accounts.get(worker.node)
        if account and account.epoch >= worker.epoch:
            return
        if account:
            self.worker_gone(NodeLife(worker.node, account.epoch))
        self._accounts[worker.node] = account = _Account(worker.epoch)
        for bookings in self._peers.values():
            for booking in bookings.values():
                if booking.worker == worker:
                    account.charge(self._clock(), booking)
        self.touched.add(worker.node)

    def worker_gone(self, worker: NodeLife) -> None:
        """End everything booked at this life of a worker."""
        account = self._account(worker)
        if account is None:
            return
        for booking in tuple(account.open.values()):
            if booking.owner is None:
                self._end(booking, BookingEnd.WORKER_GONE)
        del self._accounts[worker.node]
        self.touched.discard(worker.node)

    def frontend_gone(self, frontend: NodeLife) -> None:
        """End everything that a dead frontend has asked for."""
        for booking in tuple(self._by_frontend.get(frontend, {}).values()):
            self._end(booking, BookingEnd.FRONTEND_GONE)

    # ------------------------------------------------------------------ what workers say

    def reported(self, worker: NodeLife) -> None:
        """A load report arrived, written when the worker held all that it has said it holds."""
        if account := self._account(worker):
            account.report()
            self.touched.add(worker.node)

    def report_lost(self, worker: NodeLife) -> None:
        """The worker's load is no longer known; all bookings count until the next report."""
        if account := self._account(worker):
            account.report_lost()
            self.touched.add(worker.node)

    def held(
        self, worker: NodeLife, id: int, started: FirstTokenStats | None = None
    ) -> Booking | None:
        """The worker has this booking's request; `started`: also its first token. Returns the
        booking if that is new and it is ours."""
        account = self._account(worker)
        if account is None:
            return None
        if id not in account.reported and id not in account.fresh:
            account.fresh.add(id)
            if id in account.open:
                self._unseen.pop(id, None)
            elif started is None:
                account.strangers.add(id)
            self.touched.add(worker.node)
        if started is None:
            return None
        self.touched.add(worker.node)
        booking = account.start(self._clock(), id)
        return booking if booking is not None and booking.owner is None else None

    def let_go(self, worker: NodeLife, id: int) -> None:
        """The worker no longer has this booking's request."""
        account = self._account(worker)
        if account is None:
            return
        booking = account.open.get(id)
        if booking is None:
            account.let_go(id)
        elif booking.owner is None:
            self._end(booking, BookingEnd.LET_GO)
            account.let_go(id, booking.sequences)
        else:
            # Its owner will say so too; until then it stays in `_peers`, without a charge.
            account.discharge(self._clock(), booking)
            account.let_go(id, booking.sequences)
        self.touched.add(worker.node)

    def holds(self, worker: NodeLife, ids: Iterable[int]) -> None:
        """The worker has these requests and no others. Unconfirmed bookings stay placed."""
        account = self._account(worker)
        if account is None:
            return
        now_held = set(ids)
        for id in (account.fresh | account.reported) - now_held:
            self.let_go(worker, id)
        for id in now_held:
            self.held(worker, id)

    # ------------------------------------------------------------------ other routers

    def peer_up(self, router: NodeLife) -> None:
        """Follow a router's bookings from now on. Idempotent."""
        self._peers.setdefault(router, {})

    def peer_beat(self, now: Seconds, router: NodeLife, busy: bool) -> None:
        """A router was heard. `busy`: it should be heard again soon."""
        if router in self._peers:
            self._beats[router] = now if busy else None
            if router in self._trust:
                self.judge_peers(now)

    def judge_peers(self, now: Seconds) -> None:
        """Update how much the news of each peer router is trusted; call it often."""
        trust: dict[NodeLife, float] = {}
        for router, heard in self._beats.items():
            if heard is not None and now - heard > _TRUSTED:
                late = (now - heard - _TRUSTED) / (_WORTHLESS - _TRUSTED)
                trust[router] = max(0.0, 1.0 - late)
        if trust != self._trust:
            self._trust = trust
            self.touched.update(self._accounts)

    @property
    def peers_work(self) -> bool:
        """True if a peer router was busy when it was heard last."""
        return any(heard is not None for heard in self._beats.values())

    @property
    def silent_peers(self) -> list[NodeId]:
        """Routers whose news is late."""
        return sorted(router.node for router in self._trust)

    def peer_gone(self, router: NodeLife) -> None:
        """End a router's bookings: frontends ask again, and workers report what runs."""
        self._beats.pop(router, None)
        if self._trust.pop(router, None) is not None:
            self.touched.update(self._accounts)
        for booking in self._peers.pop(router, {}).values():
            self._discharge(booking)

    def peer_placed(self, router: NodeLife, booked: BookingRecord) -> None:
        """A peer router has made a booking. Idempotent."""
        bookings = self._peers.get(router)
        if bookings is None or booked.booking in bookings:
            return
        worker = NodeLife(booked.worker, booked.epoch)
        now = self._clock()
        work = self._predict(worker, booked.prompt_tokens, booked.cached_tokens)
        booking = Booking(
            booked.booking,
            worker,
            booked.sequences,
            booked.prompt_tokens,
            booked.cached_tokens,
            round(work * _MICRO),
            now,
            owner=router,
        )
        bookings[booking.id] = booking
        account = self._account(worker)
        if account:
            account.charge(now, booking)
            self.touched.add(worker.node)

    def peer_ended(self, router: NodeLife, id: int) -> None:
        """A peer router has ended a booking. Idempotent."""
        booking = self._peers.get(router, {}).pop(id, None)
        if booking:
            self._discharge(booking)

    # ------------------------------------------------------------------ inside

    def _account(self, worker: NodeLife) -> _Account | None:
        account = self._accounts.get(worker.node)
        return account if account and account.epoch == worker.epoch else None

    def _next_id(self, account: _Account) -> int:
        while True:
            self._count = (self._count + 1) % (1 << _COUNTER_BITS)
            id = self.part | self._count
            if id not in self._own and id not in account.open:
                return id

    def _end(self, booking: Booking, why: BookingEnd) -> None:
        """The only way in which an own booking ends."""
        del self._own[booking.id]
        self._unseen.pop(booking.id, None)
        frontend = booking.frontend
        if frontend is not None:
            asked = self._by_frontend[frontend]
            del asked[booking.id]
            if not asked:
                del self._by_frontend[frontend]
        self._discharge(booking)
        self.ended[why] += 1
        self._on_end(booking, why)

    def _discharge(self, booking: Booking) -> None:
        account = self._account(booking.worker)
        if account and account.discharge(self._clock(), booking):
            self.touched.add(booking.worker.node)

    def check(self) -> None:
        """Raise `AssertionError` unless every sum is that of its parts and every entry has its
        owner. O(all), for tests."""
        assert self.placed == len(self._own) + self.ended.total()
        for node, account in self._accounts.items():
            self._check_account(node, account)
        for booking in self._own.values():
            account_or_none = self._account(booking.worker)
            assert account_or_none is not None
            held = account_or_none.fresh | account_or_none.reported
            assert account_or_none.open[booking.id] is booking
            assert (booking.id in self._unseen) == (booking.id not in held)
            assert booking.frontend is not None
            assert self._by_frontend[booking.frontend][booking.id] is booking
        assert self._unseen.keys() <= self._own.keys()
        assert list(self._unseen.values()) == sorted(self._unseen.values())
        assert sum(map(len, self._by_frontend.values())) == len(self._own)
        assert all(self._by_frontend.values())

    def _check_account(self, node: NodeId, account: _Account) -> None:
        assert not account.fresh & account.reported
        in_report = [account.open[id] for id in account.open.keys() & account.reported]
        held = account.fresh | account.reported
        assert account.started <= held
        assert account.strangers == held - account.started - account.open.keys()
        assert account.prefill.keys() == account.open.keys() - account.started
        waiting = account.prefill.values()
        assert account.prefill_sequences == sum(b.sequences for b in waiting)
        assert account.prefill_tokens == sum(b.uncached for b in waiting)
        assert account.work == sum(b.work for b in waiting)
        assert account.window.sum == sum(account.window.buckets)
        assert account.reserving <= account.open.keys() - account.reported - account.started
        reserved: Counter[LaneName] = Counter()
        for id in account.reserving:
            reserved.update(dict(account.open[id].lanes))
        assert +account.reserved == +reserved
        assert min(account.reserved.values(), default=0) >= 0
        everything, counted = _sum(account.open.values()), _sum(in_report)
        assert everything == (account.sequences, account.prompt_tokens)
        assert counted == (account.reported_sequences, account.reported_tokens)
        for booking in account.open.values():
            assert booking.worker == (node, account.epoch)
            owned = self._own if booking.owner is None else self._peers[booking.owner]
            assert owned[booking.id] is booking


def _sum(bookings: Iterable[Booking]) -> BookedLoad:
    listed = list(bookings)
    return BookedLoad(sum(b.sequences for b in listed), sum(b.prompt_tokens for b in listed))


_NO_PREFILLS: Final = PendingPrefills()
