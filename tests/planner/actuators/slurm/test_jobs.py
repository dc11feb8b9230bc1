"""Jobs of a real Slurm: started, waiting, cancelled, forgotten, ended in time."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import ActuatorDenied, ActuatorExhausted, ActuatorTransient
from pdserve.planner.actuators.settings import CommandKind, Home
from pdserve.planner.actuators.slurm import SlurmConfig, SlurmJobs
from pdserve.testing.actuators.suite import ActuatorSuite
from tests.planner.actuators.slurm.labs import JobsLab, end_jobs
from tests.planner.actuators.workers import (
    COUNTS,
    DEAF,
    FAILS,
    POLITE,
    find,
    read,
    until,
    workers_of,
    write_program,
)
from tests.support.slurm import Slurm, why_not

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KINDS = {
    "cpu": CommandKind(flags=("--time=5",)),
    "few": CommandKind(flags=("--time=5",), slots=1),
    "many": CommandKind(flags=("--cpus-per-task=17",)),
    "long": CommandKind(flags=("--partition=short", "--time=5")),
    "nowhere": CommandKind(flags=("--partition=nowhere",)),
    "brief": CommandKind(flags=("--time=1",)),
}
clusters = (f"c{number}" for number in itertools.count())


def maker(slurm: Slurm, folder: Path, cluster: str) -> Callable[[], SlurmJobs]:
    """Makes actuators whose workers are a few lines of shell."""
    config = SlurmConfig(directory=str(folder), kinds=KINDS, program=write_program(folder, POLITE))
    environ = slurm.environ

    def make(*, acts: bool = True) -> SlurmJobs:
        home = Home(cluster, ("--join=127.0.0.1:1",), acts=acts)
        return SlurmJobs(config, home, environ=environ, list_interval=0.05, start_interval=0.0)

    return make


@pytest.fixture
def make(slurm: Slurm, tmp_path: Path) -> Iterator[Callable[[], SlurmJobs]]:
    """Makes actuators of one cluster; what is left of its jobs ends with the test."""
    cluster = next(clusters)
    yield maker(slurm, tmp_path, cluster)
    end_jobs(slurm, cluster)


@pytest.mark.long(one_in=4)
class TestJobs(ActuatorSuite):
    @pytest.fixture
    def lab(self, slurm: Slurm, tmp_path: Path) -> Iterator[JobsLab]:
        made = JobsLab(slurm, tmp_path)
        yield made
        made.close()


async def test_a_job_per_change_and_every_planner_finds_it(make, slurm, tmp_path) -> None:
    jobs = make()
    first = await jobs.start("cpu", "decode", "a-1")
    assert (first.state, first.kind, first.actuator) == ("pending", "cpu", "slurm")
    assert (await jobs.start("cpu", "decode", "a-1")).ref == first.ref
    runs = await until(jobs, "a-1", "booting")
    assert (runs.ref, runs.node) == (first.ref, None)
    assert 200 < (runs.hard_end or 0) <= 300
    restarted = make()
    assert (await restarted.start("cpu", "decode", "a-1")).ref == first.ref
    assert [one.change for one in await restarted.list()] == ["a-1"]
    words = await told(tmp_path / "pdserve-a-1.log", "--change")
    assert words.split() == ["--join=127.0.0.1:1", "--role=worker", "--mode=decode", "--change=a-1"]

    await restarted.stop("a-1", 30.0)
    ended = await until(restarted, "a-1", "ended")
    assert ended.reason == ""
    assert (await restarted.start("cpu", "decode", "a-1")).state == "ended"
    assert "drained" in (tmp_path / "pdserve-a-1.log").read_text()
    count = slurm.run("squeue", "--noheader", "--states=all", "--name=pdserve-a-1").stdout
    assert len(count.splitlines()) == 1


async def told(log: Path, words: str) -> str:
    """Waits until an output has these words."""
    for _ in range(300):
        if words in (text := read(log)):
            return text
        await asyncio.sleep(0.1)
    raise AssertionError(f"{log} never said {words}")


async def test_starts_at_the_same_time_are_one(make) -> None:
    jobs = make()
    several = await asyncio.gather(*(jobs.start("cpu", "decode", "a") for _ in range(4)))
    assert len({one.ref for one in several}) == 1


@pytest.mark.long(one_in=3)
async def test_a_lost_answer_makes_no_second_life(make, slurm, monkeypatch) -> None:
    """The order was taken and its answer lost; another planner repeats it without looking."""
    one, other = make(), make()
    await other.list()
    other._listing.interval = 1000.0
    first = await one.start("cpu", "decode", "a")
    await until(one, "a", "booting")
    second = await other.start("cpu", "decode", "a")
    assert second.ref != first.ref
    other._listing.interval = 0.0
    found = await until(other, "a", "booting")
    assert found.ref == first.ref

    def state() -> str:
        return slurm.run("squeue", "-h", "--states=all", "-j", second.ref, "-o%T").stdout.strip()

    for _ in range(100):
        await one.list()
        if state() == "CANCELLED":
            break
        await asyncio.sleep(0.1)
    assert state() == "CANCELLED"
    assert (await until(one, "a", "booting")).ref == first.ref


async def test_what_can_never_start_fails_with_slurms_reason(make) -> None:
    jobs = make()
    for kind in ("many", "long"):
        await jobs.start(kind, "aggregated", kind)
        failed = await until(jobs, kind, "failed")
        assert failed.reason.startswith("it never starts: Partition")
        assert (await jobs.start(kind, "aggregated", kind)).state == "failed"


async def test_a_planner_that_advises_withdraws_nothing(make, slurm) -> None:
    advises = make(acts=False)
    await advises.start("many", "aggregated", "a")
    for _ in range(20):
        waits = await until(advises, "a", "pending")
        if waits.reason.startswith("Partition"):
            break
        await asyncio.sleep(0.1)
    assert (await until(advises, "a", "pending")).ref == waits.ref
    assert "PENDING" in slurm.run("squeue", "-h", "-j", waits.ref, "-o%T").stdout
    await until(make(), "a", "failed")


async def test_a_full_cluster_is_waited_for_and_can_be_left(make, slurm) -> None:
    jobs = make()
    filler = slurm.run(
        "sbatch", "--parsable", "--exclusive", "--time=2", "--output=/dev/null", "--wrap=sleep 100"
    )
    try:
        await jobs.start("cpu", "decode", "a")
        for _ in range(100):
            waits = await until(jobs, "a", "pending")
            if waits.reason in ("Resources", "Priority") and waits.expected is not None:
                break
            await asyncio.sleep(0.1)
        assert 0 < (waits.expected or 0) <= 120
        await jobs.stop("a", 30.0)
        assert (await until(jobs, "a", "ended")).ref == waits.ref
    finally:
        slurm.run("scancel", "--signal=KILL", filler.stdout.strip())


async def test_refusals_are_in_slurms_words(make) -> None:
    jobs = make()
    with pytest.raises(ActuatorDenied, match="Invalid partition name specified"):
        await jobs.start("nowhere", "decode", "a")
    with pytest.raises(ActuatorDenied, match="no kind 'cpv'; did you mean 'cpu'"):
        await jobs.start("cpv", "decode", "a")
    await jobs.start("few", "decode", "a")
    with pytest.raises(ActuatorExhausted, match="1 jobs of kind few run or wait already"):
        await jobs.start("few", "decode", "b")
    assert [one.change for one in await jobs.list()] == ["a"]


async def test_a_job_that_somebody_cancels_has_failed(make, slurm) -> None:
    jobs = make()
    ref = (await jobs.start("cpu", "decode", "a")).ref
    await until(jobs, "a", "booting")
    slurm.run("scancel", ref)
    assert (await until(jobs, "a", "failed")).reason.startswith("CANCELLED; its output: /")


async def test_a_worker_that_fails_says_where_its_words_are(make, tmp_path) -> None:
    jobs = make()
    write_program(tmp_path, FAILS)
    await jobs.start("cpu", "decode", "a")
    failed = await until(jobs, "a", "failed")
    assert failed.reason == f"FAILED: NonZeroExitCode; its output: {tmp_path}/pdserve-a.log"
    assert "no model" in (tmp_path / "pdserve-a.log").read_text()


@pytest.mark.long(one_in=3)
async def test_a_worker_that_does_not_end_is_told_once_and_killed_after_its_grace(
    make, slurm, tmp_path
) -> None:
    jobs = make()
    write_program(tmp_path, DEAF)
    await jobs.start("cpu", "decode", "a")
    await told(tmp_path / "pdserve-a.log", "--change=a")
    await until(jobs, "a", "booting")
    await jobs.stop("a", 100.0)
    await jobs.stop("a", 200.0)
    restarted = make()
    assert (await until(restarted, "a", "ending")).ref
    assert await told(tmp_path / "pdserve-a.log", "TERM 1")
    assert "TERM 2" not in (tmp_path / "pdserve-a.log").read_text()
    await restarted.stop("a", 0.5)
    await until(restarted, "a", "ended")
    assert "TERM 2" in (tmp_path / "pdserve-a.log").read_text()
    assert "idle" in slurm.run("sinfo", "--noheader", "--format=%T").stdout


async def test_a_planner_that_dies_before_its_mark_has_not_ended_the_worker(
    make, tmp_path, monkeypatch
) -> None:
    """Its successor tells the worker again, and a second SIGTERM would end it undrained."""
    jobs = make()
    write_program(tmp_path, COUNTS)
    await jobs.start("cpu", "decode", "a")
    await told(tmp_path / "pdserve-a.log", "--change=a")
    await until(jobs, "a", "booting")
    monkeypatch.setattr(jobs, "_mark", died)
    with pytest.raises(ActuatorTransient):
        await jobs.stop("a", 100.0)
    successor = make()
    assert (await until(successor, "a", "booting")).ref
    await successor.stop("a", 100.0)
    await told(tmp_path / "pdserve-a.log", "TERM 1")
    assert (await until(successor, "a", "ending")).ref
    assert "TERM 2" not in read(tmp_path / "pdserve-a.log")
    assert len(workers_of(tmp_path, "a")) == 1


async def died(*arguments: object) -> None:
    raise ActuatorTransient("the planner died here")


async def test_stop_of_what_is_not_there(make) -> None:
    await make().stop("never", 1.0)


async def test_no_requeue(make, slurm) -> None:
    jobs = make()
    ref = (await jobs.start("cpu", "decode", "a")).ref
    await until(jobs, "a", "booting")
    done = slurm.run("scontrol", "requeue", ref)
    assert "disabled" in done.stdout + done.stderr
    assert (await until(jobs, "a", "booting")).ref == ref


@pytest.mark.long
async def test_no_second_life_by_force(make, slurm) -> None:
    """An administrator can have any job requeued; Slurm starts it again after two minutes."""
    jobs = make()
    ref = (await jobs.start("cpu", "decode", "a")).ref
    await until(jobs, "a", "booting")
    slurm.run("scontrol", "update", f"JobId={ref}", "Requeue=1")
    assert slurm.run("scontrol", "requeue", ref).returncode == 0
    waits = await until(jobs, "a", "pending")
    assert waits.ref == ref
    await asyncio.sleep(waits.expected or 0.0)
    failed = await until(jobs, "a", "failed")
    assert failed.reason.startswith("FAILED: NonZeroExitCode")


@pytest.fixture
def other_slurm(tmp_path: Path) -> Iterator[Slurm]:
    """One whose controller may be stopped: all that a test starts has to end with it."""
    if (why := why_not()) is not None:
        pytest.skip(why)
    (tmp_path / "slurm").mkdir()
    with Slurm(tmp_path / "slurm", cpus=4, kill_wait=2) as slurm:
        yield slurm


async def test_a_controller_that_restarts_is_not_the_end_of_jobs(other_slurm, tmp_path) -> None:
    slurm = other_slurm
    make = maker(slurm, tmp_path, "c")
    jobs = make()
    ref = (await jobs.start("cpu", "decode", "a")).ref
    await until(jobs, "a", "booting")
    slurm.stop_controller()
    try:
        await asyncio.sleep(0.1)
        with pytest.raises(ActuatorTransient, match="squeue: "):
            await jobs.list()
        jobs._listing.interval = 1000.0  # as after five seconds: it does not ask again
        with pytest.raises(ActuatorTransient):
            await jobs.list()
        with pytest.raises(ActuatorTransient):
            await jobs.start("cpu", "decode", "b")
    finally:
        slurm.start_controller()
    jobs._listing.interval = 0.0
    assert (await until(jobs, "a", "booting")).ref == ref
    restarted = make()
    assert (await until(restarted, "a", "booting")).ref == ref
    assert await find(restarted, "b") is None
    await restarted.stop("a", 0.0)
    await until(restarted, "a", "ended")


@pytest.mark.long
async def test_a_time_limit_drains_and_is_told_as_such(make, tmp_path) -> None:
    """Slurm's shortest limit is a minute, and it looks every half."""
    jobs = make()
    write_program(tmp_path, DEAF)
    await jobs.start("brief", "decode", "a")
    runs = await until(jobs, "a", "booting")
    assert 0 < (runs.hard_end or 0) <= 60
    await asyncio.sleep(60)
    failed = await until(jobs, "a", "failed")
    assert failed.reason.startswith("TIMEOUT: TimeLimit")
    assert "TERM 1" in (tmp_path / "pdserve-a.log").read_text()
