"""The fuzz target of membership on messages that contradict each other, and on mutated bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.gossip import messages as m
from pdserve.ids import NodeId
from tests.fuzz.fuzz_gossip import fuzz, introductions, passed, said, seeds
from tests.gossip.strategies import records
from tests.gossip.test_messages import EXAMPLES
from tests.support.seeds import is_long

NODES = ("me", "a", "b", "c", "d")
names = st.sampled_from([NodeId(node) for node in NODES])
rumours = st.lists(
    st.builds(m.Rumour, records(*NODES), by=names, refused=st.booleans()), max_size=6
).map(tuple)
messages = st.one_of(
    st.builds(m.News, rumours),
    st.builds(m.Ping, st.integers(0, 3), rumours),
    st.builds(m.Ack, st.integers(0, 3), rumours),
    st.builds(m.IndirectPing, st.integers(0, 3), names, st.integers(1, 3)),
    st.builds(
        m.Records,
        st.lists(records(*NODES), max_size=6).map(tuple),
        st.lists(names, max_size=3).map(tuple),
    ),
    st.sampled_from(EXAMPLES),
)
pieces = st.one_of(
    st.builds(said, messages, st.integers(0, 2)),
    st.builds(passed, st.integers(0, 255)),
    st.binary(min_size=2, max_size=6),  # links and the like; and what follows is cut differently
)
examples = settings(max_examples=2000 if is_long() else 150)


@examples
@given(st.integers(0, 3), st.lists(pieces, max_size=25))
def test_the_machine_survives_whatever_is_said(start, happened) -> None:
    fuzz(bytes([start]) + b"".join(happened))


@examples
@given(st.sampled_from(seeds()), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255))))
def test_the_machine_survives_mutated_bytes(seed, changes) -> None:
    data = bytearray(seed)
    for position, byte in changes:
        data[position % len(data)] = byte
    fuzz(bytes(data))


@pytest.mark.parametrize("limit", [(1 << 63) - 1, (1 << 63) - 2])
def test_the_highest_numbers_there_are_lead_to_nothing_that_cannot_be_said(limit) -> None:
    record = m.MemberRecord(NodeId("me"), 5, limit, m.MemberState.SUSPECT)
    accusation = said(m.News((m.Rumour(record, by=NodeId("a")),)))
    fuzz(b"\0" + b"".join([*introductions(), accusation, passed(16), accusation, passed(16)]))
