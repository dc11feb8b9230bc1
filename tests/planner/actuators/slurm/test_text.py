"""Lines of Slurm 22.05, as its commands wrote them."""

from __future__ import annotations

import subprocess

import pytest

from pdserve.errors import ActuatorDenied, ActuatorExhausted, ActuatorTransient
from pdserve.planner.actuators.slurm.text import (
    Job,
    command_environ,
    comment,
    duration,
    failure,
    instance,
    never_starts,
    parse_jobs,
    parse_steps,
    script,
)

QUEUE = """\
2|PENDING|Dependency|N/A|5:00|pdserve:c1:aa:k
3|PENDING|PartitionConfig|N/A|5:00|pdserve:c1:bb:k
4|PENDING|Resources|1795792039|5:00|pdserve:c1:cc:k
1|RUNNING|None|1795791739|4:58|pdserve:c1:aa:k:1795791999
5|PENDING|PartitionTimeLimit|N/A|50:00|(null)
6|RUNNING|None|1795791739|4:58|mine | and: yours
7|RUNNING|None|1795791739|4:58|pdserve:c10:aa:k
"""


def job(state: str, reason: str = "None", **more: object) -> Job:
    base = Job("9", state, reason, None, None, "aa", "k")
    return base._replace(**more)  # type: ignore[arg-type]


def test_jobs_of_this_cluster_only() -> None:
    found = parse_jobs(QUEUE, "c1")
    assert [(one.id, one.change, one.until) for one in found] == [
        ("2", "aa", None),
        ("3", "bb", None),
        ("4", "cc", None),
        ("1", "aa", 1795791999.0),
    ]
    assert found[2] == Job("4", "PENDING", "Resources", 1795792039.0, 300.0, "cc", "k")


@pytest.mark.parametrize("until", [None, 1795791999.0])
def test_a_comment_is_read_as_it_was_written(until: float | None) -> None:
    words = comment("c:1", "a.b-1", "gpu", until)
    (found,) = parse_jobs(f"9|RUNNING|None|N/A|UNLIMITED|{words}\n", "c:1")
    assert (found.change, found.kind, found.until) == ("a.b-1", "gpu", until)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0:07", 7),
        ("4:58", 298),
        ("1:00:00", 3600),
        ("2-01:00:30", 2 * 86400 + 3630),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("NOT_SET", None),
        ("", None),
    ],
)
def test_times_left(text: str, seconds: float | None) -> None:
    assert duration(text) == seconds


def test_steps_by_name() -> None:
    assert parse_steps("10.0|pdserve-s2\n10.1|pdserve-s1\n10.extern|extern\n") == {
        "pdserve-s2": "10.0",
        "pdserve-s1": "10.1",
        "extern": "10.extern",
    }


@pytest.mark.parametrize(
    ("reason", "never"),
    [
        ("Resources", False),
        ("Priority", False),
        ("None", False),
        ("BeginTime", False),
        ("Licenses", False),
        ("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved", False),
        ("SomethingOfALaterRelease", False),
        ("PartitionConfig", True),
        ("PartitionTimeLimit", True),
        ("PartitionNodeLimit", True),
        ("QOSMaxCpuPerUserLimit", True),
        ("AssocGrpGRES", True),
        ("AssocMaxJobsLimit", True),
        ("ReqNodeNotAvail, UnavailableNodes:n1", True),
        ("JobHeldAdmin", True),
        ("BadConstraints", True),
        ("InvalidQOS", True),
    ],
)
def test_pending_jobs_that_wait_in_vain(reason: str, never: bool) -> None:
    assert never_starts(reason) is never


@pytest.mark.parametrize(
    ("one", "state", "reason"),
    [
        (job("PENDING", "Resources"), "pending", "Resources"),
        (job("PENDING"), "pending", "PENDING"),
        (job("PENDING", "Resources", until=9.0), "ending", "Resources"),
        (job("CONFIGURING"), "booting", ""),
        (job("RUNNING"), "booting", ""),
        (job("RUNNING", until=9.0), "ending", ""),
        (job("SUSPENDED"), "booting", ""),
        (job("COMPLETING"), "ending", ""),
        (job("COMPLETED"), "ended", ""),
        (job("CANCELLED", until=9.0), "ended", ""),
        (job("CANCELLED"), "failed", "CANCELLED; its output: /x.log"),
        (job("CANCELLED", "PartitionConfig"), "failed", "it never starts: PartitionConfig"),
        (job("FAILED", "NonZeroExitCode"), "failed", "FAILED: NonZeroExitCode"),
        (job("TIMEOUT", "TimeLimit"), "failed", "TIMEOUT: TimeLimit"),
        (job("NODE_FAIL"), "failed", "NODE_FAIL"),
        (job("OUT_OF_MEMORY"), "failed", "OUT_OF_MEMORY"),
        (job("PREEMPTED"), "failed", "PREEMPTED"),
    ],
)
def test_states_of_the_port(one: Job, state: str, reason: str) -> None:
    found = instance(one, 0.0, "/x.log")
    assert found.state == state
    assert found.reason.startswith(reason)


def test_what_is_expected() -> None:
    waits = instance(job("PENDING", "Resources", start=130.0, left=300.0), 100.0, "")
    assert (waits.expected, waits.hard_end) == (30.0, None)
    runs = instance(job("RUNNING", start=90.0, left=290.0), 100.0, "")
    assert (runs.expected, runs.hard_end) == (None, 290.0)
    assert instance(job("PENDING", start=90.0), 100.0, "").expected == 0.0


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", "pass"),
        ("Batch job submission failed: Socket timed out on send/recv operation", "pass"),
        ("Batch job submission failed: Zero Bytes were transmitted or received", "pass"),
        ("error: Munge encode failed: Failed to access socket", "pass"),
        ("Batch job submission failed: Invalid partition name specified", "denied"),
        ("Batch job submission failed: Requested node configuration is not available", "denied"),
        ("Access/permission denied", "denied"),
        ("Batch job submission failed: Job violates accounting/QOS policy", "limit"),
        ("srun: error: Unable to create step: More processors requested than permitted", "limit"),
    ],
)
def test_failures_are_sorted(words: str, kind: str) -> None:
    sorts = {"pass": ActuatorTransient, "denied": ActuatorDenied, "limit": ActuatorExhausted}
    error = failure("sbatch", words)
    assert type(error) is sorts[kind]
    assert error.message == f"sbatch: {words}"


def test_commands_see_nothing_that_changes_their_formats() -> None:
    environ = {"SLURM_CONF": "/etc/s", "SLURM_JOB_ID": "7", "SQUEUE_FORMAT": "%i", "HOME": "/root"}
    environ |= {"SBATCH_PARTITION": "x", "PDSERVE_ROLE": "planner", "SLURM_TIME_FORMAT": "relative"}
    assert command_environ(environ) == {
        "SLURM_CONF": "/etc/s",
        "HOME": "/root",
        "SLURM_TIME_FORMAT": "%s",
        "LC_ALL": "C.UTF-8",
    }


@pytest.mark.parametrize(("count", "status"), [("0", 7), ("", 7), ("1", 3)])
def test_a_job_that_is_started_again_does_nothing(count: str, status: int) -> None:
    text = script(["sh", "-c", "exit $1", "it's", "7"])
    done = subprocess.run(
        ["sh", "-s"],
        input=text,
        text=True,
        env={"PATH": "/usr/bin:/bin", "SLURM_RESTART_COUNT": count},
        capture_output=True,
        check=False,
    )
    assert done.returncode == status
    assert ("replaced" in done.stderr) is (status == 3)
