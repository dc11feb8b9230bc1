"""Records of a few members that contradict each other in every way."""

from __future__ import annotations

from hypothesis import strategies as st

from pdserve.gossip.messages import MemberRecord, MemberState
from pdserve.ids import NodeId


def records(*nodes: str) -> st.SearchStrategy[MemberRecord]:
    return st.builds(
        MemberRecord,
        node=st.sampled_from([NodeId(node) for node in nodes or ("a",)]),
        epoch=st.integers(1, 3),
        incarnation=st.integers(0, 3),
        state=st.sampled_from(list(MemberState)),
        card=st.integers(0, 2),
        address=st.sampled_from(["", "a:1", "b:1"]),
        role=st.sampled_from(["worker", "router"]),
    )
