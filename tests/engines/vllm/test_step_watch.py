"""A long step counts as progress while vLLM's workers compute, and only then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from pdserve_engines.vllm.step_watch import LONGEST, StepWatch, children_cpu_time


class Bench:
    def __init__(self) -> None:
        self.used = self.time = 0.0
        self.told = 0
        self.watch = StepWatch(self.tell, lambda: self.used, now=lambda: self.time)

    def tell(self) -> None:
        self.told += 1

    def look(self, used: float) -> int:
        """Told so far, after a second in which the workers used so much."""
        self.used += used
        self.time += 1.0
        self.watch.look()
        return self.told


def test_nothing_is_told_between_steps() -> None:
    bench = Bench()
    assert [bench.look(1.0) for _ in range(3)] == [0, 0, 0]


def test_busy_workers_are_progress_and_idle_ones_are_none() -> None:
    bench = Bench()
    bench.watch.begin()
    assert [bench.look(0.9) for _ in range(3)] == [0, 1, 2]  # the first look has no earlier one
    assert [bench.look(0.0) for _ in range(3)] == [2, 2, 2]
    assert bench.look(0.5) == 3
    bench.watch.end()
    assert bench.look(1.0) == 3


def test_a_step_of_ten_minutes_has_stalled_all_the_same() -> None:
    bench = Bench()
    bench.watch.begin()
    bench.time = LONGEST + 1
    assert [bench.look(1.0) for _ in range(3)] == [0, 0, 0]


def test_the_thread_looks_until_it_is_stopped() -> None:
    told = threading.Event()
    used = iter(range(1_000_000))
    watch = StepWatch(told.set, lambda: float(next(used)), interval=0.01)
    watch.begin()
    watch.start()
    assert told.wait(10.0)
    watch.stop()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_the_time_of_children_grows_while_they_compute_and_not_while_they_are_stopped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before = children_cpu_time()
        while children_cpu_time() < before + 0.2:  # ends with the test's own time limit
            pass
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        stopped = children_cpu_time()
        deadline = stopped + sum(os.times()[:2])
        while sum(os.times()[:2]) + stopped < deadline + 0.2:
            pass
        assert children_cpu_time() == stopped
    finally:
        child.kill()
        child.wait()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_what_children_start_and_wait_for_counts_while_it_runs_and_afterwards() -> None:
    """As a compiler does that a worker starts."""
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    waits = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {busy!r}])\n"
    command = [sys.executable, "-c", waits + "print('done', flush=True)\nsys.stdin.read()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        own = children_cpu_time(child.pid)
        while own < 0.2:  # its own child is busy now
            own = children_cpu_time(child.pid)
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        assert children_cpu_time(child.pid) == 0.0
        assert children_cpu_time() >= 0.5
        assert child.stdin is not None
        child.stdin.close()
