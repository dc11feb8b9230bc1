"""A worker process follows its engine process into death, and nobody else's signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil

from pdserve_engines.vllm.worker_processes import follow_engine

LONG = 20.0
"""Seconds that no test reaches unless something hangs."""

WORKER = """
import os, signal
from pdserve_engines.vllm.worker_processes import follow_engine
print(follow_engine(None, os.getppid()), os.getpid(), flush=True)
while True:
    signal.pause()
"""
ENGINE = f"""
import signal, subprocess, sys
subprocess.Popen([sys.executable, "-c", {WORKER!r}])
while True:
    signal.pause()
"""


def test_a_worker_is_killed_with_its_engine_and_not_by_signals_to_the_group():
    with subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        follows, pid = engine.stdout.readline().split()
        worker = psutil.Process(int(pid))
        assert follows == b"True"
        worker.send_signal(signal.SIGINT)
        worker.send_signal(signal.SIGTERM)
        # A signal that is not ignored would have ended it before this one is taken.
        worker.send_signal(signal.SIGSTOP)
        while worker.status() != psutil.STATUS_STOPPED:
            assert worker.is_running()
        engine.kill()
        engine.wait(LONG)
        gone, _ = psutil.wait_procs([worker], LONG)
        assert gone or worker.status() == psutil.STATUS_ZOMBIE


def test_other_processes_are_left_alone():
    before = signal.getsignal(signal.SIGTERM)
    assert not follow_engine(None, os.getpid())
    assert signal.getsignal(signal.SIGTERM) is before
