"""Steps of a real allocation: started, refused, ended, found again after both sides have died."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from pdserve.errors import ActuatorDenied, ActuatorExhausted, ActuatorTransient
from pdserve.planner.actuators.settings import CommandKind, Home
from pdserve.planner.actuators.slurm import SlurmConfig, SlurmSteps
from pdserve.testing.actuators.suite import ActuatorSuite
from tests.planner.actuators.slurm.labs import StepsLab, allocated
from tests.planner.actuators.workers import DEAF, FAILS, POLITE, until, write_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.slurm import Slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

KINDS = {
    "cpu": CommandKind(),
    "few": CommandKind(slots=1),
    "many": CommandKind(flags=("--cpus-per-task=17",)),
}


@pytest.fixture
def allocation(slurm: Slurm) -> Iterator[str]:
    with allocated(slurm) as job:
        yield job


@pytest.mark.long(one_in=4)
class TestSteps(ActuatorSuite):
    @pytest.fixture
    def lab(self, slurm: Slurm, allocation: str, tmp_path: Path) -> Iterator[StepsLab]:
        made = StepsLab(slurm, tmp_path, int(allocation))
        yield made
        made.close()


@pytest.fixture
def make(slurm: Slurm, allocation: str, tmp_path: Path) -> Callable[[], SlurmSteps]:
    """Makes actuators of that allocation."""
    config = SlurmConfig(
        directory=str(tmp_path),
        kinds=KINDS,
        program=write_program(tmp_path, POLITE),
        allocation=int(allocation),
    )
    return lambda: SlurmSteps(
        config, Home("c", ("--join=a:1",)), environ=slurm.environ, list_interval=0.05
    )


def srun_of(change: str) -> list[psutil.Process]:
    """The processes of `srun` for a change."""
    flag = f"--job-name=pdserve-{change}"
    found = [one for one in psutil.process_iter(["cmdline"]) if flag in (one.info["cmdline"] or ())]
    return [one for one in found if one.info["cmdline"][0] == "srun"]


async def test_a_step_per_change_and_every_planner_finds_it(make, allocation, tmp_path) -> None:
    steps = make()
    assert (await steps.start("cpu", "decode", "a")).state == "pending"
    several = await asyncio.gather(*(make().start("cpu", "decode", "a") for _ in range(3)))
    assert {one.change for one in several} == {"a"}
    runs = await until(steps, "a", "booting")
    assert runs.ref.startswith(f"{allocation}.")
    assert 200 < (runs.hard_end or 0) <= 300
    restarted = make()
    assert [one.ref for one in await restarted.list()] == [runs.ref]
    assert (await restarted.start("cpu", "decode", "a")).ref == runs.ref
    await restarted.stop("a", 30.0)
    await until(restarted, "a", "ended")
    assert "drained" in (tmp_path / "pdserve-a.log").read_text()
    assert (await make().start("cpu", "decode", "a")).state == "ended"


@pytest.mark.long(one_in=3)
async def test_steps_run_beside_each_other(make) -> None:
    steps = make()
    await asyncio.gather(*(steps.start("cpu", "decode", f"a{number}") for number in range(5)))
    for number in range(5):
        await until(steps, f"a{number}", "booting")
    for number in range(5):
        await steps.stop(f"a{number}", 30.0)
    for number in range(5):
        await until(steps, f"a{number}", "ended")


async def test_what_srun_refuses_has_failed_in_its_words(make) -> None:
    steps = make()
    await steps.start("many", "decode", "a")
    failed = await until(steps, "a", "failed")
    assert "More processors requested than permitted" in failed.reason


async def test_a_worker_that_fails_tells_its_last_line(make, tmp_path) -> None:
    steps = make()
    write_program(tmp_path, FAILS)
    await steps.start("cpu", "decode", "a")
    failed = await until(steps, "a", "failed")
    assert failed.reason.startswith("exit status 2: ")


async def test_slots_and_kinds(make) -> None:
    steps = make()
    await steps.start("few", "decode", "a")
    with pytest.raises(ActuatorExhausted, match="1 steps of kind few"):
        await steps.start("few", "decode", "b")
    with pytest.raises(ActuatorDenied, match="did you mean 'few'"):
        await steps.start("fex", "decode", "b")
    await steps.stop("a", 30.0)
    await steps.stop("never", 30.0)
    await until(steps, "a", "ended")


@pytest.mark.long(one_in=3)
async def test_a_step_outlives_its_srun_and_is_still_ended(make, tmp_path) -> None:
    steps = make()
    write_program(tmp_path, DEAF)
    await steps.start("cpu", "decode", "a")
    await until(steps, "a", "booting")
    for process in srun_of("a"):
        shell = process.parent()
        process.kill()
        if shell is not None and shell.name() == "sh":
            os.kill(shell.pid, signal.SIGKILL)
    runs = await until(make(), "a", "booting")
    assert runs.ref
    await steps.stop("a", 60.0)
    await until(steps, "a", "ending")
    restarted = make()
    await restarted.stop("a", 0.0)
    assert (await until(restarted, "a", "ended")).ref == runs.ref
    assert "TERM 2" not in (tmp_path / "pdserve-a.log").read_text()


async def test_a_change_whose_srun_was_never_started_keeps_no_slot(
    make, tmp_path, monkeypatch
) -> None:
    """The planner died between the record and the command."""
    steps = make()
    monkeypatch.setattr(steps, "_launch", died)
    with pytest.raises(ActuatorTransient):
        await steps.start("few", "decode", "a")
    successor = make()
    assert (await until(successor, "a", "pending")).ref == ""
    with pytest.raises(ActuatorExhausted):
        await successor.start("few", "decode", "b")
    long_ago = time.time() - 60.0
    os.utime(tmp_path / "pdserve-a.step", (long_ago, long_ago))
    assert (await until(successor, "a", "failed")).reason == "its srun was never started"
    assert (await successor.start("few", "decode", "b")).state == "pending"
    assert (await successor.start("few", "decode", "a")).state == "failed"


async def died(*arguments: object) -> None:
    raise ActuatorTransient("the planner died here")


@pytest.fixture
def waiting(slurm: Slurm, allocation: str, tmp_path: Path) -> Callable[[], SlurmSteps]:
    """Makes actuators whose `srun` waits for cores, as far as can be seen."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/srun").write_text("#!/bin/sh\nexec sleep 300\n")
    (tmp_path / "bin/srun").chmod(0o755)
    environ = slurm.environ | {"PATH": f"{tmp_path}/bin:{slurm.environ['PATH']}"}
    config = SlurmConfig(directory=str(tmp_path), kinds=KINDS, allocation=int(allocation))
    return lambda: SlurmSteps(config, Home("c"), environ=environ, list_interval=0.05)


def session_of(tmp_path: Path) -> list[psutil.Process]:
    """The shell of change `a` and its `srun`."""
    _, stat = (tmp_path / "pdserve-a.srun").read_text().split("\n", 1)
    shell = psutil.Process(int(stat.split()[0]))
    return [shell, *shell.children()]


async def test_a_step_that_waits_is_withdrawn(waiting, tmp_path) -> None:
    await waiting().start("few", "decode", "a")
    steps = waiting()
    assert (await until(steps, "a", "pending")).reason == "srun waits for a step"
    await asyncio.sleep(0.3)
    both = session_of(tmp_path)
    await steps.stop("a", 60.0)
    await until(waiting(), "a", "ended")
    assert psutil.wait_procs(both, 10.0)[1] == []
    assert (await steps.start("few", "decode", "b")).state == "pending"
    await steps.stop("b", 0.0)
    await until(steps, "b", "ended")


async def test_an_srun_that_is_killed_while_it_waits_has_failed(waiting, tmp_path) -> None:
    steps = waiting()
    await steps.start("few", "decode", "a")
    await until(steps, "a", "pending")
    await asyncio.sleep(0.3)
    for process in session_of(tmp_path):
        process.kill()
    failed = await until(waiting(), "a", "failed")
    assert failed.reason == "its srun is gone and has not told how it ended"


@pytest.mark.long(one_in=3)
async def test_of_another_hosts_srun_nothing_is_known(waiting, tmp_path) -> None:
    steps = waiting()
    await steps.start("few", "decode", "a")
    await asyncio.sleep(0.3)
    both = session_of(tmp_path)
    _, stat = (tmp_path / "pdserve-a.srun").read_text().split("\n", 1)
    (tmp_path / "pdserve-a.srun").write_text(f"another boot\n{stat}")
    for process in both:
        process.kill()
    for _ in range(3):
        assert (await until(steps, "a", "pending")).ref == ""
    await steps.stop("a", 0.5)
    await until(waiting(), "a", "ended")


async def test_the_end_of_the_allocation_is_that_of_its_steps(make, slurm, allocation) -> None:
    steps = make()
    await steps.start("cpu", "decode", "a")
    await until(steps, "a", "booting")
    slurm.run("scancel", allocation)
    assert (await until(steps, "a", "ended", "failed")).hard_end is None
    assert (await until(make(), "a", "ended", "failed")).change == "a"
