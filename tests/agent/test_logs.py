"""Logs of workers stay bounded, and their last lines are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.agent.logs import last_line, rotate

if TYPE_CHECKING:
    from pathlib import Path


def test_a_long_log_is_emptied_while_it_is_written(tmp_path: Path) -> None:
    log, older = tmp_path / "a.log", tmp_path / "a.log.1"
    with log.open("ab", buffering=0) as worker:
        worker.write(b"x" * 100)
        assert not rotate(log, older, 100)
        worker.write(b"y")
        assert rotate(log, older, 100)
        worker.write(b"after")
    assert log.read_bytes() == b"after"
    assert older.read_bytes() == b"x" * 99 + b"y"


def test_of_a_log_that_grows_faster_than_it_is_copied_only_the_end_is_kept(tmp_path: Path) -> None:
    log, older = tmp_path / "a.log", tmp_path / "a.log.1"
    log.write_bytes(b"x" * 1000 + b"end")
    assert rotate(log, older, 100)
    assert older.read_bytes() == b"x" * 97 + b"end"
    assert log.read_bytes() == b""


def test_no_log_is_not_long(tmp_path: Path) -> None:
    assert not rotate(tmp_path / "a.log", tmp_path / "a.log.1")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"", ""),
        (b"one\n  two  three \n\n", "two three"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"a" * 9000, "a" * 300),
    ],
)
def test_the_last_line(tmp_path: Path, text: bytes, line: str) -> None:
    (tmp_path / "a.log").write_bytes(text)
    assert last_line(tmp_path / "a.log") == line


def test_a_log_that_is_not_there_has_no_line(tmp_path: Path) -> None:
    assert last_line(tmp_path / "a.log") == ""
