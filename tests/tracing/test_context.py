"""Trace context of callers: what is valid, and that nothing else is believed."""

from __future__ import annotations

import pytest

from pdserve.tracing.context import (
    MAX_TRACESTATE,
    TraceContext,
    format_traceparent,
    parse_traceparent,
)

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
VALID = f"00-{TRACE}-{SPAN}-01"
CONTEXT = TraceContext(bytes.fromhex(TRACE), bytes.fromhex(SPAN), sampled=True)


def test_a_valid_parent_is_read() -> None:
    assert parse_traceparent(VALID) == CONTEXT
    assert parse_traceparent(f" {VALID}\t") == CONTEXT


@pytest.mark.parametrize(
    ("flags", "sampled"), [("00", False), ("01", True), ("03", True), ("fe", False), ("ff", True)]
)
def test_the_lowest_bit_is_the_sampled_one(flags: str, sampled: bool) -> None:
    found = parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}")
    assert found is not None
    assert found.sampled is sampled


@pytest.mark.parametrize("parent", [f"cc-{TRACE}-{SPAN}-01", f"01-{TRACE}-{SPAN}-01-more-to-come"])
def test_a_later_version_may_go_on(parent: str) -> None:
    assert parse_traceparent(parent) == CONTEXT


@pytest.mark.parametrize(
    "parent",
    [
        None,
        "",
        VALID.upper(),
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01-",
        f"01-{TRACE}-{SPAN}-01more",
        f"00-{TRACE}-{SPAN}-0",
        f"00-{TRACE}-{SPAN}-001",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}g-01",
        f"00{TRACE}-{SPAN}-01",
        f"0-{TRACE}-{SPAN}-01",
        f"{VALID},{VALID}",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE[:-1]}٣-{SPAN}-01",
    ],
)
def test_anything_else_is_no_parent(parent: str | None) -> None:
    assert parse_traceparent(parent, "a=1") is None


LONG = f"a={'x' * 253},b={'y' * (MAX_TRACESTATE - 258)}"


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        (None, ""),
        ("", ""),
        ("a=1,b=2", "a=1,b=2"),
        (LONG, LONG),
        (f"{LONG}c", ""),
        ("a=\x00", ""),
        ("a=1, b@c=2 x,\t,", "a=1, b@c=2 x,\t,"),
        (",".join(f"k{n}=v" for n in range(32)), ",".join(f"k{n}=v" for n in range(32))),
        (",".join(f"k{n}=v" for n in range(33)), ""),
        *((state, "") for state in ("not a list", "a=", "A=1", "=1", "a=1=2", "a=1,b")),
        ("a=ü", ""),
    ],
)
def test_a_state_is_passed_on_or_dropped_alone(state: str | None, kept: str) -> None:
    found = parse_traceparent(VALID, state)
    assert found is not None
    assert found.tracestate == kept


def test_what_is_written_is_read() -> None:
    for sampled in (True, False):
        made = format_traceparent(CONTEXT.trace_id, CONTEXT.span_id, sampled=sampled)
        found = parse_traceparent(made)
        assert found == TraceContext(CONTEXT.trace_id, CONTEXT.span_id, sampled)
