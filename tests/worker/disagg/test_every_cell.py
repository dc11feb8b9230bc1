"""Every cell of both tables, reached and left by what really brings it about."""

from __future__ import annotations

import asyncio
import heapq
from typing import TYPE_CHECKING, Any, cast

import pytest

from pdserve.errors import (
    EngineDied,
    NotReady,
    Overloaded,
    PdserveError,
    TransferError,
    TransferRefused,
)
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.handoff import (
    LEASE_SECONDS,
    AttemptAck,
    AttemptFailed,
    AttemptOpened,
    HeldAttempt,
    LeasesRenewed,
    NotifyHandoff,
    OpenAttempt,
    RenewLeases,
    WithdrawAttempt,
)
from pdserve.messages.request import Finish, FirstTokenStats, TokenDelta
from pdserve.net.timers import Timers
from pdserve.observe.metrics import Metrics
from pdserve.runtime.registry import Member, MemberGone
from pdserve.runtime.rpc_methods import ATTEMPT_FAILED, NOTIFY, OPEN_ATTEMPT, RENEW
from pdserve.worker.disagg.decode_handler import DecodeHandler
from pdserve.worker.disagg.fence import SILENT
from pdserve.worker.disagg.policy import DisaggPolicy
from pdserve.worker.disagg.prefill_handler import PrefillHandler
from pdserve.worker.disagg.state_table import (
    DECODE_TABLE,
    PREFILL_TABLE,
    DecodeEvent,
    DecodeState,
    PrefillEvent,
    PrefillState,
    StateMachine,
)
from tests.worker.disagg.cluster import CAPABILITIES, CARD, Client, _handoff, _ticket, request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROUTER = (NodeId("router"), 5)
P1, P2, D = (NodeId("p1"), 11), (NodeId("p2"), 12), (NodeId("d"), 13)


class Loop:
    """Timers that go off when told."""

    def __init__(self) -> None:
        self.now = 100.0
        self._due: list[tuple[float, int, Any]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> Any:
        handle = type("Handle", (), {"cancelled": False})()
        handle.cancel = lambda: setattr(handle, "cancelled", True)
        handle.callback = callback
        heapq.heappush(self._due, (when, id(handle), handle))
        return handle

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self._due and self._due[0][0] <= until:
            when, _, handle = heapq.heappop(self._due)
            self.now = max(self.now, when)
            if not handle.cancelled:
                handle.callback()
        self.now = until


class Node:
    """As much of a node as the drivers see."""

    def __init__(self, name: NodeId) -> None:
        self.id = name
        self.epoch = 1
        self.loop = Loop()
        self.timers = Timers(self.loop)
        self.now = self.loop.time
        self.members: dict[NodeId, Member] = {
            node: Member(node, epoch, "", "worker") for node, epoch in (P1, P2, D)
        }
        self.spawned: list[str] = []
        self.registry = self
        self.tasks = self
        self.closed = False

    def get(self, node: NodeId) -> Member | None:
        return self.members.get(node)

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members.values())

    def host(self, actor: object) -> None: ...

    def on_member(self, listener: Any) -> Callable[[], None]:
        return lambda: None

    def call_soon(self, callback: Callable[[], None]) -> None: ...

    def spawn(self, work: Any, name: str) -> None:
        work.close()
        self.spawned.append(name)


class Call:
    """A peer's question."""

    def __init__(self, method: Any, by: tuple[NodeId, int]) -> None:
        self.method = method.id
        self.link = self
        self.peer = self
        self.node, self.epoch = by
        self.life = NodeLife(*by)
        self.answers: list[object] = []

    def reply(self, message: object) -> None:
        self.answers.append(message)

    fail = reply


class Worker:
    """A worker whose engine, itself, only remembers."""

    def __init__(self) -> None:
        self.capabilities = CAPABILITIES
        self.engine = self
        self.names_id = b""
        self.did: list[str] = []

    def cards(self) -> dict[str, Any]:
        return {"m": CARD}

    def unready_reason(self) -> None:
        return None

    def stats(self) -> Any:
        from pdserve.messages.engine import EngineStats

        return EngineStats()

    def paths(self) -> list[Any]:
        return []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def does(*arguments: Any) -> int:
            self.did.append(name)
            return 1

        return does


class Queue:
    """One that takes everything, or nothing."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.rounds: list[int] = []
        self.refuses = False

    def state(self, model: str) -> Any:
        from pdserve.messages.handoff import QueueState

        return QueueState(workers=1, credits=1)

    def enqueue(self, item: Any, listener: Any) -> None:
        self.did.append("enqueue")
        self.rounds.append(item.round)
        listener.on_owner(*ROUTER, item.round)
        if self.refuses:
            listener.on_refused("no_worker")

    def opened(self, request: int) -> None:
        self.did.append("opened")

    def cancel(self, request: int) -> None:
        self.did.append("cancel")

    def close(self) -> None: ...


@pytest.fixture
def visited(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    seen: list[tuple[Any, Any]] = []
    feed = StateMachine.feed

    def looked(self: Any, event: Any) -> Any:
        seen.append((self.state, event))
        return feed(self, event)

    monkeypatch.setattr(StateMachine, "feed", looked)
    return seen


# ---------------------------------------------------------------- decode worker


class DecodeRig:
    """A request at a decode worker, in a state of choice."""

    def __init__(self, state: DecodeState) -> None:
        self.node = cast("Any", Node(NodeId("d")))
        self.worker = cast("Any", Worker())
        self.queue = Queue()
        self.chooser = DisaggPolicy("rule", min_tokens=10)
        self.decode = DecodeHandler(
            self.node, self.worker, self.queue, self.chooser, lambda names: 0, Metrics()
        )
        self.client = Client(request(deadline=50.0))
        self.handle = self.decode.submit(self.client.request, self.client)
        self.remote = self.decode._remote[self.handle]
        self.call: Call | None = None
        for event in WAYS[state]:
            self.happen(event)
        assert self.remote.state is state

    @property
    def attempt(self) -> int:
        return self.remote.fence.attempts

    def ask(self, by: tuple[NodeId, int], *, round: int | None = None, claim: int = 7) -> None:
        question = OpenAttempt(
            request=self.handle,
            round=self.queue.rounds[-1] if round is None else round,
            owner=ROUTER[0],
            owner_epoch=ROUTER[1],
            claim=claim,
        )
        self.call = Call(OPEN_ATTEMPT, by)
        self.decode._open(question, self.call)  # type: ignore[arg-type]

    def happen(self, event: DecodeEvent) -> None:
        getattr(self, f"on_{event.name.lower()}")()

    def on_admitted(self) -> None:
        self.remote.on_admitted(0)

    def on_refused(self) -> None:
        self.remote.on_refused("displaced")

    def on_impatient(self) -> None:
        self.node.loop.advance(3.0)

    def on_claim(self) -> None:
        if self.remote.fence.holder is None:
            self.ask(P1)
        else:
            self.node.loop.advance(SILENT)
            self.ask(P2)

    def on_again(self) -> None:
        self.ask(P1)

    def on_stale(self) -> None:
        self.ask(P2, round=99)

    def on_opened(self) -> None:
        self.remote.on_opened(self.attempt, _ticket(self.handle, self.attempt, request()))

    def on_lost(self) -> None:
        self.remote.on_attempt_lost(self.attempt, TransferError("the path ended"))

    def on_hindered(self) -> None:
        error = Overloaded("no KV blocks were free for it within 2 s", retry_after=1.0)
        self.remote.on_attempt_lost(self.attempt, error)

    def on_renew(self) -> None:
        held = HeldAttempt(self.handle, self.attempt)
        answer = self.decode._renew(RenewLeases((held,)), Call(RENEW, P1))  # type: ignore[arg-type]
        assert answer == LeasesRenewed()

    def on_notify(self) -> None:
        self.call = Call(NOTIFY, P1)
        words = NotifyHandoff(self.handle, self.attempt, _handoff(request()))
        assert self.decode._notify(words, self.call) is None  # type: ignore[arg-type]
        assert self.call.answers == [AttemptAck()]

    def on_failed(self) -> None:
        self.call = Call(ATTEMPT_FAILED, P1)
        words = AttemptFailed(self.handle, self.attempt, "EngineDied", "it died")
        assert self.decode._failed(words, self.call) is None  # type: ignore[arg-type]
        assert self.call.answers == [AttemptAck()]

    def on_lapse(self) -> None:
        self.node.loop.advance(LEASE_SECONDS + 0.1)

    def on_died(self) -> None:
        del self.node.members[P1[0]]
        self.decode._on_member(MemberGone(Member(*P1, "", "worker"), "died"))

    def on_fence(self) -> None:
        self.decode._on_member(MemberGone(Member(NodeId("x"), 1, "", "router"), "own rejoin"))

    def on_first(self) -> None:
        started = FirstTokenStats(0, 0.0, 0.1, 0.1, 100)
        self.remote.on_delta(TokenDelta(handle=self.handle, choice=0, tokens=[1], started=started))

    def on_done(self) -> None:
        finish = Finish(reason="length")
        self.remote.on_delta(TokenDelta(handle=self.handle, choice=0, tokens=[], finish=finish))

    def on_error(self) -> None:
        self.remote.on_error(EngineDied("it died"))

    def on_expire(self) -> None:
        self.remote._expired()  # before its lease, for all that is known

    def on_cancel(self) -> None:
        self.decode.abort(self.handle)


WAYS: dict[DecodeState, tuple[DecodeEvent, ...]] = {
    DecodeState.ADMIT: (),
    DecodeState.QUEUE: (DecodeEvent.ADMITTED,),
    DecodeState.ATTEMPT: (DecodeEvent.ADMITTED, DecodeEvent.CLAIM),
    DecodeState.FILL: (DecodeEvent.ADMITTED, DecodeEvent.CLAIM, DecodeEvent.OPENED),
    DecodeState.VERIFY: (
        DecodeEvent.ADMITTED,
        DecodeEvent.CLAIM,
        DecodeEvent.OPENED,
        DecodeEvent.NOTIFY,
    ),
    DecodeState.LOCAL: (DecodeEvent.IMPATIENT,),
    DecodeState.ACTIVE: (
        DecodeEvent.ADMITTED,
        DecodeEvent.CLAIM,
        DecodeEvent.OPENED,
        DecodeEvent.NOTIFY,
        DecodeEvent.FIRST,
    ),
}


@pytest.mark.parametrize(("state", "event"), DECODE_TABLE.cells, ids=lambda one: one.name)
def test_every_cell_of_the_decode_worker(
    state: DecodeState, event: DecodeEvent, visited: list[tuple[DecodeState, DecodeEvent]]
) -> None:
    rig = DecodeRig(state)
    visited.clear()
    asked = rig.call
    rig.happen(event)
    assert visited == [(state, event)]
    waits = (
        state is DecodeState.ATTEMPT
        and rig.remote.state is DecodeState.ATTEMPT
        and rig.attempt == 1
    )
    assert asked is None or waits == (not asked.answers)
    cell = DECODE_TABLE.cells[state, event]
    assert rig.remote.state is cell.next
    over = cell.next is DecodeState.RELEASED
    assert (len(rig.decode) == 0) == over
    if over:
        outcome = (
            rig.client.error is not None or rig.client.ended == 1 or event is DecodeEvent.CANCEL
        )
        assert outcome
        rig.node.loop.advance(200.0)
        assert visited == [(state, event)], "a timer was left"


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (state, event)
        for state in (DecodeState.ADMIT, DecodeState.QUEUE, DecodeState.LOCAL, DecodeState.FILL)
        for event in (DecodeEvent.RENEW, DecodeEvent.NOTIFY, DecodeEvent.FAILED)
    ],
)
def test_words_of_another_life_or_attempt_do_nothing(
    state: DecodeState, event: DecodeEvent
) -> None:
    rig = DecodeRig(state)
    stranger = (P1[0], P1[1] - 1)
    for by, attempt in ((stranger, rig.attempt), (P1, rig.attempt + 1), (P2, rig.attempt)):
        if event is DecodeEvent.RENEW:
            held = HeldAttempt(rig.handle, attempt)
            answer: Any = rig.decode._renew(RenewLeases((held,)), Call(RENEW, by))  # type: ignore[arg-type]
            assert answer.over == (held,)
            continue
        call = Call(NOTIFY, by)
        words = NotifyHandoff(rig.handle, attempt, _handoff(request()))
        if event is DecodeEvent.NOTIFY:
            rig.decode._notify(words, call)  # type: ignore[arg-type]
        else:
            failed = AttemptFailed(rig.handle, attempt, "EngineDied", "it died")
            rig.decode._failed(failed, call)  # type: ignore[arg-type]
        assert call.answers == [AttemptAck(current=False)]
    assert rig.remote.state is state


def test_three_attempts_and_then_it_is_prefilled_here() -> None:
    rig = DecodeRig(DecodeState.QUEUE)
    for _ in range(3):
        rig.ask(P1)
        rig.on_opened()
        rig.on_lost()
    assert rig.remote.state is DecodeState.LOCAL
    assert rig.queue.rounds == [0, 1, 2]
    assert rig.worker.did[-1] == "prefill_here"
    assert rig.decode.numbers().local == {"attempts_failed": 1}
    assert rig.decode.numbers().ended == {"lost": 3}


@pytest.mark.parametrize(
    "error", [Overloaded("no KV blocks", retry_after=1.0), NotReady("the pool is being registered")]
)
def test_a_cause_at_this_worker_blames_no_prefill_worker(error: PdserveError) -> None:
    rig = DecodeRig(DecodeState.ATTEMPT)
    del rig.node.members[P2[0]]  # p1 is the only one that could be asked
    for _ in range(5):
        rig.remote.on_attempt_lost(rig.attempt, error)
        assert rig.remote.state.value == "admit"
        rig.on_admitted()
        assert rig.remote.state.value == "queue"
        rig.on_claim()
    assert rig.remote._excluded == []
    assert "prefill_here" not in rig.worker.did
    assert rig.decode.numbers().ended == {"hindered": 5}


def test_a_cause_at_this_worker_is_waited_for_within_a_bound() -> None:
    rig = DecodeRig(DecodeState.ATTEMPT)
    for _ in range(20):
        rig.on_hindered()
        rig.node.loop.advance(1.0)
        if rig.remote.state is DecodeState.LOCAL:
            break
        rig.on_admitted()
        rig.on_claim()
    assert rig.remote.state is DecodeState.LOCAL
    assert rig.decode.numbers().local == {"no_room": 1}


def test_room_that_is_found_again_for_an_attempt_that_was_given_up_changes_nothing() -> None:
    rig = DecodeRig(DecodeState.ATTEMPT)
    rig.on_died()
    rig.remote.on_attempt_lost(1, Overloaded("no KV blocks", retry_after=1.0))  # on its way then
    rig.on_admitted()
    assert rig.remote.state is DecodeState.QUEUE


def test_an_attempt_that_is_renewed_for_ever_ends_all_the_same() -> None:
    rig = DecodeRig(DecodeState.FILL)
    no_deadline(rig)
    for _ in range(58):
        rig.node.loop.advance(1.0)
        if rig.remote.state is not DecodeState.FILL:
            break
        rig.on_renew()
    rig.node.loop.advance(3.0)
    assert rig.remote.state is not DecodeState.FILL


def no_deadline(rig: DecodeRig) -> None:
    rig.remote._deadline = None
    assert rig.remote._expiry is not None
    rig.remote._expiry.cancel()


def test_an_attempt_with_progress_is_not_ended_by_its_age() -> None:
    rig = DecodeRig(DecodeState.FILL)
    no_deadline(rig)
    learnt = rig.chooser.learnt.there.observed
    for tokens in range(300):
        rig.node.loop.advance(1.0)
        held = HeldAttempt(rig.handle, rig.attempt)
        words = RenewLeases((held,), (50 * (tokens // 20),))  # a chunk takes twenty seconds
        assert rig.decode._renew(words, Call(RENEW, P1)) == LeasesRenewed()  # type: ignore[arg-type]
    assert rig.remote.state is DecodeState.FILL
    assert rig.chooser.learnt.there.observed == learnt


def test_a_lapse_at_the_age_limit_teaches_the_prediction() -> None:
    rig = DecodeRig(DecodeState.FILL)
    no_deadline(rig)
    before = rig.remote._decision.there
    while rig.remote.state is DecodeState.FILL:
        rig.node.loop.advance(1.0)
        if rig.remote.state is DecodeState.FILL:
            rig.on_renew()
    assert rig.chooser.learnt.there.observed == 1
    assert rig.chooser.learnt.there(1000) > before
    assert rig.remote._decision.there > 5.0, "the next attempt is given more time"


def test_a_worker_that_fell_silent_teaches_nothing() -> None:
    rig = DecodeRig(DecodeState.FILL)
    rig.on_lapse()
    assert rig.chooser.learnt.there.observed == 0


def test_a_claim_of_the_past_opens_nothing() -> None:
    rig = DecodeRig(DecodeState.QUEUE)
    for owner, epoch, round in (
        (ROUTER[0], ROUTER[1] - 1, 0),
        (NodeId("other"), ROUTER[1], 0),
        (*ROUTER, 1),
    ):
        question = OpenAttempt(request=rig.handle, round=round, owner=owner, owner_epoch=epoch)
        call = Call(OPEN_ATTEMPT, P1)
        rig.decode._open(question, call)  # type: ignore[arg-type]
        assert type(call.answers[0]).__name__ == "TransferRefused"
    assert rig.remote.state is DecodeState.QUEUE


def test_while_an_attempt_is_open_and_alive_there_is_no_second() -> None:
    rig = DecodeRig(DecodeState.FILL)
    rig.node.loop.advance(SILENT - 0.1)
    rig.ask(P2)
    assert rig.call is not None
    assert "attempt 1 of p1 is open" in str(rig.call.answers[0])
    del rig.node.members[P1[0]]
    rig.ask(P2)
    assert rig.remote.state is DecodeState.ATTEMPT
    assert rig.attempt == 2


# ---------------------------------------------------------------- prefill worker


class FakeClaim:
    def __init__(self) -> None:
        from pdserve.messages.handoff import PrefillItem

        self.item = PrefillItem(request=1, round=0, model="m", prompt_tokens=100)
        self.number = 1
        self.decode, self.decode_epoch = D
        self.owner, self.owner_epoch = ROUTER
        self.ends: list[str] = []

    def opened(self) -> None: ...

    def end(self, outcome: str) -> None:
        self.ends.append(outcome)


class PrefillRig:
    """A claim at a prefill worker, in a state of choice."""

    def __init__(self, state: PrefillState, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(asyncio, "current_task", lambda: None)
        self.node = cast("Any", Node(NodeId("p1")))
        self.worker = cast("Any", Worker())
        offers = type("Offers", (), {"offer": lambda *a: None, "close": lambda s: None})()

        def claims(take: Any, stop: Any) -> Any:
            self.take, self.stop = take, stop
            return offers

        self.prefill = PrefillHandler(self.node, self.worker, claims, lambda names: 0, Metrics())
        self.claim = FakeClaim()
        self.take(self.claim)
        self.one = next(iter(self.prefill._claims.values()))
        for event in PREFILL_WAYS[state]:
            self.happen(event)
        assert self.one.state is state

    def happen(self, event: PrefillEvent) -> None:
        getattr(self, f"on_{event.name.lower()}")()

    def on_linked(self) -> None:
        self.one.feed(PrefillEvent.LINKED)

    def on_opened(self) -> None:
        asked = request()
        self.one._take(AttemptOpened(attempt=1, ticket=_ticket(1, 1, asked), request=asked), 100.0)

    def on_refused(self) -> None:
        self.one.feed(PrefillEvent.REFUSED)

    def on_unreached(self) -> None:
        self.one.feed(PrefillEvent.UNREACHED)

    def on_prefilled(self) -> None:
        self.one.on_prefilled(_handoff(request()))

    def on_sent(self) -> None:
        self.one.on_sent()

    def on_error(self) -> None:
        self.one.on_error(EngineDied("it died"))

    def on_taken(self) -> None:
        self.one.feed(PrefillEvent.TAKEN)

    def on_not_taken(self) -> None:
        self.one.feed(PrefillEvent.NOT_TAKEN)

    def on_over(self) -> None:
        call: Any = Call(RENEW, D)
        assert self.prefill._withdrawn(WithdrawAttempt(1, 1), call) == AttemptAck()

    def on_unclaimed(self) -> None:
        self.stop(self.claim)

    def on_lapse(self) -> None:
        self.node.loop.advance(LEASE_SECONDS + 0.1)

    def on_died(self) -> None:
        self.prefill._on_member(MemberGone(Member(*D, "", "worker"), "died"))

    def on_fence(self) -> None:
        self.prefill._on_member(MemberGone(Member(NodeId("x"), 1, "", "router"), "own rejoin"))


_OPEN = (PrefillEvent.LINKED, PrefillEvent.OPENED)
PREFILL_WAYS: dict[PrefillState, tuple[PrefillEvent, ...]] = {
    PrefillState.CLAIMED: (),
    PrefillState.OPENING: (PrefillEvent.LINKED,),
    PrefillState.COMPUTING: _OPEN,
    PrefillState.NOTIFYING: (*_OPEN, PrefillEvent.PREFILLED),
    PrefillState.NOTIFIED: (*_OPEN, PrefillEvent.PREFILLED, PrefillEvent.TAKEN),
    PrefillState.SENT: (*_OPEN, PrefillEvent.PREFILLED, PrefillEvent.SENT),
}


@pytest.mark.parametrize(("state", "event"), PREFILL_TABLE.cells, ids=lambda one: one.name)
def test_every_cell_of_the_prefill_worker(
    state: PrefillState,
    event: PrefillEvent,
    visited: list[tuple[PrefillState, PrefillEvent]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = PrefillRig(state, monkeypatch)
    visited.clear()
    rig.happen(event)
    assert visited == [(state, event)]
    cell = PREFILL_TABLE.cells[state, event]
    assert rig.one.state is cell.next
    over = cell.next is PrefillState.ENDED
    assert len(rig.claim.ends) == over
    assert (len(rig.prefill) == 0) == over
    if over:
        assert not rig.prefill._renewals
        rig.node.loop.advance(200.0)
        assert visited == [(state, event)], "a timer was left"
    tells = [action.value for action in cell.actions if action.value == "tell"]
    assert ("tell of a failure" in rig.node.spawned) == bool(tells)


def test_words_of_another_decode_worker_stop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = PrefillRig(PrefillState.COMPUTING, monkeypatch)
    for by, attempt in ((P2, 1), ((D[0], D[1] + 1), 1), (D, 2)):
        call: Any = Call(RENEW, by)
        assert rig.prefill._withdrawn(WithdrawAttempt(1, attempt), call) == AttemptAck(
            current=False
        )
    assert rig.one.state is PrefillState.COMPUTING


def test_an_attempt_that_is_over_before_its_opening_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = PrefillRig(PrefillState.OPENING, monkeypatch)
    call: Any = Call(RENEW, D)
    assert rig.prefill._withdrawn(WithdrawAttempt(1, 1), call) == AttemptAck()
    assert rig.prefill._withdrawn(WithdrawAttempt(2, 1), call) == AttemptAck(current=False)
    rig.on_opened()
    assert rig.claim.ends == ["refused"]
    assert "prefill" not in rig.worker.did


def test_workers_of_another_format_are_turned_away() -> None:
    rig = DecodeRig(DecodeState.QUEUE)
    for model, compat_hash in (("m", "other"), ("n", "same")):
        question = OpenAttempt(
            request=rig.handle,
            round=0,
            owner=ROUTER[0],
            owner_epoch=ROUTER[1],
            model=model,
            compat_hash=compat_hash,
        )
        call: Any = Call(OPEN_ATTEMPT, P1)
        with pytest.raises(TransferRefused, match="not compatible"):
            rig.decode._open(question, call)
    assert rig.remote.state is DecodeState.QUEUE


@pytest.mark.parametrize("state", [DecodeState.ATTEMPT, DecodeState.FILL])
def test_the_same_worker_with_another_claim_is_another(state: DecodeState) -> None:
    """Its stream to the router broke, and the router gave it the item once more."""
    rig = DecodeRig(state)
    rig.ask(P1, claim=8)
    assert rig.call is not None
    assert "attempt 1 of p1 is open" in str(rig.call.answers[0])
    assert rig.remote.state is state


def test_an_engine_that_computes_what_came_before_is_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pdserve.messages.engine import EngineStats

    rig = PrefillRig(PrefillState.COMPUTING, monkeypatch)
    rig.worker.stats = lambda: EngineStats(computed_tokens=700, sent_blocks=3)
    assert rig.one.progress == 700
    rig.on_prefilled()
    assert rig.one.progress == 3
