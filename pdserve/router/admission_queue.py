"""Orders the requests of one model that wait in the router until a worker has room.

A request that waits here can still go to any worker, one that waits in an engine cannot. So the
order in which requests begin is decided here:

    bands        higher priority first, strictly
    tenants      of a band: start-time fair queueing on predicted seconds over weight (Goyal et al.,
                 SIGCOMM'96): the tenant that was served least, for its weight, is next. A tenant
                 that was away gets no credit for it
    requests     of a tenant: least `predicted - AGEING * waited` first, so that short ones overtake
                 long ones and none waits for ever; or by arrival alone

It knows no workers: the caller of `take` says which requests could be placed now. It bounds only
the memory of tenants; `admission_control` bounds what comes in. Pure; `RouterCore` owns one for
each model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from sortedcontainers import SortedDict

from pdserve.router.worker_filter import WorkerFilters, filter_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdserve.errors import PdserveError
    from pdserve.ids import Bytes, NodeLife, Seconds
    from pdserve.messages.routing import RouteDecision, RouteRequest
    from pdserve.router.bookings import Booking
    from pdserve.router.worker_filter import WorkerFilter

__all__ = ["AGEING", "ORDERS", "AdmissionQueue", "PlacedRequest", "QueuedRequest"]

AGEING: Final = 0.1
"""Seconds of predicted work that one second of waiting outweighs: shorter requests that come later
overtake one for at most ten times its own work. Three times as much made the order almost that of
arrival where most prompts are short: under overload all of them were late."""
ORDERS: Final = ("sjf", "fifo")
_MICRO: Final = 1_000_000
_NEWEST: Final = 1 << 62
"""A number above those of all requests that have arrived."""
_ENTRY_BYTES: Final[Bytes] = 1024
"""Memory of a held request besides its texts."""
_IDLE_TENANTS: Final = 4096
"""Tenants without requests that each band remembers."""


@dataclass(frozen=True, slots=True)
class PlacedRequest:
    """The result of a request that was placed."""

    booking: Booking
    routed: RouteDecision


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request that waits, or has waited."""

    request: RouteRequest
    frontend: NodeLife
    answer: Callable[[PlacedRequest | PdserveError], None]
    """Called once with the result, unless the request is withdrawn."""
    arrived: Seconds
    cost: Seconds
    """Predicted prefill time at the worker that has most of it cached."""
    deadline: Seconds | None = None
    """Nobody waits for the answer after this time; None: no deadline."""
    number: int = 0
    """Order of arrival at this router."""
    waiting: bool = False
    """True while it is in a queue."""
    worker_filter: WorkerFilter | None = None
    """While it waits: which workers may take it; None: all of the model."""
    bytes: Bytes = field(init=False)
    """Approximate memory that it occupies."""

    def __post_init__(self) -> None:
        request = self.request
        texts = (request.session_id, request.tenant, request.request_id, request.model)
        size = len(request.names) + sum(map(len, texts)) + filter_bytes(request)
        self.bytes = _ENTRY_BYTES + size

    @property
    def late(self) -> Seconds | None:
        """The latest time to begin the request so that its first token is in time; None: no
        limit."""
        request = self.request
        if request.slo_ttft is None:
            return None
        return self.arrived + request.slo_ttft - request.waited - self.cost

    @property
    def leaves(self) -> Seconds | None:
        """The time at which the request stops waiting in any case; None: never."""
        return min((at for at in (self.deadline, self.late) if at is not None), default=None)


@dataclass(slots=True, eq=False)
class _Tenant:
    """One tenant's requests in one band."""

    name: str
    virtual: float
    """Seconds per weight that it was served, on the band's scale: its next start tag."""
    weight: float = 1.0
    """The weight in its newest request."""
    micros: int = 0
    """Predicted work of its requests, in microseconds."""
    items: SortedDict[tuple[float, int], QueuedRequest] = field(default_factory=SortedDict)

    def add(self, key: float, item: QueuedRequest) -> None:
        self.items[key, item.number] = item
        self.micros += _micros(item)
        self.weight = item.request.weight

    def discard(self, key: float, item: QueuedRequest) -> None:
        del self.items[key, item.number]
        self.micros -= _micros(item)

    @property
    def rank(self) -> tuple[float, str]:
        return (self.virtual, self.name)


class _Band:
    """The requests of one priority."""

    def __init__(self) -> None:
        self.active: SortedDict[tuple[float, str], _Tenant] = SortedDict()
        """Tenants that have requests, the next one first."""
        self.tenants: dict[str, _Tenant] = {}
        self.virtual = 0.0
        """Start tag of what was served last."""
        self._idle: dict[str, float] = {}
        """Tenants that were served ahead of the band's time and have nothing now."""

    def push(self, key: float, item: QueuedRequest) -> None:
        name = item.request.tenant
        tenant = self.tenants.get(name)
        if tenant is None:
            start = max(self.virtual, self._idle.pop(name, 0.0))
            tenant = self.tenants[name] = _Tenant(name, start)
            self.active[tenant.rank] = tenant
        tenant.add(key, item)

    def remove(self, key: float, item: QueuedRequest) -> None:
        tenant = self.tenants[item.request.tenant]
        tenant.discard(key, item)
        if not tenant.items:
            self._retire(tenant)

    def serve(self, key: float, item: QueuedRequest) -> None:
        """Remove a request and charge its tenant."""
        tenant = self.tenants[item.request.tenant]
        tenant.discard(key, item)
        self.virtual = max(self.virtual, tenant.virtual)
        del self.active[tenant.rank]
        tenant.virtual += item.cost / item.request.weight
        self.active[tenant.rank] = tenant
        if not tenant.items:
            self._retire(tenant)

    def _retire(self, tenant: _Tenant) -> None:
        del self.active[tenant.rank]
        del self.tenants[tenant.name]
        if tenant.virtual > self.virtual:
            self._idle[tenant.name] = tenant.virtual
            if len(self._idle) > _IDLE_TENANTS:
                del self._idle[next(iter(self._idle))]

    def __iter__(self) -> Iterator[QueuedRequest]:
        """Iterates over the band's requests in order."""
        for tenant in self.active.values():
            yield from tenant.items.values()

    @property
    def micros(self) -> int:
        """Predicted work of all requests, in microseconds."""
        return sum(tenant.micros for tenant in self.tenants.values())

    def ahead(self, key: float, request: RouteRequest) -> float:
        """Estimates the work of this band that would begin before that request: of its own tenant,
        the requests before it in order; of each other tenant, by weight, as much as that takes."""
        own = self.tenants.get(request.tenant)
        before = 0.0
        if own is not None:
            before = own.micros * own.items.bisect_left((key, _NEWEST)) / len(own.items)
        others = (tenant for tenant in self.tenants.values() if tenant is not own)
        share = before / request.weight
        return before + sum(min(tenant.micros, share * tenant.weight) for tenant in others)


def _micros(item: QueuedRequest) -> int:
    return round(item.cost * _MICRO)


class AdmissionQueue:
    """The hold queue of one model."""

    def __init__(self, order: str = "sjf") -> None:
        self._by_arrival = order == "fifo"
        self._bands: SortedDict[int, _Band] = SortedDict()
        """Bands by falling priority: the key is the negative priority."""
        self._deadlines: SortedDict[tuple[Seconds, int], QueuedRequest] = SortedDict()
        self._length = 0
        self._micros = 0
        self.bytes: Bytes = 0
        self.filters = WorkerFilters()

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[QueuedRequest]:
        """Iterates over the requests in the order in which they would be taken now."""
        for band in self._bands.values():
            yield from band

    @property
    def work(self) -> Seconds:
        """Predicted seconds of all waiting requests."""
        return self._micros / _MICRO

    def ahead(self, request: RouteRequest, cost: Seconds, now: Seconds) -> Seconds:
        """Predicted seconds of about the work that would begin before a request that comes now."""
        micros = 0.0
        for priority, band in self._bands.items():
            if -priority > request.priority:
                micros += band.micros
            elif -priority == request.priority:
                micros += band.ahead(self._order(request, cost, now), request)
        return micros / _MICRO

    def push(self, item: QueuedRequest) -> None:
        band = self._bands.get(-item.request.priority)
        if band is None:
            band = self._bands[-item.request.priority] = _Band()
        band.push(self._key(item), item)
        if item.leaves is not None:
            self._deadlines[item.leaves, item.number] = item
        item.waiting = True
        item.worker_filter = self.filters.add(item.request)
        self._count(item, 1)

    def remove(self, item: QueuedRequest) -> bool:
        """Remove a request without serving it; False if it does not wait."""
        if not item.waiting:
            return False
        self._bands[-item.request.priority].remove(self._key(item), item)
        self._removed(item)
        return True

    def take(self, fits: Callable[[QueuedRequest], bool]) -> QueuedRequest | None:
        """Remove the first request that fits, and charge its tenant; None: none fits."""
        for item in self:
            if fits(item):
                self._bands[-item.request.priority].serve(self._key(item), item)
                self._removed(item)
                return item
        return None

    def last_below(self, priority: int) -> QueuedRequest | None:
        """The request with a lower priority that would be served last; None: there is none.
        Requests that a router has placed before are passed over, because they were admitted."""
        for negative in reversed(self._bands):
            if -negative >= priority:
                return None
            for tenant in reversed(self._bands[negative].active.values()):
                for item in reversed(tenant.items.values()):
                    if not item.request.attempt:
                        return item
        return None

    def expired(self, now: Seconds) -> list[QueuedRequest]:
        """Requests whose time has passed; they stay in the queue."""
        passed = []
        for (leaves, _), item in self._deadlines.items():
            if leaves > now:
                break
            passed.append(item)
        return passed

    @property
    def next_deadline(self) -> Seconds | None:
        """The time at which the next request expires; None: none expires."""
        return self._deadlines.peekitem(0)[0][0] if self._deadlines else None

    # ------------------------------------------------------------------ inside

    def _key(self, item: QueuedRequest) -> float:
        """`cost - AGEING * waited`, but for what is the same for all at any moment; it never
        changes, so nothing has to be sorted anew as time passes."""
        return self._order(item.request, item.cost, item.arrived)

    def _order(self, request: RouteRequest, cost: Seconds, arrived: Seconds) -> float:
        reached = arrived - request.waited
        return reached if self._by_arrival else cost + AGEING * reached

    def _count(self, item: QueuedRequest, sign: int) -> None:
        self._length += sign
        self._micros += sign * _micros(item)
        self.bytes += sign * item.bytes

    def _removed(self, item: QueuedRequest) -> None:
        """A band without requests is forgotten, and with it who was served: its time is over."""
        item.waiting = False
        if item.worker_filter is not None:
            self.filters.remove(item.worker_filter)
            item.worker_filter = None
        if item.leaves is not None:
            del self._deadlines[item.leaves, item.number]
        if not self._bands[-item.request.priority].tenants:
            del self._bands[-item.request.priority]
        self._count(item, -1)

    def check(self) -> None:
        """Raise `AssertionError` unless all sums are those of their parts. For tests."""
        items = list(self)
        assert len(items) == self._length == len(set(map(id, items)))
        assert all(item.waiting for item in items)
        assert self._micros == sum(map(_micros, items))
        assert self._micros == sum(band.micros for band in self._bands.values())
        filters = [item.worker_filter for item in items if item.worker_filter is not None]
        assert set(map(id, filters)) == set(map(id, self.filters))
        assert len(filters) == sum(worker_filter.requests for worker_filter in self.filters)
        assert self.bytes == sum(item.bytes for item in items)
        timed = {id(item) for item in items if item.leaves is not None}
        assert timed == {id(item) for item in self._deadlines.values()}
        for band in self._bands.values():
            assert set(band.active) == {tenant.rank for tenant in band.tenants.values()}
            assert all(tenant.items for tenant in band.tenants.values())
