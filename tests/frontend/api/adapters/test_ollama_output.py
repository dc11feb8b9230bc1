"""Figures and calls of Ollama's answers."""

import pytest
from msgspec.structs import replace

from pdserve.frontend.api.adapters.ollama_output import PendingCalls, figures, timestamp
from pdserve.protocols.completion_responses import Served, Usage
from pdserve.text.output_parts import ToolCallArguments, ToolCallStart


def usage(ttft_ms: float | None = None, prefill_ms: float | None = None) -> Usage:
    found = Usage(prompt_tokens=7, completion_tokens=3, total_tokens=10)
    if ttft_ms is not None:
        served = Served(worker="w", router="r", policy="p", attempts=1)
        found.pdserve = replace(served, ttft_ms=ttft_ms, prefill_ms=prefill_ms)
    return found


def test_times_add_up_to_the_whole():
    found = figures(usage(ttft_ms=500.0, prefill_ms=200.0), 2.0)
    assert (found.total_duration, found.eval_duration) == (2_000_000_000, 1_500_000_000)
    assert (found.load_duration, found.prompt_eval_duration) == (300_000_000, 200_000_000)
    assert (found.prompt_eval_count, found.eval_count) == (7, 3)


@pytest.mark.parametrize("ttft", [0.0, 2000.0, 9000.0])
def test_no_time_is_less_than_nothing(ttft):
    found = figures(usage(ttft_ms=ttft, prefill_ms=99_999.0), 2.0)
    parts = (found.load_duration, found.prompt_eval_duration, found.eval_duration)
    assert all(isinstance(part, int) and part >= 0 for part in parts)
    assert sum(parts) == found.total_duration  # type: ignore[arg-type]


def test_what_is_not_known_is_left_out():
    found = figures(usage(), 2.0)
    assert found.total_duration == 2_000_000_000
    assert not isinstance(found.eval_duration, int)
    found = figures(usage(ttft_ms=500.0), 2.0)
    assert found.eval_duration == 1_500_000_000
    assert not isinstance(found.load_duration, int)


def test_a_call_is_complete_when_the_next_one_begins():
    calls = PendingCalls()
    calls.add(ToolCallStart(0, "f"))
    calls.add(ToolCallArguments(0, '{"a"'))
    assert calls.complete() == []
    calls.add(ToolCallArguments(0, ": 1}"))
    calls.add(ToolCallStart(1, "g"))
    assert calls.complete() == [(0, ("f", '{"a": 1}'))]
    assert calls.complete() == []
    assert calls.end() == [(1, ("g", ""))]
    assert calls.end() == []


def test_times_are_rfc_3339():
    assert timestamp(1_700_000_000) == "2023-11-14T22:13:20Z"
    assert timestamp().endswith("Z")
