"""A set and its copies: what is published, in how few events, and what the digest notices."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pdserve.errors import PayloadTooLarge, ProtocolError
from pdserve.runtime.topics.messages import CHUNK_BYTES
from pdserve.runtime.topics.replicated_set import ENTRY_BYTES, Delta, SetLog, SetView, mix
from pdserve.wire.codec import encode
from tests.runtime.topics.wires import digest_of

KEYS = st.sampled_from((b"", b"a", b"b", b"c"))
VALUES = st.sampled_from((b"", b"1", b"2"))
CHANGES = st.one_of(
    st.tuples(st.just("put"), KEYS, VALUES),
    st.tuples(st.just("drop"), KEYS),
    st.tuples(st.just("clear")),
    st.tuples(st.just("flush")),
)


def logged() -> tuple[SetLog, list[bytes]]:
    source = SetLog()
    events: list[bytes] = []
    source.connect(events.append, lambda: None)
    return source, events


def test_changes_are_one_event() -> None:
    source, events = logged()
    for number in range(100):
        source.put(b"%d" % number)
    source.flush()
    source.flush()
    assert len(events) == 1
    assert len(source.items) == 100


def test_what_came_and_went_is_no_event() -> None:
    source, events = logged()
    source.put(b"a", b"1")
    source.drop(b"a")
    source.drop(b"unknown")
    source.clear()
    source.flush()
    assert events == []
    source.put(b"a", b"1")
    source.flush()
    source.put(b"a", b"1")
    source.flush()
    source.drop(b"a")
    source.put(b"a", b"1")
    source.flush()
    assert len(events) == 1


def test_staged_changes_do_not_show() -> None:
    source, _ = logged()
    source.put(b"a")
    assert not source.items
    assert source.digest() == 0
    assert list(source.snapshot()) == []


def test_the_owner_is_asked_to_flush_once() -> None:
    source, asked = SetLog(), []
    source.connect(lambda event: None, lambda: asked.append(1))
    source.put(b"a")
    source.drop(b"b")
    assert asked == [1]
    source.flush()
    source.clear()
    assert asked == [1, 1]


def test_what_is_staged_is_bounded() -> None:
    source, events = logged()
    for number in range(10_000):
        source.put(b"%d" % number, b"x" * 100)
    source.flush()
    assert len(events) > 10
    assert max(map(len, events)) < CHUNK_BYTES


def test_an_entry_has_a_bound() -> None:
    source, events = logged()
    with pytest.raises(PayloadTooLarge):
        source.put(b"key", bytes(ENTRY_BYTES))
    source.put(b"key", bytes(ENTRY_BYTES - 3))
    source.flush()
    assert len(events) == 1


def test_snapshots_come_in_pieces_and_stand_still() -> None:
    source, _ = logged()
    for number in range(5000):
        source.put(b"%d" % number, b"x" * 50)
    source.put(b"large", bytes(60_000))
    source.flush()
    pieces, before, digest = source.snapshot(), dict(source.items), source.digest()
    first = next(pieces)
    source.clear()
    source.flush()
    view = SetView()
    view.reset()
    for piece in (first, *pieces):
        assert len(piece) <= CHUNK_BYTES
        view.load(piece)
    assert not view.items
    view.commit()
    assert view.items == before
    assert view.digest() == digest


def test_a_view_refuses_nonsense() -> None:
    view = SetView()
    for feed in (view.apply, view.load):
        with pytest.raises(ProtocolError):
            feed(b"\xc1")


def test_mixing_tells_keys_from_values() -> None:
    assert mix(b"ab", b"c") != mix(b"a", b"bc")
    assert mix(b"a", b"") != mix(b"", b"a")
    assert mix(b"", b"") != 0
    assert mix(b"key", b"value") == 12542515688658061244


def test_commit_tells_the_difference() -> None:
    heard: list[tuple[dict[bytes, bytes], list[bytes]]] = []
    view = SetView(lambda puts, drops: heard.append((dict(puts), list(drops))))
    view.apply(encode(Delta(False, {b"a": b"1", b"b": b"1", b"c": b"1"})))
    heard.clear()
    view.reset()
    view.load(encode({b"a": b"1", b"b": b"2", b"d": b"1"}))
    assert heard == []
    view.commit()
    assert heard == [({b"b": b"2", b"d": b"1"}, [b"c"])]
    view.reset()
    view.commit()
    assert heard[1] == ({}, [b"a", b"b", b"d"])
    view.reset()
    view.commit()
    assert len(heard) == 2


@given(st.lists(CHANGES))
def test_views_follow(changes: list[tuple]) -> None:
    source, events = logged()
    heard: dict[bytes, bytes] = {}

    def on_change(puts, drops) -> None:
        for key in drops:
            del heard[key]
        assert all(heard.get(key) != value for key, value in puts.items())
        heard.update(puts)

    view, model, told = SetView(on_change), {}, 0
    for name, *details in [*changes, ("flush",)]:
        getattr(source, name)(*details)
        if name == "put":
            model[details[0]] = details[1]
        elif name == "drop":
            model.pop(details[0], None)
        elif name == "clear":
            model.clear()
        else:
            before = dict(view.items)
            for event in events[told:]:
                view.apply(event)
                view.apply(event)  # nothing happens
            assert (len(events) > told) == (before != model)
            told = len(events)
            assert heard == view.items == source.items == model
            assert view.digest() == source.digest() == digest_of(model)
