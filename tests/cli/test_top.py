"""`pdserve top`: frames, keys, and a server's dashboard."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pdserve.cli.top import Viewport, _Server, _Top, frame, keys_of
from tests.e2e.model import write_model
from tests.e2e.server import PATIENCE, serving

if TYPE_CHECKING:
    from pathlib import Path

HUNDRED = "\n".join(f"line {number}" for number in range(100))


def lines_of(drawn: str) -> list[str]:
    return [line.split("\x1b[K")[0].removeprefix("\x1b[H") for line in drawn.split("\n")]


def test_a_frame_draws_over_the_last_one():
    drawn = frame("one\ntwo", (80, 24))
    assert drawn.startswith("\x1b[Hone\x1b[K\ntwo\x1b[K\n\x1b[K\nq quits")
    assert drawn.endswith("\x1b[J")


def test_a_frame_never_scrolls_the_terminal():
    drawn = frame(HUNDRED, (20, 10))
    assert drawn.count("\n") < 10
    assert "line 6" in drawn
    assert "line 7" not in drawn
    assert "… 93 more lines" in drawn


def test_long_lines_are_cut():
    drawn = frame("x" * 200, (20, 10))
    assert "x" * 19 in drawn
    assert "x" * 20 not in drawn


@pytest.mark.parametrize(
    ("keys", "first"),
    [
        (["j", "j"], "line 2"),
        (["\x1b[B", "\x1b[A"], "line 0"),
        (["\x1b[6~"], "line 20"),
        (["G"], "line 93"),
        (["G", "j", "k"], "line 92"),
        (["G", "g"], "line 0"),
        (["l"], ""),
    ],
)
def test_keys_scroll(keys: list[str], first: str):
    view = Viewport()
    for key in keys:
        assert view.press(key)
        drawn = frame(HUNDRED, (20, 10), view)
    assert lines_of(drawn)[0] == first or key == "l"


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        ("", []),
        ("jj", ["j", "j"]),
        ("\x1b[B\x1b[B\x1bOAq", ["\x1b[B", "\x1b[B", "\x1bOA", "q"]),
        ("\x1b[6~G\n", ["\x1b[6~", "G", "\n"]),
        ("\x1b[1;5Bk", ["\x1b[1;5B", "k"]),
    ],
)
def test_a_read_may_bring_several_keys(typed: str, keys: list[str]):
    assert keys_of(typed) == keys


def test_keys_that_come_together_all_count():
    read, write = os.pipe()
    top = _Top(_Server("http://127.0.0.1:9"))
    try:
        os.write(write, b"jj\x1b[Bx")
        top._on_key(read)
    finally:
        os.close(read)
        os.close(write)
    assert top._view.line == 3


def test_columns_beyond_the_terminal_can_be_seen():
    view = Viewport()
    assert view.press("l")
    assert lines_of(frame("abc" + "-" * 30 + "END", (20, 10), view))[0].startswith("-")
    assert view.press("l")
    assert lines_of(frame("abc" + "-" * 30 + "END", (20, 10), view))[0].endswith("END")


def test_other_keys_do_not_scroll():
    assert not Viewport().press("q")


def test_a_server_that_is_no_cluster_has_a_dashboard(tmp_path: Path):
    with serving(write_model(tmp_path / "tiny"), "--engine", "instant") as server:
        command = [sys.executable, "-m", "pdserve", "top", "--url", server.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                shown = [process.stdout.readline() for _ in range(12)]
            finally:
                process.kill()
                process.wait(PATIENCE)
    assert shown[0] == f"{server.url} is ok\n"
    assert any(line.startswith("TTFT") for line in shown)
    assert any(line.startswith("KV cache") for line in shown)
