"""The jobs that are remembered, and which of them are ended."""

from __future__ import annotations

from pdserve.planner.actuators.slurm.job_table import Ending, JobTable
from pdserve.planner.actuators.slurm.text import Job, is_live

A = Job("1", "RUNNING", "None", None, None, "a", "k")
WAITS = Job("2", "PENDING", "Resources", None, None, "b", "k")


def table(*jobs: Job, at: float = 100.0) -> JobTable:
    made = JobTable()
    made.update(jobs, at, at)
    return made


def test_a_job_that_is_younger_than_the_reading_stays() -> None:
    jobs = JobTable()
    jobs.add(WAITS, 101.0)
    jobs.update([], 100.0, 102.0)
    assert jobs.get("b") == WAITS
    jobs.update([], 103.0, 104.0)
    gone = jobs.get("b")
    assert gone is not None
    assert gone.state == "unknown to Slurm"


def test_a_mark_that_is_younger_than_the_reading_stays() -> None:
    """Else a worker got a second SIGTERM, which ends it at once."""
    jobs = table(A)
    jobs.add(A._replace(until=160.0), 101.0)
    jobs.update([A], 100.5, 102.0)
    assert jobs.get("a") == A._replace(until=160.0)
    jobs.update([A._replace(until=150.0)], 103.0, 104.0)
    assert jobs.get("a") == A._replace(until=150.0)


def test_what_ended_stays_for_a_while() -> None:
    jobs = table(A._replace(state="COMPLETED"))
    jobs.update([], 350.0, 350.0)
    assert jobs.get("a") is not None
    jobs.update([], 401.0, 401.0)
    assert jobs.get("a") is None


def test_the_second_job_of_a_change_is_withdrawn() -> None:
    second = WAITS._replace(id="10", change="a", reason="Dependency")
    jobs = table(second, A)
    assert jobs.get("a") == A
    assert list(jobs.endings(0.0)) == [Ending(second, kill=False)]


def test_ids_are_numbers() -> None:
    """As words, 10 would be before 9."""
    nine = WAITS._replace(id="9")
    assert table(WAITS._replace(id="10"), nine).get("b") == nine


def test_a_running_job_is_the_changes_job_before_an_ended_one() -> None:
    ended = A._replace(id="0", state="FAILED")
    assert table(ended, A).get("a") == A


def test_jobs_that_never_start_are_withdrawn() -> None:
    never = WAITS._replace(reason="PartitionTimeLimit")
    assert list(table(never, A).endings(0.0)) == [Ending(never, kill=False)]


def test_nothing_that_runs_is_ended_before_its_grace_is_over() -> None:
    jobs = table(A._replace(until=160.0), WAITS)
    assert list(jobs.endings(159.0)) == []
    (ending,) = jobs.endings(160.0)
    assert ending.kill
    assert ending.job.id == "1"


def test_a_withdrawn_job_is_not_killed_once_it_runs() -> None:
    (ending,) = table(WAITS._replace(until=160.0)).endings(0.0)
    assert not ending.kill


def test_live_jobs_are_counted_by_kind() -> None:
    jobs = table(A, WAITS, WAITS._replace(id="3", change="c", kind="other"))
    jobs.add(A._replace(change="d", state="FAILED"), 0.0)
    assert jobs.live("k") == 2
    assert all(is_live(job) for job in jobs if job.change != "d")
