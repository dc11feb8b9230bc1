"""How a request may end: in exactly one of the ways that were promised, and for that reason.

    completed exactly · client cancelled · rejected early · deadline, with reason · connection lost
    with its frontend · poison, after so many workers · no worker left, with reason

That a worker dies, is asked to go, stands still or has no room is no reason: another has to go on
with the request. Who could have is known here from outside: a worker is *fit* for a frontend while
both are up and hear of each other, it serves, and a router that both hear of can name it.

What has ended is gone everywhere within a second, unless something is the matter with the network.
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final

from pdserve.errors import (
    DeadlineExceeded,
    Draining,
    NoRouter,
    NotReady,
    NoWorker,
    Overloaded,
    Poisoned,
    WorkerLost,
)
from pdserve.frontend.config import FrontendConfig
from pdserve.sim.roles import Worker
from pdserve.sim.whereabouts import holders, stage_of

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.sim.callers import Account
    from pdserve.sim.faults import Fault
    from pdserve.sim.world import Host, World

__all__ = ["Judge"]

_FREE_WITHIN: Final[Seconds] = 1.0
"""Of a request's end: nobody keeps anything of it after that."""
_SETTLES: Final[Seconds] = 3.0
"""Until what a fault has held up has arrived."""
_FIT: Final[Seconds] = 5.0
"""Who has been fit for so long should have been found."""
_MOVES: Final = 3
"""As often a request leaves a worker that would rather not have it, unless that has to go."""
_LOOKS: Final[Seconds] = 0.25


class Judge:
    """Of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._fit: dict[tuple[str, str], Seconds] = {}
        """(frontend, worker), since when."""
        self._deaths: dict[str, list[Seconds]] = {}
        """Of workers and of their engines, and steps that failed."""
        self._disturbed: Seconds = 0.0
        self._troubled: Seconds = 0.0
        """When a fault last began or ended: one that keeps words from arriving; any."""

    def watch(self) -> None:
        """Look at who is fit, from now on."""
        self._look()
        self._world.call_later(_LOOKS, self.watch)

    # ------------------------------------------------------------------ what happens

    def died(self, worker: str) -> None:
        """It, its engine, or a step of it; or somebody takes it for dead."""
        self._deaths.setdefault(worker, []).append(self._world.loop.time())

    def disturbed(self, fault: Fault) -> None:
        """It begins, or ends."""
        self._troubled = self._world.loop.time()
        if fault.disturbs:
            self._disturbed = self._troubled

    def leaves(self, account: Account) -> None:
        """Its client is about to turn away."""
        stage = stage_of(self._world, account.name, begun=bool(account.placed))
        self._world.cancelled[stage] += 1
        account.left_at = stage

    def ended(self, host: Host, account: Account) -> None:
        """See above. Complains."""
        if isinstance(account.error, Poisoned) and not account.poison:
            self._world.outcomes["taken for poison"] += 1
        wrong = self._wrong(host, account)
        if wrong:
            self._world.complain(f"{account.name} {account.outcome}: {wrong} ({account.error})")
        self.forgotten(account)

    def forgotten(self, account: Account) -> None:
        """Nobody waits for it any more."""
        end = self._world.loop.time()
        self._world.call_later(_FREE_WITHIN, partial(self._is_free, account, end))

    def _is_free(self, account: Account, end: Seconds) -> None:
        if self._unquiet(since=end - _SETTLES):
            return
        stage = f", cancelled while {account.left_at}" if account.left_at else ""
        for host, kept in holders(self._world, account.name):
            self._world.complain(
                f"{host} keeps {account.name}, which is {kept} there, {_FREE_WITHIN:g} s after it "
                f"has ended: {account.outcome}{stage}"
            )

    def _unquiet(self, since: Seconds, *, harmless: bool = True) -> bool:
        """Something was the matter; `harmless`: leaving out what only concerns one process."""
        active = self._world.active
        if not harmless:
            return bool(active) or max(self._disturbed, self._troubled) >= since
        return self._disturbed >= since or any(fault.disturbs for fault in active)

    def others_fit(self, host: Host) -> bool:
        """Whatever a worker has could be served by another, in everybody's eyes."""
        frontends = [f.name for f in self._world.of_role("frontend") if _runs(f)]
        model = host.settings.model
        others = [w for w in self._world.of_role("worker") if w.settings.model == model]
        since = self._world.loop.time() - _FIT
        return any(
            all(self._fit.get((frontend, other.name), inf) <= since for frontend in frontends)
            for other in others
            if other is not host
        )

    # ------------------------------------------------------------------ what is legal

    def _wrong(self, host: Host, account: Account) -> str:
        error, now = account.error, self._world.loop.time()
        moves = getattr(account.stream, "_moves", 0)
        if moves > _MOVES:
            return f"it was moved {moves} times"
        if account.outcome == "completed":
            return "every engine that computes it breaks" if account.poison else ""
        match error:
            case None:
                return ""
            case DeadlineExceeded():
                deadline = account.request.deadline
                if deadline is None or now - account.began < deadline - 0.01:
                    return "it has time left"
                late = account.overdue and not self._unquiet(now - _SETTLES, harmless=False)
                return "nobody has ended it in time" if late else ""
            case Poisoned():
                return self._wrongly_poison(account, error)
            case Draining() if host.busy:
                return ""  # its frontend goes away, and its connection with it
            case Overloaded() if not account.tokens:
                return ""  # early enough, whoever it was that had no room
            case NoWorker() | NoRouter():
                return self._wrongly_nobody(host, account)
            case NotReady() | Draining() | WorkerLost() if not account.accepted:
                return self._wrongly_nobody(host, account)
        return "that is no reason"

    def _wrongly_poison(self, account: Account, error: Poisoned) -> str:
        """By whom it was computed when they died, as far as a world can tell: one after another,
        and no token came."""
        deaths = 0
        ends = [(placed.at, placed.tokens) for placed in account.placed[1:]]
        ends.append((self._world.loop.time(), account.tokens))
        for placed, (end, tokens) in zip(account.placed, ends, strict=True):
            times = self._deaths.get(placed.worker, ())
            died = any(placed.at <= at <= end for at in times)
            deaths = deaths + died if tokens == placed.tokens else 0
        wanted = FrontendConfig().poison_after
        if deaths < wanted:
            return f"{deaths} workers have died of it, not {wanted}"
        named = [placed.worker for placed in account.placed if placed.worker in error.message]
        return "" if named else "it does not say of whom it knows that"

    def _wrongly_nobody(self, host: Host, account: Account) -> str:
        """There has to be none."""
        self._look()
        since = self._world.loop.time() - _FIT
        refused = () if account.accepted else {placed.worker for placed in account.placed}
        for (frontend, worker), begun in self._fit.items():
            if worker in refused:
                continue  # a new request is not brought back to who did not take it
            settings = self._world.hosts[worker].settings
            if frontend == host.name and settings.model == account.request.model and begun <= since:
                return f"{worker} could have served it for {_FIT:g} s or longer"
        return ""

    # ------------------------------------------------------------------ who is fit

    def _look(self) -> None:
        world, now = self._world, self._world.loop.time()
        workers = [host for host in world.of_role("worker") if _serves(host)]
        routers = [host for host in world.of_role("router") if _runs(host)]
        fit: dict[tuple[str, str], Seconds] = {}
        for frontend in world.of_role("frontend"):
            if not _runs(frontend):
                continue
            near = [r for r in routers if self._hear(frontend, r)]
            for worker in workers:
                key = frontend.name, worker.name
                if self._hear(frontend, worker) and any(self._hear(r, worker) for r in near):
                    fit[key] = self._fit.get(key, now)
        self._fit = fit

    def _hear(self, one: Host, other: Host) -> bool:
        """Both know each other, and nothing is between them."""
        if self._world.is_cut(one.name, other.name):
            return False
        return _knows(one, other) and _knows(other, one)


def _runs(host: Host) -> bool:
    return host.up and host.ready and host.process is not None and not host.process.paused


def _serves(host: Host) -> bool:
    part = host.part
    return (
        _runs(host)
        and isinstance(part, Worker)
        and part.service.config.mode != "prefill"
        and part.service.unready_reason() is None
    )


def _knows(one: Host, other: Host) -> bool:
    assert one.part is not None
    assert other.part is not None
    node = other.part.node
    member = one.part.node.registry.get(node.id)
    return (
        member is not None
        and member.epoch == node.epoch
        and member.reachable
        and not member.suspect
        and member.card == node.card
    )
