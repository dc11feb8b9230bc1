"""Figures and calls of Ollama's answers."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from pdserve.frontend.api.adapters.ollama_output import (
    OllamaAdapter,
    PendingCalls,
    figures,
    timestamp,
)
from pdserve.frontend.output.output_processor import OutputDelta
from pdserve.protocols.completion_responses import Served, Usage
from pdserve.protocols.ollama.answers import OllamaChatAnswer, OllamaGenerateAnswer
from pdserve.text.output_parts import ContentDelta, ToolCallArguments, ToolCallStart


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


@pytest.mark.parametrize(
    ("chat", "record"), [(True, OllamaChatAnswer), (False, OllamaGenerateAnswer)]
)
@pytest.mark.parametrize("text", ["hello", 'a "quoted"\n\\ \u2028 line', "é👍\x00", " "])
def test_a_line_of_text_is_what_its_record_would_be(chat: bool, record: Any, text: str):
    """It is written without one."""
    plan: Any = SimpleNamespace(logprobs=False)
    context: Any = SimpleNamespace(arrival=0.0, time=lambda: 0.0)
    adapter = OllamaAdapter('a "model"', context, chat=chat, plan=plan)
    quick, empty = OutputDelta(""), ContentDelta("")
    lines = [
        adapter.parts(parts, quick) for parts in ([ContentDelta(text)], [ContentDelta(text), empty])
    ]
    found = [msgspec.json.decode(line, type=record, strict=True) for line in lines]
    assert all(line.endswith(b"}\n") and line.count(b"\n") == 1 for line in lines)
    found[0].created_at = found[1].created_at
    assert found[0] == found[1]
    assert set(msgspec.json.decode(lines[0])) == set(msgspec.json.decode(lines[1]))
