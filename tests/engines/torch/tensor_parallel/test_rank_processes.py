"""Ranks as real processes: they compute, they die with the engine, and the engine with them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import EngineDied
from pdserve_engines.torch.tensor_parallel.leader import LeaderModel
from tests.engines.torch.checkpoints import VOCAB, checkpoint
from tests.engines.torch.driver import Driver, loaded

if TYPE_CHECKING:
    from pdserve_engines.torch.executor import TorchExecutor

pytestmark = pytest.mark.slow

PATIENCE = 1.0
PROMPT = random.Random(0).choices(range(VOCAB), k=21)


def ranks_of(executor: TorchExecutor) -> list[int]:
    model = executor._model
    assert isinstance(model, LeaderModel)
    return list(model.ranks.pids)


def divided(ranks: int = 2) -> TorchExecutor:
    options = {"rank_timeout": str(PATIENCE)}
    return loaded(checkpoint("llama")[0], tensor_parallel=ranks, options=options)


def check_for(executor: TorchExecutor, seconds: float) -> None:
    """As an idle core does."""
    interval = executor.health_interval
    assert interval is not None
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        executor.check_health()
        time.sleep(interval)


def lives(pid: int) -> bool:
    try:
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_tokens_are_those_of_one_rank_until_a_rank_dies_or_stands_still(
    how: signal.Signals,
) -> None:
    alone = loaded(checkpoint("llama")[0], options={"kernels": "torch"})
    driver = Driver(alone)
    wanted = driver.add(PROMPT)
    driver.finish([wanted], 6)
    alone.close()

    executor = divided()
    (rank,) = ranks_of(executor)
    driver = Driver(executor)
    found = driver.add(PROMPT)
    driver.finish([found], 6)
    assert found.output == wanted.output

    os.kill(rank, how)
    begun = time.monotonic()
    reason = "ended with signal 9" if how is signal.SIGKILL else r"no progress for 1 s; rank 1"
    with pytest.raises(EngineDied, match=rf"tensor parallel: .*{reason}"):
        driver.finish([found], 7)
    assert time.monotonic() - begun < 20
    assert not lives(rank)
    with pytest.raises(EngineDied, match="the ranks have ended"):
        driver.finish([found], 7)
    executor.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_without_work_is_noticed(how: signal.Signals) -> None:
    executor = divided()
    assert executor.info is not None
    own, rank = (one.pid for one in executor.info.ranks)
    assert (own, [rank]) == (os.getpid(), ranks_of(executor))
    check_for(executor, 2 * PATIENCE)  # a rank without work counts as alive

    os.kill(rank, how)
    begun = time.monotonic()
    reason = "ended with signal 9" if how is signal.SIGKILL else "no progress for 1 s; rank 1"
    with pytest.raises(EngineDied, match=rf"tensor parallel: .*{reason}"):
        check_for(executor, 20.0)
    assert time.monotonic() - begun < 10
    assert not lives(rank)
    with pytest.raises(EngineDied, match="the ranks have ended"):
        executor.check_health()
    executor.close()


def test_ranks_die_with_the_engine_process(tmp_path: Path) -> None:
    """However it dies."""
    program = textwrap.dedent(
        f"""
        import sys
        from pathlib import Path
        from tests.engines.torch.driver import loaded
        executor = loaded(Path({str(checkpoint("llama")[0])!r}), tensor_parallel=2)
        print(*executor._model.ranks.pids, flush=True)
        sys.stdin.read()
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as engine:
        assert engine.stdout is not None
        (rank,) = map(int, engine.stdout.readline().split())
        assert lives(rank)
        engine.kill()
    until = time.monotonic() + 10
    while lives(rank) and time.monotonic() < until:
        time.sleep(0.01)
    assert not lives(rank)
