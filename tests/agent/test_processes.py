"""Real processes: they outlive who started them, and an id that is used again fools nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdserve.agent.processes import Started, SystemProcesses, read_stat
from tests.support.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SLEEP = ("sleep", "600")


def until(met: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not met():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


@pytest.fixture
def processes() -> SystemProcesses:
    return SystemProcesses()


@pytest.fixture
def sleeper(processes: SystemProcesses, tmp_path: Path) -> Iterator[Started]:
    started = processes.launch(SLEEP, {"PATH": os.environ["PATH"]}, tmp_path / "log")
    yield started
    processes.kill(started)
    until(lambda: not processes.runs(started))


def test_a_process_has_a_session_and_a_start_of_its_own(
    processes: SystemProcesses, sleeper: Started
) -> None:
    assert os.getsid(sleeper.pid) == sleeper.pid
    assert sleeper.begun > 0
    assert processes.runs(sleeper)
    assert SystemProcesses().runs(sleeper), "one that did not start it sees it, too"
    assert not SystemProcesses().runs(replace(sleeper, begun=sleeper.begun - 1))
    assert processes.status(sleeper) is None


def test_its_output_is_appended(processes: SystemProcesses, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    words = (sys.executable, "-c", "import sys; print('out'); sys.exit(3)")
    started = processes.launch(words, {}, log)
    until(lambda: not processes.runs(started))
    assert processes.status(started) == 3
    assert processes.status(started) is None, "told once: nothing is kept of what has ended"
    assert not processes.runs(started)
    assert log.read_text() == "before\nout\n"


def test_what_is_no_program_is_an_error(processes: SystemProcesses, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        processes.launch((str(tmp_path / "nowhere"),), {}, tmp_path / "log")


def test_signals(processes: SystemProcesses, sleeper: Started) -> None:
    processes.terminate(replace(sleeper, begun=sleeper.begun - 1, pid=2**22 + 1))
    assert processes.runs(sleeper)
    processes.terminate(sleeper)
    until(lambda: not processes.runs(sleeper))
    assert processes.status(sleeper) == -signal.SIGTERM


def test_it_is_found_by_a_word(processes: SystemProcesses, tmp_path: Path) -> None:
    word = f"--change=found-{os.getpid()}"
    code = "import sys, time; print('up', flush=True); time.sleep(600)"
    started = processes.launch((sys.executable, "-c", code, word), {}, tmp_path / "log")
    try:
        until(lambda: (tmp_path / "log").read_text() == "up\n")
        assert processes.find(word) == started
        assert processes.find(f"{word}x") is None
    finally:
        processes.kill(started)
        until(lambda: not processes.runs(started))


def test_a_child_that_is_left_is_seen_and_killed(
    processes: SystemProcesses, tmp_path: Path
) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    environ = {"PATH": os.environ["PATH"]}
    started = processes.launch((sys.executable, "-c", code), environ, tmp_path / "log")
    until(lambda: not processes.runs(started))
    assert processes.left_running([started]) == {started}
    earlier = Started(started.pid, started.begun + 10**6)
    assert not processes.left_running([earlier])
    processes.kill(started)
    until(lambda: not processes.left_running([started]))


def test_numbers_that_mean_everybody_are_nobody(processes: SystemProcesses) -> None:
    nobody = Started(0, 0)
    assert not processes.runs(nobody)
    assert not processes.left_running([nobody])
    processes.terminate(nobody)
    processes.kill(nobody)


def test_a_zombie_does_not_run() -> None:
    process = subprocess.Popen(("true",))
    try:
        until(lambda: "\nState:\tZ" in _status_file(process.pid))
        begun = _begun(process.pid)
        assert not SystemProcesses().runs(Started(process.pid, begun))
    finally:
        process.wait()


def _status_file(pid: int) -> str:
    with open(f"/proc/{pid}/status") as file:
        return file.read()


def _begun(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])


@pytest.mark.parametrize(
    ("text", "alive"),
    [
        ("7 (a b) c) S 1 7 5 0 -1 4194560 1 0 0 0 1 1 0 0 20 0 1 0 424242 1", True),
        ("7 (x) Z 1 7 5 0 -1 4194560 1 0 0 0 1 1 0 0 20 0 1 0 424242 1", False),
    ],
)
def test_a_line_of_proc(text: str, alive: bool) -> None:
    stat = read_stat(text)
    assert stat is not None
    assert (stat.session, stat.begun, stat.alive) == (5, 424242, alive)


def test_a_short_line_says_nothing() -> None:
    assert read_stat("7 (x) S 1") is None
