from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pdserve.planner.driver.decision_log import DecisionLog

if TYPE_CHECKING:
    from pathlib import Path


def test_each_line_has_its_time_in_the_file_and_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "decisions"
    log = DecisionLog(lambda: 0.0, path)
    log.add("m #1: 2 decode")
    assert list(log.lines) == ["1970-01-01T00:00:00Z m #1: 2 decode"]
    assert path.read_text() == "1970-01-01T00:00:00Z m #1: 2 decode\n"


def test_file_and_memory_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "decisions"
    log = DecisionLog(lambda: 0.0, path, most=1000)
    for number in range(300):
        log.add(f"line {number}")
    assert len(log.lines) == 200
    old = path.with_name("decisions.1")
    assert path.stat().st_size <= 1000
    assert old.stat().st_size <= 1000
    assert path.read_text().endswith("line 299\n")
    assert {one.name for one in tmp_path.iterdir()} == {"decisions", "decisions.1"}


def test_a_file_that_cannot_be_written_is_told_and_does_no_harm(tmp_path: Path) -> None:
    trouble: list[str] = []
    log = DecisionLog(lambda: 0.0, tmp_path / "no" / "such", on_trouble=trouble.append)
    log.add("one")
    assert "cannot be written: No such file" in trouble[-1]
    (tmp_path / "no").mkdir()
    log.add("two")
    assert trouble[-1] == ""
    assert len(log.lines) == 2


def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path: Path) -> None:
    trouble: list[str] = []
    os.mkfifo(tmp_path / "pipe")
    log = DecisionLog(lambda: 0.0, tmp_path / "pipe", on_trouble=trouble.append)
    log.add("one")
    assert "cannot be written: No such device" in trouble[-1]
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        log.add("two")
        assert trouble[-1] == ""
        assert os.read(reader, 100) == b"1970-01-01T00:00:00Z two\n"
    finally:
        os.close(reader)
