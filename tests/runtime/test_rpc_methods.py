from __future__ import annotations

from pdserve.gossip.messages import TELL
from pdserve.gossip.service import PARTS
from pdserve.messages.worker_stream import WORKER_STREAM
from pdserve.runtime import rpc_methods
from pdserve.runtime.topics import messages as topics
from pdserve.wire.codec import Method, Notice


def numbers() -> dict[str, int]:
    """Every number that is named, by the range that its owner has."""
    named: dict[str, int] = {"gossip": TELL, "parts": PARTS, "channel": WORKER_STREAM}
    named |= {"state topic": topics.STATE, "log topic": topics.LOG}
    for name, value in vars(rpc_methods).items():
        if isinstance(value, Method | Notice):
            named[name] = value.id
        elif name.isupper() and isinstance(value, int):
            named[name] = value
    return named


def test_no_number_means_two_things() -> None:
    named = numbers()
    assert len(set(named.values())) == len(named), named


def test_numbers_stay_in_the_range_of_their_owner() -> None:
    named = numbers()
    for names, first, last in (
        (("gossip", "parts"), 0x0100, 0x010F),
        (("state topic", "log topic"), 0x0210, 0x021F),
        (("ROUTE", "RELEASE"), 0x0300, 0x030F),
        (("channel",), 0x0310, 0x031F),
        (("STATUS", "REPORT", "SCRAPE"), 0x0320, 0x032F),
    ):
        for name in names:
            assert first <= named[name] <= last, name


def test_numbers_that_nodes_of_other_versions_know_do_not_change() -> None:
    known = {"gossip": 0x0100, "parts": 0x0101, "ROUTE": 0x0300, "RELEASE": 0x0301}
    known |= {"channel": 0x0310, "STATUS": 0x0320, "REPORT": 0x0321, "SCRAPE": 0x0322}
    assert known.items() <= numbers().items()


def test_a_number_that_an_older_release_used_for_something_else_stays_unused() -> None:
    assert {0x0200, 0x0201, 0x0202, 0x0203} <= set(rpc_methods.RESERVED)
    assert not set(rpc_methods.RESERVED) & set(numbers().values())
