"""Every cell of both tables, reached and left by what really brings it about."""

from __future__ import annotations

import asyncio
import heapq
from typing import TYPE_CHECKING, Any, cast

import pytest

from pdserve.errors import EngineDied, TransferError, TransferRefused
from pdserve.ids import NodeId
from pdserve.messages.handoff import (
    LEASE,
    AttemptFailed,
    Held,
    Notify,
    OpenAttempt,
    Opened,
    Renew,
    Renewed,
    Taken,
    Withdraw,
)
from pdserve.messages.request import Finish, Started, TokenDelta
from pdserve.net.timers import Timers
from pdserve.observe.metrics import Metrics
from pdserve.runtime.methods import ATTEMPT_FAILED, NOTIFY, OPEN_ATTEMPT, RENEW
from pdserve.runtime.registry import Gone, Member
from pdserve.worker.handoff.choice import Chooser
from pdserve.worker.handoff.decode import Decode
from pdserve.worker.handoff.fence import SILENT
from pdserve.worker.handoff.prefill import Prefill
from pdserve.worker.handoff.table import (
    DECODE,
    PREFILL,
    Event,
    Machine,
    PrefillEvent,
    PrefillState,
    State,
)
from tests.worker.handoff.site import CAPABILITIES, CARD, Client, _handoff, _ticket, request

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

    def serve(self, method: Any, answer: Any) -> None: ...

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
        self.answers: list[object] = []

    def reply(self, message: object) -> None:
        self.answers.append(message)

    fail = reply


class Worker:
    """An engine that only remembers."""

    def __init__(self) -> None:
        self.capabilities = CAPABILITIES
        self.names_id = b""
        self.did: list[str] = []

    def cards(self) -> dict[str, Any]:
        return {"m": CARD}

    def unready_reason(self) -> None:
        return None

    def statistics(self) -> Any:
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
    feed = Machine.feed

    def looked(self: Any, event: Any) -> Any:
        seen.append((self.state, event))
        return feed(self, event)

    monkeypatch.setattr(Machine, "feed", looked)
    return seen


# ---------------------------------------------------------------- decode worker


class DecodeRig:
    """A request at a decode worker, in a state of choice."""

    def __init__(self, state: State) -> None:
        self.node = cast("Any", Node(NodeId("d")))
        self.worker = cast("Any", Worker())
        self.queue = Queue()
        self.chooser = Chooser("rule", min_tokens=10)
        self.decode = Decode(
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

    def happen(self, event: Event) -> None:
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

    def on_renew(self) -> None:
        held = Held(self.handle, self.attempt)
        answer = self.decode._renew(Renew((held,)), Call(RENEW, P1))  # type: ignore[arg-type]
        assert answer == Renewed()

    def on_notify(self) -> None:
        self.call = Call(NOTIFY, P1)
        words = Notify(self.handle, self.attempt, _handoff(request()))
        assert self.decode._notify(words, self.call) is None  # type: ignore[arg-type]
        assert self.call.answers == [Taken()]

    def on_failed(self) -> None:
        self.call = Call(ATTEMPT_FAILED, P1)
        words = AttemptFailed(self.handle, self.attempt, "EngineDied", "it died")
        assert self.decode._failed(words, self.call) is None  # type: ignore[arg-type]
        assert self.call.answers == [Taken()]

    def on_lapse(self) -> None:
        self.node.loop.advance(LEASE + 0.1)

    def on_died(self) -> None:
        del self.node.members[P1[0]]
        self.decode._on_member(Gone(Member(*P1, "", "worker"), "died"))

    def on_fence(self) -> None:
        self.decode._on_member(Gone(Member(NodeId("x"), 1, "", "router"), "own rejoin"))

    def on_first(self) -> None:
        started = Started(0, 0.0, 0.1, 0.1, 100)
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


WAYS: dict[State, tuple[Event, ...]] = {
    State.ADMIT: (),
    State.QUEUE: (Event.ADMITTED,),
    State.ATTEMPT: (Event.ADMITTED, Event.CLAIM),
    State.FILL: (Event.ADMITTED, Event.CLAIM, Event.OPENED),
    State.VERIFY: (Event.ADMITTED, Event.CLAIM, Event.OPENED, Event.NOTIFY),
    State.LOCAL: (Event.IMPATIENT,),
    State.ACTIVE: (Event.ADMITTED, Event.CLAIM, Event.OPENED, Event.NOTIFY, Event.FIRST),
}


@pytest.mark.parametrize(("state", "event"), DECODE.cells, ids=lambda one: one.name)
def test_every_cell_of_the_decode_worker(
    state: State, event: Event, visited: list[tuple[State, Event]]
) -> None:
    rig = DecodeRig(state)
    visited.clear()
    asked = rig.call
    rig.happen(event)
    assert visited == [(state, event)]
    waits = state is State.ATTEMPT and rig.remote.state is State.ATTEMPT and rig.attempt == 1
    assert asked is None or waits == (not asked.answers)
    cell = DECODE.cells[state, event]
    assert rig.remote.state is cell.next
    over = cell.next is State.RELEASED
    assert (len(rig.decode) == 0) == over
    if over:
        outcome = rig.client.error is not None or rig.client.ended == 1 or event is Event.CANCEL
        assert outcome
        rig.node.loop.advance(200.0)
        assert visited == [(state, event)], "a timer was left"


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (state, event)
        for state in (State.ADMIT, State.QUEUE, State.LOCAL, State.FILL)
        for event in (Event.RENEW, Event.NOTIFY, Event.FAILED)
    ],
)
def test_words_of_another_life_or_attempt_do_nothing(state: State, event: Event) -> None:
    rig = DecodeRig(state)
    stranger = (P1[0], P1[1] - 1)
    for by, attempt in ((stranger, rig.attempt), (P1, rig.attempt + 1), (P2, rig.attempt)):
        if event is Event.RENEW:
            held = Held(rig.handle, attempt)
            answer: Any = rig.decode._renew(Renew((held,)), Call(RENEW, by))  # type: ignore[arg-type]
            assert answer.over == (held,)
            continue
        call = Call(NOTIFY, by)
        words = Notify(rig.handle, attempt, _handoff(request()))
        if event is Event.NOTIFY:
            rig.decode._notify(words, call)  # type: ignore[arg-type]
        else:
            failed = AttemptFailed(rig.handle, attempt, "EngineDied", "it died")
            rig.decode._failed(failed, call)  # type: ignore[arg-type]
        assert call.answers == [Taken(current=False)]
    assert rig.remote.state is state


def test_three_attempts_and_then_it_is_prefilled_here() -> None:
    rig = DecodeRig(State.QUEUE)
    for _ in range(3):
        rig.ask(P1)
        rig.on_opened()
        rig.on_lost()
    assert rig.remote.state is State.LOCAL
    assert rig.queue.rounds == [0, 1, 2]
    assert rig.worker.did[-1] == "prefill_here"
    assert rig.decode.numbers().local == {"attempts_failed": 1}
    assert rig.decode.numbers().ended == {"lost": 3}


def test_an_attempt_that_is_renewed_for_ever_ends_all_the_same() -> None:
    rig = DecodeRig(State.FILL)
    rig.client.request = request()
    rig.remote._deadline = None
    for _ in range(58):
        rig.node.loop.advance(1.0)
        if rig.remote.state is not State.FILL:
            break
        rig.on_renew()
    rig.node.loop.advance(3.0)
    assert rig.remote.state is not State.FILL


def test_a_claim_of_the_past_opens_nothing() -> None:
    rig = DecodeRig(State.QUEUE)
    for owner, epoch, round in (
        (ROUTER[0], ROUTER[1] - 1, 0),
        (NodeId("other"), ROUTER[1], 0),
        (*ROUTER, 1),
    ):
        question = OpenAttempt(request=rig.handle, round=round, owner=owner, owner_epoch=epoch)
        call = Call(OPEN_ATTEMPT, P1)
        rig.decode._open(question, call)  # type: ignore[arg-type]
        assert type(call.answers[0]).__name__ == "TransferRefused"
    assert rig.remote.state is State.QUEUE


def test_while_an_attempt_is_open_and_alive_there_is_no_second() -> None:
    rig = DecodeRig(State.FILL)
    rig.node.loop.advance(SILENT - 0.1)
    rig.ask(P2)
    assert rig.call is not None
    assert "attempt 1 of p1 is open" in str(rig.call.answers[0])
    del rig.node.members[P1[0]]
    rig.ask(P2)
    assert rig.remote.state is State.ATTEMPT
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

        self.prefill = Prefill(self.node, self.worker, claims, lambda names: 0, Metrics())
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
        self.one._take(Opened(attempt=1, ticket=_ticket(1, 1, asked), request=asked), 100.0)

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
        assert self.prefill._withdrawn(Withdraw(1, 1), call) == Taken()

    def on_unclaimed(self) -> None:
        self.stop(self.claim)

    def on_lapse(self) -> None:
        self.node.loop.advance(LEASE + 0.1)

    def on_died(self) -> None:
        self.prefill._on_member(Gone(Member(*D, "", "worker"), "died"))

    def on_fence(self) -> None:
        self.prefill._on_member(Gone(Member(NodeId("x"), 1, "", "router"), "own rejoin"))


_OPEN = (PrefillEvent.LINKED, PrefillEvent.OPENED)
PREFILL_WAYS: dict[PrefillState, tuple[PrefillEvent, ...]] = {
    PrefillState.CLAIMED: (),
    PrefillState.OPENING: (PrefillEvent.LINKED,),
    PrefillState.COMPUTING: _OPEN,
    PrefillState.NOTIFYING: (*_OPEN, PrefillEvent.PREFILLED),
    PrefillState.NOTIFIED: (*_OPEN, PrefillEvent.PREFILLED, PrefillEvent.TAKEN),
    PrefillState.SENT: (*_OPEN, PrefillEvent.PREFILLED, PrefillEvent.SENT),
}


@pytest.mark.parametrize(("state", "event"), PREFILL.cells, ids=lambda one: one.name)
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
    cell = PREFILL.cells[state, event]
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
        assert rig.prefill._withdrawn(Withdraw(1, attempt), call) == Taken(current=False)
    assert rig.one.state is PrefillState.COMPUTING


def test_an_attempt_that_is_over_before_its_opening_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = PrefillRig(PrefillState.OPENING, monkeypatch)
    call: Any = Call(RENEW, D)
    assert rig.prefill._withdrawn(Withdraw(1, 1), call) == Taken()
    assert rig.prefill._withdrawn(Withdraw(2, 1), call) == Taken(current=False)
    rig.on_opened()
    assert rig.claim.ends == ["refused"]
    assert "prefill" not in rig.worker.did


def test_workers_of_another_format_are_turned_away() -> None:
    rig = DecodeRig(State.QUEUE)
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
        with pytest.raises(TransferRefused, match="ours is another"):
            rig.decode._open(question, call)
    assert rig.remote.state is State.QUEUE


@pytest.mark.parametrize("state", [State.ATTEMPT, State.FILL])
def test_the_same_worker_with_another_claim_is_another(state: State) -> None:
    """Its stream to the router broke, and the router gave it the item once more."""
    rig = DecodeRig(state)
    rig.ask(P1, claim=8)
    assert rig.call is not None
    assert "attempt 1 of p1 is open" in str(rig.call.answers[0])
    assert rig.remote.state is state
