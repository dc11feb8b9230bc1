"""Lines of Slurm 22.05, as its commands wrote them."""

from __future__ import annotations

import signal
import subprocess
import time
from typing import TYPE_CHECKING

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
    told_once,
)

if TYPE_CHECKING:
    from pathlib import Path

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
        ("ReqNodeNotAvail, UnavailableNodes:n1", False),
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


COUNTS = """\
trap 'echo "TERM $((++count))" >>"$0.log"' TERM
echo ready >>"$0.log"
while [ ! -e "$0.stop" ]; do sleep 0.02; done
exit 7
"""


def started(folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """A shell of `told_once` whose command counts its signals; it ends when `.stop` appears."""
    worker = folder / "worker"
    worker.write_text(COUNTS)
    text = told_once(["bash", str(worker), "it's"])
    return subprocess.Popen(("sh", "-c", text)), folder / "worker.log"


def until_said(log: Path, words: str) -> None:
    end = time.monotonic() + 30.0
    while not log.exists() or words not in log.read_text():
        assert time.monotonic() < end, words
        time.sleep(0.02)


def test_a_worker_is_told_once_however_often_its_shell_is(tmp_path: Path) -> None:
    shell, log = started(tmp_path)
    until_said(log, "ready")
    for _ in range(5):
        shell.send_signal(signal.SIGURG)
        time.sleep(0.05)
    until_said(log, "TERM 1")
    (tmp_path / "worker.stop").touch()
    assert shell.wait(30.0) == 7
    assert "TERM 2" not in log.read_text()


def test_slurms_own_signal_is_not_doubled(tmp_path: Path) -> None:
    """Slurm sends SIGTERM to all processes; the worker has got its own."""
    shell, log = started(tmp_path)
    until_said(log, "ready")
    shell.send_signal(signal.SIGTERM)
    (tmp_path / "worker.stop").touch()
    assert shell.wait(30.0) == 7
    assert "TERM" not in log.read_text()


@pytest.mark.parametrize("delay", [0.0, 0.002, 0.005, 0.01, 0.02])
def test_no_signal_is_lost_while_the_worker_starts(tmp_path: Path, delay: float) -> None:
    """It ends by it, before it can count it, or counts it."""
    text = told_once(["sh", "-c", "sleep 60"]).replace("worker=$!", "worker=$!\necho on")
    shell = subprocess.Popen(("sh", "-c", text), stdout=subprocess.PIPE)
    assert shell.stdout is not None
    shell.stdout.readline()
    time.sleep(delay)
    shell.send_signal(signal.SIGURG)
    assert shell.wait(30.0) == 128 + signal.SIGTERM
    shell.stdout.close()


def test_a_command_that_is_not_there_ends_with_its_status(tmp_path: Path) -> None:
    done = subprocess.run(
        ("sh", "-c", told_once([str(tmp_path / "none")])), check=False, capture_output=True
    )
    assert done.returncode == 127
    assert b"none" in done.stderr
