"""Steps of a real allocation: started, refused, ended, found again after both sides have died."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from pdserve.errors import ActuatorDenied, ActuatorExhausted
from pdserve.planner.actuators.settings import CommandKind, Home
from pdserve.planner.actuators.slurm import SlurmConfig, SlurmSteps
from tests.planner.actuators.slurm.real import DEAF, FAILS, POLITE, until, write_program

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
    """Four cores of the node."""
    done = slurm.run("salloc", "--no-shell", "--ntasks=1", "--cpus-per-task=4", "--time=5")
    job = done.stderr.split()[-1]
    assert job.isdecimal(), done.stderr
    yield job
    slurm.run("scancel", job)
    slurm.until(lambda: not slurm.run("squeue", "-h", "-j", job, "-tR,CG").stdout, "released")


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


async def test_the_end_of_the_allocation_is_that_of_its_steps(make, slurm, allocation) -> None:
    steps = make()
    await steps.start("cpu", "decode", "a")
    await until(steps, "a", "booting")
    slurm.run("scancel", allocation)
    assert (await until(steps, "a", "ended", "failed")).hard_end is None
    assert (await until(make(), "a", "ended", "failed")).change == "a"
