from typing import Any

from pdserve.frontend.placement import (
    Placement,
    PromptStats,
    cached_by_source,
    header_lines,
    served_summary,
)
from pdserve.ids import NodeId
from pdserve.messages.tiers import CachedSource


def course(worker: str = "w", cached: int | None = 64, **changes: Any) -> PromptStats:
    fields: dict[str, Any] = {
        "worker": NodeId(worker),
        "router": NodeId("r"),
        "policy": "ttft",
        "attempts": 1,
        "overlap_tokens": 96,
        "predicted_ttft": 0.25,
        "held": 0.0,
    }
    return PromptStats(Placement(**fields | changes), cached, queue=0.001, prefill=0.02)


def lines(*courses: PromptStats, ttft: float | None = 0.5) -> dict[str, str]:
    text = header_lines(served_summary(courses, ttft)).decode()
    return dict(line.split(": ", 1) for line in text.splitlines())


def test_what_is_known_is_told() -> None:
    assert lines(course()) == {
        "x-pdserve-worker": "w",
        "x-pdserve-router": "r",
        "x-pdserve-policy": "ttft",
        "x-pdserve-attempts": "1",
        "x-pdserve-overlap-tokens": "96",
        "x-pdserve-cached-tokens": "64",
        "x-pdserve-predicted-ttft-ms": "250.0",
        "x-pdserve-ttft-ms": "500.0",
        "x-pdserve-held-ms": "0.0",
    }


def test_where_the_prompt_was_computed_is_told() -> None:
    remote = course()
    remote.where = "remote; node=p; reason=rule"
    assert lines(remote)["x-pdserve-prefill"] == "remote; node=p; reason=rule"
    both = served_summary([remote, course(), remote], 0.5)
    assert both is not None
    assert both.prefill == "remote; node=p; reason=rule"


def test_where_cached_tokens_were_is_told_if_not_all_were_on_the_device() -> None:
    found = course(cached=100)
    found.sources = (CachedSource("disk", 32), CachedSource("host", 8))
    assert lines(found)["x-pdserve-cached"] == "device=60; host=8; disk=32"
    found.sources = (CachedSource("host", 100),)
    assert lines(found)["x-pdserve-cached"] == "host=100"
    found.sources = ()
    assert "x-pdserve-cached" not in lines(found)


def test_sources_of_several_prompts_are_added() -> None:
    one, other = course(cached=64), course(cached=96)
    one.sources = (CachedSource("peer", 32, "a"), CachedSource("host", 32))
    other.sources = (CachedSource("peer", 32, "b"), CachedSource("peer", 32, "a"))
    assert cached_by_source([one, other]) == {"device": 32, "host": 32, "peer": 96}
    told = served_summary([one, other], 0.5)
    assert told is not None
    assert told.cached == "device=32; host=32; peer=96; node=a,b"
    unknown = served_summary([one, PromptStats()], 0.5)
    assert unknown is not None
    assert unknown.cached is None
    assert cached_by_source([one, course(cached=None)]) == {}


def test_what_the_prefill_worker_had_is_told_apart() -> None:
    """It is no part of the decode worker's cached tokens."""
    found = course(cached=32)
    found.prefill_cached = 96
    assert "x-pdserve-cached" not in lines(found), "all were on devices"
    found.prefill_sources = (CachedSource("disk", 16), CachedSource("peer", 64, "p2"))
    there = "prefill-device=16; prefill-disk=16; prefill-peer=64; prefill-node=p2"
    assert lines(found)["x-pdserve-cached"] == f"device=32; {there}"
    assert lines(found)["x-pdserve-cached-tokens"] == "32"
    assert cached_by_source([found]) == {"device": 32}
    alone = course(cached=0)
    alone.prefill_cached, alone.prefill_sources = 64, (CachedSource("host", 64),)
    assert lines(alone)["x-pdserve-cached"] == "prefill-host=64"
    unknown = served_summary([alone, course(cached=None)], 0.5)
    assert unknown is not None
    assert unknown.cached is None


def test_a_worker_that_counts_more_than_was_cached() -> None:
    """It may be of another release."""
    odd = course(cached=8)
    odd.sources = (CachedSource("host", 32),)
    assert lines(odd)["x-pdserve-cached"] == "host=32"


def test_how_often_it_went_on_elsewhere_is_told_if_it_did() -> None:
    assert lines(course(migrations=2))["x-pdserve-migrations"] == "2"
    both = served_summary([course(migrations=1), course(migrations=3)], 0.5)
    assert both is not None
    assert both.migrations == 3


def test_what_is_not_known_has_no_header() -> None:
    found = lines(course(cached=None, predicted_ttft=None, policy=""), ttft=None)
    assert set(found) == {
        *("x-pdserve-worker", "x-pdserve-router", "x-pdserve-attempts"),
        *("x-pdserve-overlap-tokens", "x-pdserve-held-ms"),
    }


def test_nothing_placed_is_nothing_told() -> None:
    assert served_summary([PromptStats()], None) is None
    assert header_lines(None) == b""


def test_several_prompts_are_told_as_one() -> None:
    told = served_summary(
        [course("b", 32, attempts=3, held=0.5), course("a", 64), course("b", 0, held=0.25)], 0.5
    )
    assert told is not None
    assert (told.worker, told.router, told.attempts) == ("b,a", "r", 3)
    assert (told.overlap_tokens, told.cached_tokens) == (288, 96)
    assert (told.held_ms, told.queue_ms, told.prefill_ms) == (500.0, 1.0, 20.0)


def test_a_part_of_a_sum_is_not_told() -> None:
    told = served_summary([course("a"), PromptStats()], 0.5)
    assert told is not None
    assert (told.worker, told.overlap_tokens, told.cached_tokens) == ("a", None, None)
    assert told.queue_ms is None
