"""A worker process follows its engine process into death, and nobody else's signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest
import torch

from pdserve_engines.vllm.worker_processes import follow_engine, rewind_generators

LONG = 20.0
"""Seconds that no test reaches unless something hangs."""

WORKER = """
import os, signal
from pdserve_engines.vllm.worker_processes import follow_engine, rewind_generators
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


# ------------------------------------------------------------------ random numbers


@pytest.fixture
def _rewinding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Generator", torch.Generator)
    assert rewind_generators(None)


def draw(generator: torch.Generator) -> int:
    """As vLLM does for one sequence of a step (0.32.0, `v1/sample/ops/topk_topp_sampler.py`)."""
    return int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long).item())


def take_back(generator: torch.Generator) -> None:
    """As vLLM does after a chunk (`v1/worker/gpu_model_runner.py`)."""
    generator.set_offset(generator.get_offset() - 4)


@pytest.mark.usefixtures("_rewinding")
@pytest.mark.parametrize("chunks", [(0,), (1,), (0, 0, 3), (2, 5, 5, 9)])
def test_draws_are_those_without_chunks(chunks: tuple[int, ...]) -> None:
    """`chunks`: before which kept draws a number is drawn and taken back."""
    plain = torch.Generator(device="cpu").manual_seed(7)
    expected = [draw(plain) for _ in range(12)]
    generator = torch.Generator(device="cpu")
    generator.manual_seed(7)
    found = []
    for number in range(12):
        for _ in range(chunks.count(number)):
            assert draw(generator) == expected[number]
            take_back(generator)
        found.append(draw(generator))
    assert found == expected
