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
    assert log.unwritten
    assert not path.exists(), "the caller does not wait for the disk"
    assert log.write() == ""
    assert path.read_text() == "1970-01-01T00:00:00Z m #1: 2 decode\n"
    assert not log.unwritten


def test_without_a_file_nothing_waits_for_one() -> None:
    log = DecisionLog(lambda: 0.0)
    log.add("one")
    assert not log.unwritten
    assert log.write() == ""


def test_file_and_memory_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "decisions"
    log = DecisionLog(lambda: 0.0, path, most=1000)
    for number in range(300):
        log.add(f"line {number}")
        if number % 7 == 0 or number == 299:
            log.write()
    assert len(log.lines) == 200
    old = path.with_name("decisions.1")
    assert path.stat().st_size <= 1000
    assert old.stat().st_size <= 1000
    assert path.read_text().endswith("line 299\n")
    assert {one.name for one in tmp_path.iterdir()} == {"decisions", "decisions.1"}


def test_a_file_that_cannot_be_written_is_told_and_gets_its_lines_later(tmp_path: Path) -> None:
    log = DecisionLog(lambda: 0.0, tmp_path / "no" / "such")
    for number in range(250):
        log.add(f"line {number}")
        if number % 100 == 0:
            assert "cannot be written: No such file" in log.write()
    assert log.unwritten
    (tmp_path / "no").mkdir()
    assert log.write() == ""
    written = (tmp_path / "no" / "such").read_text().splitlines()
    assert [line.rpartition(" ")[2] for line in written] == [str(n) for n in range(50, 250)]


def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    log = DecisionLog(lambda: 0.0, tmp_path / "pipe")
    log.add("one")
    assert "cannot be written: No such device" in log.write()
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        log.add("two")
        assert log.write() == ""
        assert os.read(reader, 100) == b"1970-01-01T00:00:00Z one\n1970-01-01T00:00:00Z two\n"
    finally:
        os.close(reader)
