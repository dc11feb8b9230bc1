"""Traces for tests: one request with the phases that a frontend records."""

from __future__ import annotations

import hashlib

from pdserve.messages.trace import AttributeValue, Span, SpanEvent, Trace

BEGAN = 1_790_000_000_123_456_789


def make_trace(
    request_id: str = "req-1",
    *,
    model: str = "tiny",
    seconds: float = 1.0,
    error: str = "",
    status: int = 200,
    kept: tuple[str, ...] = ("head",),
    trace_id: bytes = b"",
) -> Trace:
    """A request whose first token came at 0.25 of its time."""
    key = trace_id or hashlib.blake2b(request_id.encode(), digest_size=16).digest()

    def span_id(number: int) -> bytes:
        return key[:7] + bytes([number])

    first = seconds / 4
    root = Span(
        span_id=span_id(1),
        parent_id=b"\x01" * 8,
        name="POST /v1/chat/completions",
        start=0.0,
        end=seconds,
        kind="server",
        attributes={
            "http.request.method": "POST",
            "http.response.status_code": status,
            "gen_ai.request.model": model,
            "gen_ai.request.stream": True,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.response.finish_reasons": ("stop", "length"),
            "gen_ai.usage.input_tokens": 2**40,
        },
        events=(SpanEvent("first_token", first, {"choice": 0}),),
        error=error,
    )
    phases: tuple[tuple[str, int, float, float, dict[str, AttributeValue]], ...] = (
        ("pdserve.tokenize", 1, 0.0, first / 10, {"tokens": 12}),
        ("pdserve.route", 1, first / 10, first / 5, {"policy": "ttft", "overlap_tokens": 0}),
        ("pdserve.attempt", 1, first / 5, seconds, {"worker": "w1", "reason": "first"}),
        ("pdserve.queue", 4, first / 5, first / 2, {}),
        ("pdserve.prefill", 4, first / 2, first, {"cached_tokens": 8, "computed_tokens": 4}),
        ("pdserve.decode", 4, first, seconds, {"tokens": 30, "itl_p50": 0.025}),
    )
    spans = [
        Span(
            span_id=span_id(number),
            parent_id=span_id(parent),
            name=name,
            start=start,
            end=end,
            attributes=attributes,
        )
        for number, (name, parent, start, end, attributes) in enumerate(phases, 2)
    ]
    return Trace(
        trace_id=key,
        began=BEGAN,
        request_id=request_id,
        model=model,
        kept=kept,
        spans=(root, *spans),
    )
