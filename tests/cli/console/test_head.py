"""The lines on top, for any width."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from pdserve.cli.console.head import as_numbers, degraded_lines, head_lines, milliseconds, rate
from pdserve.cli.console.overview import Overview, Traffic

BUSY = Overview(
    "cluster production, 12 nodes: llama-70b-instruct",
    10.0,
    Traffic(
        1234.5,
        12.0,
        1_234_567.0,
        98_765.0,
        100,
        40,
        Counter({0.1: 50, 0.5: 50}),
        Counter({0.01: 100, float("inf"): 1}),
        {"both": (99, 1), "ttft": (100, 0), "itl": (99, 1)},
    ),
    running=512,
    waiting=64,
    held=1000,
    blocks=1_048_576,
    blocks_used=900_000,
    degraded=[
        ("worker-17", "kv_transfer: KV with p goes over tcp: no shm; mount /dev/shm of both")
    ],
)
WORDS = (
    *("1,234/s", "errors 12.0/s", "running 512", "waiting 64", "held 1000", "in 1,234,567/s"),
    *("out 98,765/s", "cached 60%", "p50 100 ms", "p99 492 ms", "86% of 1048576 blocks"),
    *("all 99.0%", "TTFT 100.0%", "ITL 99.0%", "(last 10 s)"),
)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_nothing_is_cut_whatever_the_width(width: int) -> None:
    lines = [*head_lines(BUSY, width), *degraded_lines(BUSY, width)]
    assert max(map(len, lines)) <= width
    for word in WORDS:
        assert any(word in line for line in lines), word
    whole = " ".join(" ".join(lines).split())
    assert "worker-17: kv_transfer" in whole
    assert "mount /dev/shm of both" in whole


def test_a_usual_terminal_has_room_below_it() -> None:
    assert len(head_lines(BUSY, 80)) == 7
    assert len(head_lines(BUSY, 60)) <= 9


def test_what_is_not_known_is_no_number() -> None:
    text = "\n".join(head_lines(Overview("x")))
    assert "TTFT      p50 -   p99 -" in text
    assert "KV cache  -" in text
    assert "SLO" not in text


def test_names_cannot_steer_the_terminal() -> None:
    evil = Overview("a\x1b[2Jb", degraded=[("n\x1b", "why\nthen\x07")])
    assert head_lines(evil)[0] == "a[2Jb  (now)"
    assert degraded_lines(evil) == ["! n: why then"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.0123, "12.3 ms"), (0.5, "500 ms"), (9.9, "9900 ms"), (12.34, "12.3 s")],
)
def test_latencies_have_three_digits(seconds: float | None, text: str) -> None:
    assert milliseconds(seconds) == text


def test_rates_have_about_three_digits() -> None:
    assert [rate(value) for value in (0, 0.04, 99.94, 1234.6)] == ["0.0", "0.0", "99.9", "1,235"]


def test_programs_get_plain_numbers() -> None:
    found = json.loads(json.dumps(as_numbers(BUSY)))
    assert found["slo_kept"] == {"both": 0.99, "ttft": 1.0, "itl": 0.99}
    assert found["ttft_p50"] == pytest.approx(0.1)
    empty = json.loads(json.dumps(as_numbers(Overview())))
    assert empty["ttft_p50"] is None
    assert set(found) == set(empty)
