"""Judges how a request ends: in exactly one of the promised ways, and for a valid reason.

    completed exactly · client cancelled · rejected early · deadline, with reason · connection lost
    with its frontend · poison, after so many workers · no worker left, with reason

A worker that dies, leaves, stalls or has no room is no valid reason: another worker must continue
the request. This module knows from outside which workers could: a worker is *fit* for a frontend
while both are up and know each other, it serves and is not full, and a router that both know can
name it.

A second after its end, nothing of a request is left anywhere, unless the network has a fault.
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
from pdserve.router.admission_control import MAX_WAIT_SHARE
from tests.worlds.oracle.fault_history import FaultHistory
from tests.worlds.oracle.request_locator import locate_request, stage_of
from tests.worlds.oracle.traces import TraceOracle
from tests.worlds.roles import MAX_RUNNING, MAX_WAITING, Worker

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from pdserve.errors import PdserveError
    from pdserve.ids import Seconds
    from tests.worlds.load_clients import TrackedRequest
    from tests.worlds.world import VirtualHost, World

__all__ = ["OutcomeOracle", "completed_of", "too_few"]

_FREE_WITHIN: Final[Seconds] = 1.0
"""Time after a request's end within which no process keeps anything of it."""
_HANDS_OVER: Final = ("drain",)
"""Faults under which a request continues elsewhere with its deadline, which another process than
the frontend must enforce."""
_SETTLES: Final[Seconds] = 3.0
"""Time after which everything that a fault has delayed has arrived."""
_FIT: Final[Seconds] = 5.0
"""A worker that was fit for this long should have been found."""
_MOVES: Final = 3
"""Most migrations of a request for the sake of others; a drain is not counted."""
_LOOKS: Final[Seconds] = 0.25
_ALONE: Final = 3
"""Most other requests with which a request counts as undisturbed."""
_AT_LEISURE: Final = 3.0
"""An undisturbed request must end within this factor of its steps' time, and a second."""
_HANDED_OVER: Final[Seconds] = 2.0
"""More time that a request may take if its prompt may be computed elsewhere."""
_SPEAKS_UP: Final[Seconds] = 3.0
"""A node that was silent for at most this time may not be declared dead."""
_BURIED_WITHIN: Final[Seconds] = 30.0
"""Time after a silence in which a node may still be declared dead because of it."""


_ANOTHER: Final = "another suspect request"
"""What a worker says that tries one alone."""
_EXCUSED: Final = ("cancelled", "connection lost", "taken for poison", "failed Poisoned")
"""How outcomes begin that say nothing about how many were served."""


def completed_of(outcomes: Mapping[str, int]) -> tuple[int, int]:
    """Requests that completed, and how many there were that no client ended, no frontend took down
    with it, and that were no poison."""
    counted = sum(n for words, n in outcomes.items() if not words.startswith(_EXCUSED))
    return outcomes.get("completed", 0), counted


def too_few(outcomes: Mapping[str, int], least: float) -> str:
    """Why the share that completed is too small, in words; empty: it is not."""
    completed, counted = completed_of(outcomes)
    if completed >= least * counted:
        return ""
    return f"{completed} of {counted} requests completed, less than {least:.0%}"


class OutcomeOracle:
    """Judges the ends of all requests of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._fit: dict[tuple[str, str], Seconds] = {}
        """(frontend, worker), since when."""
        self._room: dict[str, Seconds] = {}
        """Workers that could run one more request, since when."""
        self._deaths: dict[str, list[Seconds]] = {}
        """Times of deaths of workers and their engines, and of failed steps."""
        self._tried: dict[str, Seconds] = {}
        """When a request that a worker has died of last ended, by model."""
        self.causes = FaultHistory()
        self.traces = TraceOracle()

    def watch(self) -> None:
        """Look at who is fit, from now on."""
        self._look()
        self._world.call_later(_LOOKS, self.watch)

    # ------------------------------------------------------------------ what happens

    def died(self, worker: str) -> None:
        """Notes the death of a worker or its engine, a failed step, or that a node declared it
        dead."""
        self._deaths.setdefault(worker, []).append(self._world.loop.time())

    def held_for_dead(self, host: VirtualHost, name: str, epoch: int) -> None:
        """`host` believes that of a life. Complains, if nothing made that life silent."""
        other = self._world.hosts.get(name)
        if other is None or other.part is None or not _runs(other):
            return
        now, node = self._world.loop.time(), other.part.node
        silent = self.causes.longest_silence(now - _BURIED_WITHIN, now)
        if node.epoch == epoch and silent <= _SPEAKS_UP:
            self._world.complain(
                f"{host.name} holds {name} for dead, which lives; nobody was silent for longer "
                f"than {silent:.1f} s"
            )

    def leaves(self, account: TrackedRequest) -> None:
        """Its client is about to turn away."""
        stage = stage_of(self._world, account.name, begun=bool(account.placed))
        self._world.cancelled[stage] += 1
        account.left_at = stage

    def ended(self, host: VirtualHost, account: TrackedRequest) -> None:
        """See above. Complains."""
        if isinstance(account.error, Poisoned) and not account.poison:
            self._world.outcomes["taken for poison"] += 1
        wrong = self._wrong(host, account)
        if wrong:
            self._world.complain(f"{account.name} {account.outcome}: {wrong} ({account.error})")
        self.forgotten(account)

    def forgotten(self, account: TrackedRequest) -> None:
        """Notes a request that no client waits for any more."""
        end = self._world.loop.time()
        self.causes.request_ended(end, account.steps)
        if self._is_suspect(account):
            self._tried[account.request.model] = end
        self._world.call_later(_FREE_WITHIN, partial(self._is_free, account, end))

    def _is_free(self, account: TrackedRequest, end: Seconds) -> None:
        self._judge_trace(account, end)
        if self.causes.any_since(end - _SETTLES, disturbing=True):
            return
        stage = f", cancelled while {account.left_at}" if account.left_at else ""
        for host, kept in locate_request(self._world, account.name):
            self._world.complain(
                f"{host} keeps {account.name}, which is {kept} there, {_FREE_WITHIN:g} s after it "
                f"has ended: {account.outcome}{stage}"
            )

    def _judge_trace(self, account: TrackedRequest, end: Seconds) -> None:
        """Judges its trace, once its task has ended: a suspended process may take its time."""
        if not account.outcome or account.task is None:
            return  # it was lost with its frontend
        host = self._world.hosts.get(account.name.partition(".")[0])
        if host is None or host.part is None or host.part is not account.frontend:
            return
        if account.task.done():
            for wrong in self.traces.judge(account, end):
                self._world.complain(wrong)
        else:
            self._world.call_later(_FREE_WITHIN, partial(self._judge_trace, account, end))

    def others_fit(self, host: VirtualHost) -> bool:
        """True if all frontends know another worker that could serve the requests of this one."""
        frontends = [f.name for f in self._world.of_role("frontend") if _runs(f)]
        model = host.settings.model
        others = [w for w in self._world.of_role("worker") if w.settings.model == model]
        since = self._world.loop.time() - _FIT
        return any(
            all(self._fit.get((frontend, other.name), inf) <= since for frontend in frontends)
            for other in others
            if other is not host
        )

    def others_have_room(self, host: VirtualHost) -> bool:
        """True if another worker of the model could run one more request, and not only since a
        moment ago."""
        since = self._world.loop.time() - _FIT
        return any(
            began <= since and self._world.hosts[name].settings.model == host.settings.model
            for name, began in self._room.items()
            if name != host.name
        )

    # ------------------------------------------------------------------ what is legal

    def _wrong(self, host: VirtualHost, account: TrackedRequest) -> str:
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
                return self._wrongly_late(host, account)
            case Poisoned():
                return self._wrongly_poison(account, error)
            case Draining() if host.busy:
                return ""  # its frontend goes away, and its connection with it
            case Overloaded() if not account.tokens:
                return self._wrongly_full(host, account)
            case NoWorker() if self._waits_for_suspects(account, error):
                return ""
            case NoWorker() | NoRouter():
                return self._wrongly_nobody(host, account)
            case NotReady() | Draining() | WorkerLost() if not account.accepted:
                return self._wrongly_nobody(host, account)
        return "that is no reason"

    def _wrongly_late(self, host: VirtualHost, account: TrackedRequest) -> str:
        """Returns why a deadline is wrong; empty: it is right. Another process than the frontend
        must end the request in time. The request must be served if it could be: no fault concerned
        its hosts, and few other requests were there."""
        workers = self._workers_of(account)
        but = _HANDS_OVER if account.overdue else ()
        if self._disturbed(host, account, but):
            return ""
        if account.overdue:
            return "nobody has ended it in time"
        deadline, others = account.request.deadline, self._crowd(account.began)
        assert deadline is not None
        began = [self._fit.get((host.name, worker.name), inf) for worker in workers]
        if others > _ALONE or not any(since <= account.began for since in began):
            return ""
        pace = max(worker.settings.pace for worker in workers)
        modes = {worker.settings.mode for worker in workers}
        needed = 1.0 + _AT_LEISURE * pace * account.steps
        needed += _HANDED_OVER if "prefill" in modes else 0.0
        return f"it needs {needed:.2f} s and was not served" if needed < deadline else ""

    def _wrongly_full(self, host: VirtualHost, account: TrackedRequest) -> str:
        """There have to be as many requests as the bound says, or, for one with a deadline, so many
        that it may wait for most of it; or workers have died of it, and others are tried."""
        crowd = self._crowd(self._world.loop.time() - _SETTLES)
        if self._is_suspect(account) or (crowd and self._may_wait(host, account)):
            return ""
        bound = MAX_WAITING
        if not account.placed:
            bound = min(router.settings.hold_limit for router in self._world.of_role("router"))
        return "" if crowd >= bound else f"{crowd} others are not the {bound} that there may be"

    def _is_suspect(self, account: TrackedRequest) -> bool:
        """Whether a worker has died that had the request: it is tried alone then."""
        return any(placed.worker in self._deaths for placed in account.placed)

    def _waits_for_suspects(self, account: TrackedRequest, error: PdserveError) -> bool:
        """Whether others were tried alone while this one waited for its turn, as its end says."""
        if not self._is_suspect(account) or _ANOTHER not in error.message:
            return False
        model, since = account.request.model, self._world.loop.time() - _SETTLES
        return self._tried.get(model, -inf) >= since or any(
            self._is_suspect(other) and other.request.model == model
            for other in self._world.accounts
            if other is not account
        )

    def _may_wait(self, host: VirtualHost, account: TrackedRequest) -> bool:
        """True if the work of the requests before it, one after the other, may take so much of its
        deadline that it is refused. With faults nothing is known about that time."""
        deadline = account.request.deadline
        if deadline is None or self._disturbed(host, account):
            return deadline is not None
        ahead = self.causes.steps_since(self._world.loop.time() - _SETTLES)
        ahead += sum(other.steps for other in self._world.accounts if other is not account)
        pace = max(worker.settings.pace for worker in self._workers_of(account))
        return 1.0 + _AT_LEISURE * pace * ahead > MAX_WAIT_SHARE * deadline

    def _disturbed(
        self, host: VirtualHost, account: TrackedRequest, but: Container[str] = ()
    ) -> bool:
        """A fault of other kinds than `but` befell a host that has to do with it, in its time."""
        names = {router.name for router in self._world.of_role("router")}
        names |= {host.name, *(worker.name for worker in self._workers_of(account))}
        return self.causes.touched(names, account.began - _SETTLES, but=but)

    def _workers_of(self, account: TrackedRequest) -> list[VirtualHost]:
        """Workers of the request's model."""
        return [w for w in self._world.of_role("worker") if self._serves_model(w, account)]

    def _crowd(self, since: Seconds) -> int:
        """Other requests that have lived since then."""
        return len(self._world.accounts) + self.causes.ended_since(since)

    def _serves_model(self, worker: VirtualHost, account: TrackedRequest) -> bool:
        return worker.settings.model == account.request.model

    def _wrongly_poison(self, account: TrackedRequest, error: Poisoned) -> str:
        """Returns why poison is wrong; empty: it is right. Counts workers that died while they ran
        it, one after another and without a token, as far as a world can tell."""
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

    def _wrongly_nobody(self, host: VirtualHost, account: TrackedRequest) -> str:
        """Returns a worker that could have served the request; empty: there was none. One that died
        and was back between two looks was not fit all the time."""
        self._look()
        since = self._world.loop.time() - _FIT
        refused = () if account.accepted else {placed.worker for placed in account.placed}
        for (frontend, worker), begun in self._fit.items():
            if worker in refused:
                continue  # a new request is not brought back to who did not take it
            if max(self._deaths.get(worker, ()), default=-inf) > since:
                continue
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
        self._room = {w.name: self._room.get(w.name, now) for w in workers if _has_room(w)}

    def _hear(self, one: VirtualHost, other: VirtualHost) -> bool:
        """Both know each other, and nothing is between them."""
        if self._world.is_cut(one.name, other.name):
            return False
        return _knows(one, other) and _knows(other, one)


def _runs(host: VirtualHost) -> bool:
    return host.up and host.ready and host.process is not None and not host.process.paused


def _serves(host: VirtualHost) -> bool:
    part = host.part
    return (
        _runs(host)
        and isinstance(part, Worker)
        and part.service.mode != "prefill"
        and part.service.unready_reason() is None
        and not _is_full(part)
    )


def _is_full(worker: Worker) -> bool:
    return worker.engine.full


def _has_room(host: VirtualHost) -> bool:
    part = host.part
    assert isinstance(part, Worker)
    stats = part.engine.stats()
    return stats.running + stats.waiting < MAX_RUNNING


def _knows(one: VirtualHost, other: VirtualHost) -> bool:
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
