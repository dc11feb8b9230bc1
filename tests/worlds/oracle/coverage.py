"""Which cells of the state machines a run visits: (state, event) of members, of bookings, of
handoffs, of requests on their way (`migration_coverage`), and of KV tiers (`tier_coverage`).

`count_visits` looks over the shoulder of the two tables while it lasts, in every node of the
process, and counts. What must be visited is listed here, so that a rule nobody exercises is named.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from pdserve.gossip.core import Gossip, GossipPhase
from pdserve.gossip.member_table import MemberTable
from pdserve.router.bookings import BookingEnd, Bookings
from pdserve.worker.disagg.state_table import DECODE_TABLE, PREFILL_TABLE, StateMachine
from tests.worlds.oracle.migration_coverage import PROBES, REQUEST_CELLS
from tests.worlds.oracle.tier_coverage import PROBES as TIER_PROBES
from tests.worlds.oracle.tier_coverage import TIER_CELLS
from tests.worlds.planner.coverage import PROBES as CHANGE_PROBES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from enum import Enum

    from pdserve.gossip.messages import MemberRecord
    from pdserve.ids import NodeLife
    from pdserve.messages.request import FirstTokenStats
    from pdserve.router.bookings import Booking

__all__ = [
    "BOOKING_CELLS",
    "HANDOFF_CELLS",
    "LIFE_CELLS",
    "MEMBER_CELLS",
    "OUT_OF_REACH",
    "Cells",
    "count_visits",
    "unvisited_cells",
]

Cells = Counter[tuple[str, str]]

MEMBER_CELLS: Final = frozenset(
    (f"member {state}", event)
    for state, events in {
        "-": ("ALIVE", "SUSPECT", "DEAD", "LEFT"),
        "ALIVE": ("ALIVE", "SUSPECT", "DEAD", "LEFT", "earlier DEAD"),
        "SUSPECT": ("ALIVE", "SUSPECT", "DEAD", "LEFT", "later ALIVE"),
        "DEAD": ("ALIVE", "SUSPECT", "DEAD", "later ALIVE"),
        "LEFT": ("ALIVE", "SUSPECT", "LEFT", "later ALIVE"),
    }.items()
    for event in events
)
"""What a record says, against what is known of its node; `later`, `earlier`: of another life."""

LIFE_CELLS: Final = frozenset(
    ("life", event)
    for event in ("NEW JOINING", "JOINING UP", "UP LEAVING", "LEAVING OUT", "UP OUT")
)
"""Phases of a node's own life."""

BOOKING_CELLS: Final = frozenset(
    (f"booking {state}", event)
    for state, events in {
        "unknown": ("held", "let_go"),
        "placed": ("held", "RELEASED", "WORKER_GONE", "FRONTEND_GONE", "NEVER_SEEN"),
        "seen": ("reported", "LET_GO", "RELEASED"),
        "counted": ("LET_GO", "RELEASED", "WORKER_GONE", "FRONTEND_GONE", "report_lost"),
        "peer's placed": ("held", "peer_ended", "peer_gone"),
        "peer's seen": ("reported", "let_go", "peer_ended"),
        "peer's counted": ("let_go", "peer_ended", "peer_gone"),
        "ended": ("RELEASED",),
    }.items()
    for event in events
)
"""What happens to a booking, against what its router has heard of it."""


HANDOFF_CELLS: Final = frozenset(
    (f"{table.name} {state.value}", event.value)
    for table in (DECODE_TABLE, PREFILL_TABLE)
    for state, event in table.cells
)
"""What happens to a handoff, at either end."""

_OUT_OF_REACH: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "the queue's client keeps silent about an item that is open or taken back": {
        "refused": (
            *("decode worker attempt", "decode worker fill", "decode worker verify"),
            *("decode worker active", "decode worker local"),
        ),
        "unclaimed": (
            *("prefill worker computing", "prefill worker notifying"),
            *("prefill worker notified", "prefill worker sent"),
        ),
    },
    "an engine's first delta says how it came about: the first token is before the end": {
        "done": tuple(
            f"decode worker {state}"
            for state in ("admit", "queue", "attempt", "fill", "verify", "local")
        ),
    },
    "nobody knows a request before it was queued": {"stale": ("decode worker admit",)},
    "a question is not overtaken by all that follows its repetition": {
        "again": ("decode worker verify", "decode worker active"),
    },
    "words to and from an inline engine do not cross": {
        "admitted": ("decode worker local",),
        "first token": ("decode worker fill",),
    },
    "patience ends a third into what is left; a process would have to stand still over both": {
        "expire": ("decode worker queue",),
    },
    "a pool that is full gives blocks back within two seconds": {
        "hindered": ("decode worker attempt",),
    },
    "races within a message's way: none of 530 worlds met them": {
        "failed": ("decode worker active",),
        "fence": (
            *("decode worker attempt", "decode worker verify"),
            "prefill worker computing",
        ),
        "refused": ("prefill worker claimed",),
        "died": ("prefill worker notifying",),
        "not taken": ("prefill worker notifying",),
    },
}

OUT_OF_REACH: Final = frozenset(
    (state, event)
    for cells in _OUT_OF_REACH.values()
    for event, states in cells.items()
    for state in states
)
"""Cells of handoffs that worlds do not visit, each for a reason. The table has them because real
processes are not that orderly; tests/worker/disagg visits them."""


def unvisited_cells(visited: Cells) -> list[str]:
    """Cells that must be visited and were not."""
    wanted = MEMBER_CELLS | LIFE_CELLS | BOOKING_CELLS | REQUEST_CELLS
    wanted |= (HANDOFF_CELLS - OUT_OF_REACH) | TIER_CELLS
    return sorted(f"{state}: {event}" for state, event in wanted - visited.keys())


@contextlib.contextmanager
def count_visits(cells: Cells) -> Iterator[Cells]:
    """Count visits into `cells`."""
    with contextlib.ExitStack() as stack:

        def look(owner: type, name: str, before: Callable[..., None]) -> None:
            original = getattr(owner, name)

            def looked(self: Any, *args: Any, **kwargs: Any) -> Any:
                before(cells, self, *args, **kwargs)
                return original(self, *args, **kwargs)

            setattr(owner, name, looked)
            stack.callback(setattr, owner, name, original)

        look(MemberTable, "apply", _applied)
        look(Gossip, "step", _stepped)
        look(Gossip, "_out", _out)
        look(StateMachine, "feed", _fed)
        look(Bookings, "held", _held)
        look(Bookings, "let_go", _let_go)
        look(Bookings, "reported", _reported)
        look(Bookings, "report_lost", _report_lost)
        look(Bookings, "release", _released)
        look(Bookings, "_end", _ended)
        look(Bookings, "peer_ended", _peer_ended)
        look(Bookings, "peer_gone", _peer_gone)
        for owner, name, looker in (*PROBES, *TIER_PROBES, *CHANGE_PROBES):
            look(owner, name, looker)
        yield cells


def _fed(cells: Cells, machine: StateMachine[Any, Any, Any], event: Enum) -> None:
    cells[f"{machine.table.name} {machine.state.value}", event.value] += 1


def _applied(cells: Cells, members: MemberTable, record: MemberRecord) -> None:
    known = members.get(record.node)
    event = record.state.name
    if known is None:
        cells["member -", event] += 1
        return
    if record.epoch != known.epoch:
        event = f"{'later' if record.epoch > known.epoch else 'earlier'} {event}"
    cells[f"member {known.state.name}", event] += 1


def _stepped(cells: Cells, machine: Gossip, now: float, event: object) -> None:
    """Between two steps the phase is what the first has made it."""
    last: GossipPhase = vars(machine).setdefault("watched_phase", GossipPhase.NEW)
    if machine.phase is not last:
        cells["life", f"{last.name} {machine.phase.name}"] += 1
        vars(machine)["watched_phase"] = machine.phase


def _out(cells: Cells, machine: Gossip, effect: object) -> None:
    cells["life", f"{machine.phase.name} OUT"] += 1
    vars(machine)["watched_phase"] = GossipPhase.OUT


# ---------------------------------------------------------------------------- bookings


def _state(bookings: Bookings, worker: NodeLife, id: int) -> str:
    account = bookings._account(worker)
    if account is None or id not in account.open:
        return "unknown"
    whose = "" if account.open[id].owner is None else "peer's "
    if id in account.reported:
        return f"{whose}counted"
    return f"{whose}seen" if id in account.fresh else f"{whose}placed"


def _held(
    cells: Cells,
    bookings: Bookings,
    worker: NodeLife,
    id: int,
    started: FirstTokenStats | None = None,
) -> None:
    cells[f"booking {_state(bookings, worker, id)}", "held"] += 1


def _let_go(cells: Cells, bookings: Bookings, worker: NodeLife, id: int) -> None:
    cells[f"booking {_state(bookings, worker, id)}", "let_go"] += 1


def _reported(cells: Cells, bookings: Bookings, worker: NodeLife) -> None:
    account = bookings._account(worker)
    for id in account.fresh if account else ():
        cells[f"booking {_state(bookings, worker, id)}", "reported"] += 1


def _report_lost(cells: Cells, bookings: Bookings, worker: NodeLife) -> None:
    account = bookings._account(worker)
    for id in account.reported if account else ():
        cells[f"booking {_state(bookings, worker, id)}", "report_lost"] += 1


def _released(cells: Cells, bookings: Bookings, id: int) -> None:
    if id not in bookings._own:
        cells["booking ended", BookingEnd.RELEASED.name] += 1


def _ended(cells: Cells, bookings: Bookings, booking: Booking, why: BookingEnd) -> None:
    cells[f"booking {_state(bookings, booking.worker, booking.id)}", why.name] += 1


def _peer_ended(cells: Cells, bookings: Bookings, router: NodeLife, id: int) -> None:
    booking = bookings._peers.get(router, {}).get(id)
    if booking is not None:
        cells[f"booking {_state(bookings, booking.worker, id)}", "peer_ended"] += 1


def _peer_gone(cells: Cells, bookings: Bookings, router: NodeLife) -> None:
    for booking in bookings._peers.get(router, {}).values():
        cells[f"booking {_state(bookings, booking.worker, booking.id)}", "peer_gone"] += 1
