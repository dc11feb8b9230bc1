"""Requests and the life of a connection: every question ends once, with its own answer."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import (
    Cancelled,
    HandshakeRefused,
    LinkLost,
    NoWorker,
    Overloaded,
    PayloadTooLarge,
    ProtocolError,
)
from pdserve.wire import events as ev
from pdserve.wire.codec import encode
from pdserve.wire.flow import BodyBudget
from pdserve.wire.handshake import HandshakeRefusalReason
from pdserve.wire.header import HEADER, HEADER_BYTES, FrameFlag, FrameKind
from pdserve.wire.limits import LARGE, Limits
from pdserve.wire.protocol import Connection, ConnectionState, GoAway, GoAwayCode
from tests.wire.support import acceptor, asked, dialler, move, only, pair, shake, taken


def frame(
    kind: int, body: bytes = b"", *, flags: int = 0, stream: int = 0, value: int = 0
) -> bytes:
    return HEADER.pack(len(body), kind, flags, 0, stream, value) + body


def violation(connection, data: bytes) -> ProtocolError:
    """The error that `data` leads to."""
    *_, last = connection.receive_data(data)
    assert isinstance(last, ev.ProtocolViolated)
    assert connection.state is ConnectionState.ENDED
    assert isinstance(last.error, ProtocolError)
    return last.error


# ---------------------------------------------------------------------- requests


def test_a_request_and_its_answer() -> None:
    d, a = pair()
    call = d.send_request(7, b"question", 1500, "context")
    assert d.pending == 1
    assert asked(only(move(d, a), ev.RequestsReceived)) == (call, 7, 1500, b"question")
    assert a.serving == 1
    assert a.respond(call, b"answer")
    assert only(move(a, d), ev.AnswersReceived).answers == [("context", b"answer")]
    assert d.busy == a.busy == 0
    assert not a.respond(call, b"again")
    assert not a.fail(call, ValueError())


def test_both_sides_may_ask_at_once() -> None:
    d, a = pair()
    ours, theirs = d.send_request(1, b"d", 9, "d"), a.send_request(2, b"a", 9, "a")
    assert ours != theirs
    at_a, at_d = only(move(d, a), ev.RequestsReceived), only(move(a, d), ev.RequestsReceived)
    a.respond(asked(at_a)[0], b"to d")
    d.respond(asked(at_d)[0], b"to a")
    assert only(move(a, d), ev.AnswersReceived).answers == [("d", b"to d")]
    assert only(move(d, a), ev.AnswersReceived).answers == [("a", b"to a")]


def test_requests_in_one_read_come_in_runs_and_in_order() -> None:
    d, a = pair()
    for method in range(3):
        d.send_request(method, b"", 9, method)
    d.send_tell(9, b"in between")
    d.send_request(3, b"", 9, 3)
    first, told, second = move(d, a)
    assert [request[1] for request in first.requests] == [0, 1, 2]
    assert told.method == 9
    assert [request[1] for request in second.requests] == [3]


def test_an_error_ends_a_request() -> None:
    d, a = pair()
    call = d.send_request(7, b"", 9, "context")
    move(d, a)
    a.fail(call, NoWorker("none", retry_after=3.0))
    failed = only(move(a, d), ev.RequestFailed)
    assert failed.context == "context"
    assert isinstance(failed.error, NoWorker)
    assert failed.error.retry_after == 3.0
    assert d.pending == 0


def test_a_cancelled_request_keeps_its_slot_until_the_peer_confirms() -> None:
    d, a = pair()
    call = d.send_request(7, b"", 9, "first")
    move(d, a)
    d.cancel(call)
    d.cancel(call)
    assert d.pending == 1
    other = d.send_request(7, b"", 9, "second")
    assert other & 0xFFFF != call & 0xFFFF
    cancelled, again = move(d, a)
    assert cancelled.stream == call
    assert asked(again)[0] == other
    assert not a.respond(call, b"too late")
    assert move(a, d) == []
    assert d.pending == 1
    third = d.send_request(7, b"", 9, "third")
    assert third & 0xFFFF == call & 0xFFFF
    assert third != call


def test_an_answer_that_crosses_its_cancellation_is_dropped() -> None:
    d, a = pair()
    call = d.send_request(7, b"", 9, "first")
    move(d, a)
    a.respond(call, b"answer")
    d.cancel(call)
    assert move(d, a) == [], "the peer has said its last word"
    assert move(a, d) == []
    assert d.busy == a.busy == 0


def test_cancelling_what_was_answered_does_nothing() -> None:
    d, a = pair()
    call = d.send_request(7, b"", 9, "first")
    move(d, a)
    a.respond(call, b"")
    move(a, d)
    d.cancel(call)
    assert taken(d) == b""


def test_slots_are_reused_but_ids_are_not() -> None:
    d, a = pair()
    seen = set()
    for number in range(1000):
        call = d.send_request(7, b"", 9, number)
        assert call not in seen
        seen.add(call)
        move(d, a)
        a.respond(call, b"")
        assert only(move(a, d), ev.AnswersReceived).answers[0][0] == number
    assert len({call & 0xFFFF for call in seen}) == 1


# ---------------------------------------------------------------------- bounds


def test_too_many_requests_are_refused_on_both_sides() -> None:
    d, a = pair(Limits(pending=2, streams=1), Limits(incoming=1, streams=1))
    first, _ = d.send_request(1, b"", 9, "first"), d.send_request(2, b"", 9, "second")
    with pytest.raises(Overloaded):
        d.send_request(3, b"", 9, "third")
    assert asked(only(move(d, a), ev.RequestsReceived))[0] == first
    failed = only(move(a, d), ev.RequestFailed)
    assert failed.context == "second"
    assert isinstance(failed.error, Overloaded)


ROOMY = Limits(asked=3 << 20, asked_least=1 << 20, unsent=64 << 20)
"""Of one peer."""


def send_body(d: Connection, a: Connection, size: int) -> list[Any]:
    """A request with such a body: what the peer reports, and what becomes of it if refused."""
    d.send_request(1, bytes(size), 9, size)
    return move(d, a) + move(a, d)


def test_bodies_of_requests_have_a_budget_per_peer() -> None:
    d, a = pair(ROOMY)
    calls = [asked(only(send_body(d, a, 1 << 20), ev.RequestsReceived))[0] for _ in range(3)]
    assert a.asked_bytes == 3 << 20
    failed = only(send_body(d, a, 1), ev.RequestFailed)
    assert isinstance(failed.error, Overloaded)
    assert "hold 3145728 bytes" in failed.error.message
    a.respond(calls[0], b"")
    a.fail(calls[1], Overloaded("x"))
    move(a, d)
    assert a.asked_bytes == 1 << 20
    only(send_body(d, a, 1 << 20), ev.RequestsReceived)
    a.abandon()
    assert a.asked_bytes == 0


def test_bodies_of_requests_have_a_budget_per_node_and_each_peer_its_own_share() -> None:
    node = BodyBudget(4 << 20)
    peers = [shared_pair(node) for _ in range(3)]
    for d, a in peers[:2]:
        for _ in range(2):
            only(send_body(d, a, 1 << 20), ev.RequestsReceived)
    d, a = peers[0]
    assert "of all peers" in only(send_body(d, a, 1 << 20), ev.RequestFailed).error.message
    d, a = peers[2]
    only(send_body(d, a, 1 << 20), ev.RequestsReceived)  # what it has to itself
    assert isinstance(only(send_body(d, a, 1), ev.RequestFailed).error, Overloaded)
    assert (node.used, node.refused) == (5 << 20, 2)
    for _, a in peers:
        a.abandon()
    assert node.used == 0


def shared_pair(node: BodyBudget) -> tuple[Connection, Connection]:
    d, a = dialler(limits=ROOMY), acceptor(limits=ROOMY, bodies=node)
    shake(d, a)
    return d, a


def test_the_limits_given_at_admission_are_the_ones_that_hold() -> None:
    d, a = dialler(), acceptor()
    a.receive_data(taken(d))
    d.receive_data(taken(a))
    a.receive_data(taken(d))
    a.accept(limits=Limits(pending=1, incoming=1))
    d.receive_data(taken(a))
    a.send_request(1, b"", 9, "first")
    with pytest.raises(Overloaded):
        a.send_request(2, b"", 9, "second")
    move(a, d)
    for context in ("third", "fourth"):
        d.send_request(3, b"", 9, context)
    move(d, a)
    assert only(move(a, d), ev.RequestFailed).context == "fourth"


def test_a_message_too_large_is_refused_before_anything_is_queued() -> None:
    d, a = pair(Limits(body=LARGE, unsent=LARGE))
    move(d, a)
    for send in (
        lambda: d.send_tell(1, bytes(LARGE + 1)),
        lambda: d.send_request(1, bytes(LARGE + 1), 9, "x"),
        lambda: d.open_stream(1, bytes(LARGE + 1), window=0, context=None),
        lambda: d.respond(5, bytes(LARGE + 1)),
    ):
        with pytest.raises(PayloadTooLarge):
            send()
    assert d.unsent == 0
    assert d.busy == 0


def test_a_peer_that_does_not_read_is_overload_then_the_end() -> None:
    d, a = pair(Limits(unsent=LARGE, unsent_hard=3 * LARGE))
    move(d, a)
    call = a.send_request(1, b"", 9, "x")
    move(a, d)
    d.send_tell(1, bytes(LARGE))
    for send in (
        lambda: d.send_tell(1, b""),
        lambda: d.send_request(1, b"", 9, "x"),
        lambda: d.open_stream(1, b"", window=0, context=None),
    ):
        with pytest.raises(Overloaded, match="reads slowly"):
            send()
    d.respond(call, bytes(2 * LARGE))  # answers may still be queued, up to the hard bound
    assert violation(d, frame(FrameKind.PING)).message.endswith("bytes unread")


def test_data_to_send_stops_where_it_is_told() -> None:
    d, a = pair()
    for number in range(100):
        d.send_tell(number, bytes(1000))
    d.send_tell(100, bytes(3 * LARGE))
    pieces: list[bytes] = []
    while d.unsent:
        before = d.taken
        got = b"".join(d.data_to_send(5000))
        assert d.taken - before == len(got)
        pieces.append(got)
    assert all(len(piece) <= 5000 + 1000 + HEADER_BYTES for piece in pieces[:-2])
    told = [event for piece in pieces for event in a.receive_data(piece)]
    assert [event.method for event in told] == list(range(101))


def test_large_bodies_are_sent_as_they_are() -> None:
    d, _ = pair()
    body = bytes(LARGE)
    d.send_tell(1, b"small")
    d.send_request(2, body, 9, "x")
    d.send_tell(3, b"small")
    _, same, _ = d.data_to_send()
    assert same is body
    d.send_tell(1, b"small")
    assert len(d.data_to_send()) == 1


# ---------------------------------------------------------------------- keepalive and goodbye


def test_pings_are_answered_by_the_connection_itself() -> None:
    d, a = pair()
    d.send_ping(0xFFFF_FFFF)
    assert move(d, a) == []
    assert only(move(a, d), ev.Pong).value == 0xFFFF_FFFF


def test_only_the_acceptor_asks_for_bulk() -> None:
    d, a = pair()
    a.send_bulk_wanted()
    only(move(a, d), ev.BulkWanted)
    assert "dialler asked" in violation(a, frame(FrameKind.BULK)).message


def test_after_goodbye_nothing_new_starts_and_the_old_finishes() -> None:
    d, a = pair()
    call = d.send_request(1, b"", 9, "old")
    move(d, a)
    a.send_goaway(GoAwayCode.SHUTDOWN, "bye")
    a.send_goaway(GoAwayCode.SHUTDOWN, "said once")
    going = only(move(a, d), ev.GoingAway)
    assert (going.code, going.message) == (GoAwayCode.SHUTDOWN, "bye")
    only(move(d, a), ev.GoingAway)
    for connection in (d, a):
        for send in (
            lambda c=connection: c.send_tell(1, b""),
            lambda c=connection: c.send_request(1, b"", 9, "new"),
            lambda c=connection: c.open_stream(1, b"", window=0, context=None),
        ):
            with pytest.raises(LinkLost) as lost:
                send()
            assert lost.value.sent is False
    assert not a.finished
    a.respond(call, b"the last answer")
    assert only(move(a, d), ev.AnswersReceived).answers == [("old", b"the last answer")]
    assert a.finished
    assert d.finished


def test_some_goodbyes_end_the_connection_at_once() -> None:
    d, a = pair()
    d.send_goaway(GoAwayCode.REPLACED, "a later life")
    assert d.state is ConnectionState.ENDED
    assert only(move(d, a), ev.GoingAway).code == GoAwayCode.REPLACED
    assert d.receive_data(frame(FrameKind.PING)) == []
    d.send_goaway(GoAwayCode.SHUTDOWN)
    assert d.unsent == 0


def test_a_long_goodbye_is_cut() -> None:
    d, a = pair()
    d.send_goaway(GoAwayCode.SHUTDOWN, "x" * 100_000)
    assert len(only(move(d, a), ev.GoingAway).message) == 1000


# ---------------------------------------------------------------------- violations


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (frame(FrameKind.RESPONSE, stream=5), "response to an unknown request"),
        (frame(FrameKind.ERROR, encode(["X", "y"]), stream=5), "error for an unknown request"),
        (frame(FrameKind.REQUEST, stream=1 << 31), "slot that is not free"),
        (frame(FrameKind.OPEN, stream=1 << 31), "slot that is not free"),
        (frame(FrameKind.REQUEST, stream=1) * 2, "slot that is not free"),
        (
            frame(FrameKind.REQUEST, stream=1) + frame(FrameKind.OPEN, stream=1),
            "slot that is not free",
        ),
        (frame(FrameKind.DATA, stream=1), "not open"),
        (frame(FrameKind.END, stream=1), "not open"),
        (frame(FrameKind.RESET, encode(["X", "y"]), stream=1), "not open"),
        (frame(FrameKind.OPEN, stream=1) + frame(FrameKind.DATA, stream=1), "beyond the credit"),
        (
            frame(FrameKind.OPEN, stream=1, flags=FrameFlag.LAST) + frame(FrameKind.END, stream=1),
            "not open",
        ),
        (frame(FrameKind.OPEN, stream=1) + frame(FrameKind.END, stream=1) * 2, "not open"),
        (
            frame(FrameKind.OPEN, stream=1) + frame(FrameKind.RESET, b"\xc0", stream=1),
            "not a Failure",
        ),
        (frame(FrameKind.GOAWAY, b"\xc0"), "not a GoAway"),
        (frame(FrameKind.HELLO), "not expected"),
        (frame(77), "not expected"),
    ],
)
def test_what_breaks_the_rules_ends_the_connection_and_is_named(data, words) -> None:
    _, a = pair()
    assert words in violation(a, data).message
    last_words = taken(a)
    assert last_words[-len(last_words) :][4] in (FrameKind.GOAWAY, FrameKind.RESET)
    assert a.receive_data(data) == []
    assert taken(a) == b""


def test_a_violation_is_told_to_the_peer() -> None:
    d, a = pair()
    violation(a, frame(FrameKind.RESPONSE, stream=5))
    going = only(move(a, d), ev.GoingAway)
    assert going.code == GoAwayCode.VIOLATION
    assert "response to an unknown request" in going.message


def test_events_before_a_violation_are_kept() -> None:
    _, a = pair()
    told, violated = a.receive_data(frame(FrameKind.TELL, b"x") + frame(FrameKind.RESPONSE))
    assert told.body == b"x"
    assert isinstance(violated, ev.ProtocolViolated)


def test_unknown_frames_that_may_be_ignored_are() -> None:
    _, a = pair()
    unknown = frame(99, b"whatever", flags=FrameFlag.IGNORABLE)
    (told,) = a.receive_data(unknown + frame(FrameKind.TELL, b"x") + unknown)
    assert told.body == b"x"


def test_cancel_and_credit_may_come_too_late() -> None:
    _, a = pair()
    late = frame(FrameKind.CANCEL, stream=9) + frame(FrameKind.CREDIT, stream=9, value=5)
    assert a.receive_data(late) == []
    assert a.state is ConnectionState.OPEN


# ---------------------------------------------------------------------- the end


def test_eof_says_where_it_came() -> None:
    d, a = pair()
    assert "ended the connection" in only(d.receive_eof(), ev.ProtocolViolated).error.message
    assert d.receive_eof() == []
    a.receive_data(frame(FrameKind.TELL, b"x")[:-1])
    assert "inside a frame" in only(a.receive_eof(), ev.ProtocolViolated).error.message


def test_the_contexts_of_lost_requests_are_returned_once() -> None:
    d, _ = pair()
    calls = [d.send_request(1, b"", 9, name) for name in "abc"]
    d.cancel(calls[1])
    assert d.abandon() == ["a", "c"]
    assert d.abandon() == []


def test_what_left_this_process_can_be_told_from_what_did_not() -> None:
    d, _ = pair()
    marks = []
    for _ in range(3):
        marks.append(d.queued)
        d.send_request(1, bytes(1000), 9, "x")
    d.data_to_send(1500)
    assert [mark < d.taken for mark in marks] == [True, True, False]


def test_nothing_can_be_started_before_the_connection_is_open() -> None:
    for connection in (dialler(), acceptor()):
        with pytest.raises(LinkLost):
            connection.send_tell(1, b"")
        with pytest.raises(LinkLost):
            connection.send_request(1, b"", 9, "x")


def test_refuse_after_open_is_a_mistake() -> None:
    _, a = pair()
    with pytest.raises(RuntimeError):
        a.refuse(HandshakeRefusalReason.BUSY, HandshakeRefused("x"))
    assert GoAway(0) == GoAway(0, "")
    assert Cancelled("x").http_status == 499


def test_a_request_that_comes_with_its_cancellation_is_not_seen() -> None:
    d, a = pair()
    kept = d.send_request(7, b"kept", 1000, "kept")
    call = d.send_request(7, b"question", 1000, "context")
    d.cancel(call)
    (asked,) = move(d, a)
    assert isinstance(asked, ev.RequestsReceived)
    assert [request[0] for request in asked.requests] == [kept]
    assert a.serving == 1
    move(a, d)
    assert d.pending == 1


def test_a_cancelled_request_may_still_want_to_hear_an_answer() -> None:
    d, a = pair()
    call = d.send_request(7, b"question", 1000, "context")
    move(d, a)
    a.respond(call, b"answer")
    d.cancel(call, "heir")
    (answered,) = move(a, d)
    assert answered.answers == [("heir", b"answer")]
    assert move(d, a) == []
