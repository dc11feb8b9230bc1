"""Streams: two halves that each end once, credit that bounds them, items that are not copied."""

from __future__ import annotations

import pytest

from pdserve.errors import Cancelled, LinkLost, NoWorker, Overloaded, PayloadTooLarge
from pdserve.wire import events as ev
from pdserve.wire.flow import StreamState, cost_of
from pdserve.wire.header import HEADER, FrameFlag, FrameKind
from pdserve.wire.limits import FRAME_COST, LARGE, Limits
from pdserve.wire.protocol import ConnectionState
from tests.wire.support import move, only, pair, taken


def opened(window: int = 10_000, **limits: int) -> tuple:
    """A connection with one stream that both sides may send on: (d, a, stream, stream)."""
    d, a = pair(Limits(**limits) if limits else None)
    ours = d.open_stream(5, b"hello", window=window, context="d")
    event = only(move(d, a), ev.StreamOpened)
    assert (event.method, event.body, event.last) == (5, b"hello", False)
    assert a.grant(event.stream, window)
    only(move(a, d), ev.StreamUnblocked)
    return d, a, ours, event.stream


def idle(*connections) -> bool:
    """Nothing is under way and all credit is back."""
    return all(c.busy == 0 and c.budget.granted == 0 for c in connections)


# ---------------------------------------------------------------------- halves


def test_items_flow_both_ways_and_each_half_ends_by_itself() -> None:
    d, a, ours, theirs = opened()
    assert d.send_data(ours, b"1")
    assert a.send_data(theirs, b"2")
    assert only(move(d, a), ev.DataReceived).items == [b"1"]
    assert only(move(a, d), ev.DataReceived).items == [b"2"]
    d.end(ours)
    d.end(ours)
    assert only(move(d, a), ev.StreamEnded).stream is theirs
    assert a.send_data(theirs, b"3", last=True)
    last = only(move(a, d), ev.DataReceived)
    assert (last.items, last.last) == ([b"3"], True)
    for connection, stream in ((d, ours), (a, theirs)):
        assert stream.over
        for data in (b"1",) if connection is a else (b"2", b"3"):
            connection.consumed(stream, cost_of(len(data)))
    assert idle(d, a)
    with pytest.raises(LinkLost):
        d.send_data(ours, b"late")


def test_a_stream_opened_with_last_only_listens() -> None:
    d, a = pair()
    ours = d.open_stream(5, b"", window=1000, context=None, last=True)
    event = only(move(d, a), ev.StreamOpened)
    assert event.last
    with pytest.raises(LinkLost):
        d.send_data(ours, b"")
    assert a.send_data(event.stream, b"x", last=True)
    move(a, d)
    d.consumed(ours, cost_of(1))
    assert idle(d, a)


def test_reset_ends_both_halves() -> None:
    d, a, ours, theirs = opened()
    d.send_data(ours, b"lost on the way")
    d.abort(ours, NoWorker("why"))
    data, reset = move(d, a)
    assert isinstance(data, ev.DataReceived)
    assert isinstance(reset.error, NoWorker)
    assert reset.stream is theirs
    a.consumed(theirs, cost_of(len(b"lost on the way")))
    assert move(a, d) == [], "who aborts hears nothing, not even the confirmation"
    assert idle(d, a)


def test_resets_that_cross_end_the_stream_once_on_each_side() -> None:
    d, a, ours, theirs = opened()
    d.abort(ours, NoWorker("d"))
    a.abort(theirs, NoWorker("a"))
    assert move(d, a) == []
    assert move(a, d) == []
    assert idle(d, a)


def test_what_crosses_an_abort_is_dropped() -> None:
    d, a, ours, theirs = opened()
    a.send_data(theirs, b"x")
    a.send_data(theirs, b"y" * (2 * LARGE))
    a.end(theirs)
    d.abort(ours, Cancelled("enough"))
    assert move(a, d) == []
    only(move(d, a), ev.StreamReset)
    assert idle(d, a)


def test_a_listener_whose_own_half_has_ended_asks_for_the_end() -> None:
    d, a = pair()
    ours = d.open_stream(5, b"", window=1000, context=None, last=True)
    theirs = only(move(d, a), ev.StreamOpened).stream
    a.send_data(theirs, b"on its way")
    d.abort(ours, Cancelled("enough"))
    reset = only(move(d, a), ev.StreamReset)
    assert isinstance(reset.error, Cancelled)
    assert not theirs.sending
    assert move(a, d) == []
    assert idle(d, a)


def test_a_slot_is_not_reused_before_both_halves_have_ended() -> None:
    d, a, ours, _ = opened()
    d.abort(ours, Cancelled("enough"))
    other = d.open_stream(5, b"", window=0, context=None)
    assert other.id & 0xFFFF != ours.id & 0xFFFF
    move(d, a)
    move(a, d)
    third = d.open_stream(5, b"", window=0, context=None)
    assert third.id & 0xFFFF == ours.id & 0xFFFF
    assert third.id != ours.id


def test_items_of_one_stream_come_in_runs_and_streams_stay_apart() -> None:
    d, a, first, _ = opened()
    second = d.open_stream(5, b"", window=0, context=None)
    a.grant(only(move(d, a), ev.StreamOpened).stream, 10_000)
    move(a, d)
    for stream, item in ((first, b"1"), (first, b"2"), (second, b"3"), (first, b"4")):
        d.send_data(stream, item)
    d.send_tell(9, b"")
    d.send_data(first, b"5")
    d.send_data(first, b"6", last=True)
    events = move(d, a)
    runs = [event.items for event in events if isinstance(event, ev.DataReceived)]
    assert runs == [[b"1", b"2"], [b"3"], [b"4"], [b"5"], [b"6"]]
    assert events[0].cost == 2 * cost_of(1)


# ---------------------------------------------------------------------- credit


def test_nothing_is_sent_without_credit() -> None:
    d, a = pair()
    ours = d.open_stream(5, b"", window=0, context=None)
    theirs = only(move(d, a), ev.StreamOpened).stream
    assert not d.send_data(ours, b"x")
    assert not a.send_data(theirs, b"x")
    assert taken(d) == taken(a) == b""


def test_a_frame_larger_than_the_credit_is_sent_whole_and_overdraws_it() -> None:
    d, a, ours, theirs = opened(window=1000)
    assert d.send_data(ours, bytes(5000))
    assert not d.send_data(ours, b"")
    only(move(d, a), ev.DataReceived)
    a.consumed(theirs, cost_of(5000))
    only(move(a, d), ev.StreamUnblocked)
    assert d.send_data(ours, b"")


def test_credit_returns_when_half_a_window_was_taken() -> None:
    d, a, ours, theirs = opened(window=10 * cost_of(0))
    for _ in range(10):
        assert d.send_data(ours, b"")
    assert not d.send_data(ours, b"")
    move(d, a)
    for taken_items in range(1, 10):
        a.consumed(theirs, cost_of(0))
        sent = taken(a)
        assert bool(sent) == (taken_items == 5)
        if sent:
            only(d.receive_data(sent), ev.StreamUnblocked)
    for _ in range(5):
        assert d.send_data(ours, b"")
    assert not d.send_data(ours, b"")


def test_all_streams_of_a_peer_share_one_budget() -> None:
    d, _ = pair(Limits(budget=10_000, least_window=4000))
    first = d.open_stream(5, b"", window=5000, context=None)
    second = d.open_stream(5, b"", window=8000, context=None)
    assert (first.window, second.window) == (5000, 5000)
    with pytest.raises(Overloaded, match="no credit"):
        d.open_stream(5, b"", window=5000, context=None)
    assert d.open_stream(5, b"", window=0, context=None).window == 0


def test_an_acceptor_without_budget_says_so() -> None:
    d, a = pair(None, Limits(budget=5000, least_window=4000))
    for granted in (True, False):
        d.open_stream(5, b"", window=0, context=None)
        theirs = only(move(d, a), ev.StreamOpened).stream
        assert a.grant(theirs, 5000) is granted


def test_a_stream_too_many_is_refused() -> None:
    d, a = pair(Limits(streams=1), Limits(incoming=1, streams=1))
    d.open_stream(5, b"", window=0, context="first")
    with pytest.raises(Overloaded):
        d.open_stream(5, b"", window=0, context="second")
    d, a = pair(None, Limits(incoming=1, streams=1))
    first = d.open_stream(5, b"", window=0, context="first")
    d.open_stream(5, b"", window=1000, context="second")
    only(move(d, a), ev.StreamOpened)
    reset = only(move(a, d), ev.StreamReset)
    assert reset.stream.context == "second"
    assert isinstance(reset.error, Overloaded)
    move(d, a)
    d.abort(first, Cancelled("x"))
    move(d, a)
    move(a, d)
    assert idle(d, a)


def test_a_peer_that_never_stops_opening_is_cut_off() -> None:
    _, a = pair(None, Limits(incoming=4, streams=1))
    flood = b"".join(HEADER.pack(0, FrameKind.OPEN, 0, 0, slot, 0) for slot in range(1, 20))
    *_, last = a.receive_data(flood)
    assert isinstance(last, ev.ProtocolViolated)
    assert len(a.streams()) <= 8


def test_data_beyond_the_credit_is_a_violation() -> None:
    d, a, ours, _ = opened(window=200)
    ours.credit = 10_000
    d.send_data(ours, bytes(200))
    d.send_data(ours, b"")
    *_, last = move(d, a)
    assert isinstance(last, ev.ProtocolViolated)
    assert a.state is ConnectionState.ENDED


# ---------------------------------------------------------------------- bodies


def test_a_large_item_is_neither_copied_nor_joined() -> None:
    d, _, ours, _ = opened()
    item = memoryview(bytearray(LARGE))
    d.send_data(ours, item)
    _, same = d.data_to_send()
    assert same is item


def test_the_end_of_the_connection_lets_go_of_a_body_that_is_being_received() -> None:
    d, a, ours, _ = opened()
    d.send_data(ours, b"x" * (2 * LARGE))
    assert a.receive_data(taken(d)[:1000]) == []
    assert a.receive_buffer() is not None
    only(a.receive_eof(), ev.ProtocolViolated)
    assert a.receive_buffer() is None


def test_an_item_has_a_limit() -> None:
    d, _, ours, _ = opened(body=2 * LARGE)
    with pytest.raises(PayloadTooLarge):
        d.send_data(ours, bytes(2 * LARGE + 1))
    assert taken(d) == b""


def test_the_reserved_flag_of_raw_payloads_is_a_violation() -> None:
    _, a, ours, _ = opened()
    frame = HEADER.pack(1, FrameKind.DATA, FrameFlag.RAW, 0, ours.id, 0)
    violated = only(a.receive_data(frame + b"x"), ev.ProtocolViolated)
    assert "raw payload" in violated.error.message


def test_a_dead_connection_sends_nothing_more() -> None:
    d, a, ours, theirs = opened()
    a.receive_eof()
    with pytest.raises(LinkLost):
        a.send_data(theirs, b"")
    a.end(theirs)
    a.abort(theirs, Cancelled("x"))
    a.consumed(theirs, 100_000)
    assert taken(a) == b""
    assert isinstance(ours, StreamState)
    assert FRAME_COST > 0
    assert d.state is ConnectionState.OPEN
