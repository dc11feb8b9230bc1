from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil

from pdserve.limits.process_usage import ProcessUsage, UsageReader, own_memory, process_state

if TYPE_CHECKING:
    from pathlib import Path

TREE = """
import subprocess, sys
kept = bytearray(50_000_000)
sum(range(3_000_000))
child = None
if len(sys.argv) > 1:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE)
print("ready", flush=True)
sys.stdin.read()
if child: child.communicate()
"""


def process(proc: Path, pid: int, *, pages: int, ticks: int, children: str = "") -> None:
    """A process as `/proc` shows it."""
    task = proc / str(pid) / "task" / str(pid)
    task.mkdir(parents=True, exist_ok=True)
    (task / "children").write_text(children)
    (proc / str(pid) / "statm").write_text(f"9999 {pages} 1 1 0 1 0\n")
    numbers = " ".join(["0"] * 10 + [str(ticks), "1", "2", "3"] + ["0"] * 20)
    (proc / str(pid) / "stat").write_text(f"{pid} (an engine) R) S {numbers}\n")


def test_a_process_and_what_it_started_are_summed(tmp_path):
    process(tmp_path, 7, pages=10, ticks=100, children="8 9 ")
    process(tmp_path, 8, pages=20, ticks=200, children="10")
    process(tmp_path, 10, pages=40, ticks=400)
    page, tick = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
    found = UsageReader(lambda: 0.0, tmp_path).read(7)  # 9 has just ended
    assert found == ProcessUsage(70 * page, (700 + 3 * 6) / tick)


def test_a_reading_is_kept_for_a_moment_and_another_process_begins_anew(tmp_path):
    now = 100.0
    reader = UsageReader(lambda: now, tmp_path)
    page = os.sysconf("SC_PAGE_SIZE")
    process(tmp_path, 7, pages=10, ticks=0)
    process(tmp_path, 8, pages=5, ticks=0)
    assert reader.read(7).memory == 10 * page
    process(tmp_path, 7, pages=11, ticks=0)
    assert reader.read(7).memory == 10 * page
    assert reader.read(8).memory == 5 * page
    assert reader.read(7).memory == 11 * page
    process(tmp_path, 7, pages=12, ticks=0, children="8")
    now += 1
    assert reader.read(7).memory == 12 * page
    now += 10
    assert reader.read(7).memory == 17 * page


def test_a_process_with_very_many_children_takes_no_longer(tmp_path):
    process(tmp_path, 1, pages=1, ticks=0, children=" ".join(map(str, range(2, 1000))))
    for pid in range(2, 1000):
        process(tmp_path, pid, pages=1, ticks=0)
    found = UsageReader(lambda: 0.0, tmp_path).read(1)
    assert found.memory == 64 * os.sysconf("SC_PAGE_SIZE")


def test_without_a_process_or_proc_there_is_nothing(tmp_path):
    reader = UsageReader(lambda: 0.0, tmp_path)
    assert reader.read(None) == reader.read(7) == ProcessUsage()


def test_it_agrees_with_what_others_read():
    """A process with a child; each holds 50 MB."""
    command = [sys.executable, "-c", TREE, TREE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tree:
        assert tree.stdin is not None
        assert tree.stdout is not None
        assert [tree.stdout.readline().strip() for _ in range(2)] == [b"ready"] * 2
        whole = psutil.Process(tree.pid)
        family = [whole, *whole.children(recursive=True)]
        assert len(family) == 2
        found = UsageReader(time.monotonic).read(tree.pid)
        memory = sum(one.memory_info().rss for one in family)
        cpu = sum(sum(one.cpu_times()) for one in family)
        tree.stdin.close()
    assert abs(found.memory - memory) < 5e6
    assert found.memory > 100e6
    assert abs(found.cpu - cpu) < 0.5


def test_own_memory_is_that_of_this_process():
    assert abs(own_memory() - psutil.Process().memory_info().rss) < 20e6


def test_a_process_runs_is_stopped_or_has_ended(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert process_state(child.pid) == "running"
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert process_state(child.pid) == "stopped"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_state(child.pid) == "ended"  # nobody has reaped it yet
    assert process_state(child.pid) == "ended"
    assert process_state(child.pid, tmp_path) == ""
