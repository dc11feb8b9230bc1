"""Reads what Slurm's commands write, and writes what they read. Pure.

Only formats with separators are used: whether a command can write JSON depends on how Slurm was
built. Verified with Slurm 22.05.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final, NamedTuple

from pdserve.errors import ActuatorDenied, ActuatorError, ActuatorExhausted, ActuatorTransient
from pdserve.messages.planner import Instance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.ids import Seconds

__all__ = [
    "JOB_FORMAT",
    "STEP_FORMAT",
    "TELL",
    "Job",
    "command_environ",
    "comment",
    "duration",
    "failure",
    "instance",
    "is_live",
    "never_starts",
    "parse_jobs",
    "parse_steps",
    "script",
    "told_once",
]

JOB_FORMAT: Final = "%i|%T|%r|%S|%L|%k"
"""Id, state, reason, start, time left, comment. The comment is last: those of other people's jobs
may have separators in them."""
STEP_FORMAT: Final = "%i|%j"
TELL: Final = "URG"
"""The signal that makes a worker's shell send it SIGTERM, once. Slurm sends SIGTERM itself to all
processes of a job: the shell must not double that. All others ignore this one."""

_ONCE: Final = """\
words() {{ tr '\\0' ' ' <"/proc/$1/cmdline"; }}
tell() {{
  while [ "$(words "$worker")" = "$(words $$)" ]; do sleep 0.02; done
  kill -TERM "$worker"
}}
worker= told=
trap : TERM
trap 'trap : {signal}; if [ "$worker" ]; then tell; else told=1; fi' {signal}
{command} &
worker=$!
[ -z "$told" ] || tell
wait "$worker"; status=$?
while kill -0 "$worker" 2>/dev/null; do wait "$worker"; status=$?; done
wait "$worker" 2>/dev/null; last=$?
[ "$last" = 127 ] || status=$last
exit "$status"
"""
"""A child that is still a copy of its shell would lose the signal. `wait` returns for a signal,
too; of a child that was collected before, some shells tell the status once more and some say 127.
"""

_PENDING: Final = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
_PROCESS: Final = frozenset(
    {"CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING"}
)
_ENDING: Final = frozenset({"COMPLETING", "STAGE_OUT"})

_NEVER: Final = (
    *("Assoc", "QOS", "Partition", "Invalid", "JobHeld", "Bad", "Account", "ReservationDeleted"),
    *("DependencyNeverSatisfied", "MaxPower", "FedJobLock", "DeadLine"),
)
"""First letters of reasons that waiting does not help: someone has to change a limit, the job or a
node. A limit on the sum of jobs (`AssocGrp`, `QOSGrp`) may pass, but then another order finds it
so; meanwhile the planner takes another kind."""

_PASSES: Final = (
    *("unable to contact", "timed out", "connect failure", "connection refused", "try again"),
    *("temporarily", "zero bytes were transmitted", "communication", "not responding"),
    *("unexpected message", "backup controller", "munge", "connection reset"),
)
"""Words of failures that pass: the controller restarts, or is busy."""
_LIMITS: Final = ("policy", "limit", "busy", "qos", "more processors requested")
"""Words of refusals because of a limit."""

_DROPPED: Final = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SCANCEL_", "SALLOC_", "PDSERVE_")
_KEPT: Final = frozenset({"SLURM_CONF", "SLURM_CLUSTERS"})


class Job(NamedTuple):
    """A job of this cluster's planners, as `squeue` shows it."""

    id: str
    state: str
    reason: str
    start: float | None
    """When it began or is expected to, in Unix seconds."""
    left: Seconds | None
    """Until its time limit; None: it has none, or it is not known."""
    change: str
    kind: str
    until: float | None = None
    """Unix second by which it must end; None: no stop was ordered."""


def comment(cluster: str, change: str, kind: str, until: float | None = None) -> str:
    """The comment of a job: it outlives the planner and the controller."""
    mark = "" if until is None else f":{until:.0f}"
    return f"pdserve:{cluster}:{change}:{kind}{mark}"


def parse_jobs(text: str, cluster: str) -> list[Job]:
    """Reads `squeue -o JOB_FORMAT`; lines of other jobs are left out."""
    head = f"pdserve:{cluster}:"
    found = []
    for line in text.splitlines():
        parts = line.split("|", 5)
        if len(parts) < 6 or not parts[5].startswith(head):
            continue
        change, _, rest = parts[5][len(head) :].partition(":")
        kind, _, until = rest.strip().partition(":")
        job, state, reason, start, left = (part.strip() for part in parts[:5])
        found.append(
            Job(job, state, reason, _number(start), duration(left), change, kind, _number(until))
        )
    return found


def parse_steps(text: str) -> dict[str, str]:
    """Reads `squeue -s -o STEP_FORMAT`: name of the step to its id."""
    pairs = (line.strip().partition("|") for line in text.splitlines())
    return {name: step for step, _, name in pairs if name}


def _number(text: str) -> float | None:
    return float(text) if text.isdecimal() else None


def duration(text: str) -> Seconds | None:
    """Reads `[days-][[hours:]minutes:]seconds`; None for words such as UNLIMITED and INVALID."""
    days, dash, clock = text.rpartition("-")
    parts = [days or "0", *clock.split(":")] if dash else ["0", *clock.split(":")]
    if not all(part.isdecimal() for part in parts) or len(parts) > 4:
        return None
    seconds = 0.0
    for part in parts[1:]:
        seconds = seconds * 60 + int(part)
    return int(parts[0]) * 86400 + seconds


def never_starts(reason: str) -> bool:
    """True if a pending job with this reason does not start by waiting. An unknown reason may
    pass."""
    return reason.startswith(_NEVER)


def is_live(job: Job) -> bool:
    """True if the job may run now or later."""
    return job.state in _PENDING or job.state in _PROCESS or job.state in _ENDING


def instance(job: Job, now: float, output: str) -> Instance:
    """What the port tells of a job. Args: `now` in Unix seconds; `output` names its log."""
    state, reason = _state(job)
    if state == "failed":
        reason = f"{reason}; its output: {output}"
    waits = state == "pending" and job.start is not None
    return Instance(
        change=job.change,
        kind=job.kind,
        actuator="slurm",
        ref=job.id,
        state=state,
        reason=reason,
        expected=max(0.0, (job.start or now) - now) if waits else None,
        hard_end=job.left if state in ("booting", "ending") else None,
    )


def _state(job: Job) -> tuple[str, str]:
    """State and reason of the port's record."""
    why = "" if job.reason in ("", "None") else job.reason
    if job.state in _PENDING:
        return ("ending" if job.until else "pending"), why or job.state
    if job.state in _PROCESS:
        return ("ending" if job.until else "booting"), why
    if job.state in _ENDING:
        return "ending", why
    if job.state == "COMPLETED" or job.until is not None:
        return "ended", why and f"{job.state}: {why}"
    if never_starts(job.reason):
        return "failed", f"it never starts: {job.reason}"
    return "failed", f"{job.state}: {why}" if why else job.state


def failure(command: str, words: str) -> ActuatorError:
    """The error of a command that failed, in Slurm's own words."""
    low = words.lower()
    if any(sign in low for sign in _PASSES):
        return ActuatorTransient(f"{command}: {words}")
    if any(sign in low for sign in _LIMITS):
        return ActuatorExhausted(f"{command}: {words}")
    return ActuatorDenied(f"{command}: {words}")


def command_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of Slurm's commands, which jobs inherit.

    Variables that change the commands' options and formats are left out, also those of a job in
    which the planner itself runs; so are the planner's own settings.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name in _KEPT or not name.startswith(_DROPPED)
    }
    return kept | {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8"}


def told_once(command: Sequence[str]) -> str:
    """The text of a shell that runs a command and ends with its status.

    At the first signal `TELL` it sends SIGTERM to the command; it passes on nothing else. A worker
    that gets SIGTERM twice ends at once, and a stop may be repeated by a planner that does not know
    of the first one.
    """
    return _ONCE.format(signal=TELL, command=shlex.join(command))


def script(command: Sequence[str]) -> str:
    """The script of a job. A job that Slurm starts again has had its life: its change is over."""
    return (
        "#!/bin/sh\n"
        'if [ "${SLURM_RESTART_COUNT:-0}" != 0 ]; then\n'
        "  echo 'started again by Slurm: the planner has replaced this worker' >&2\n"
        "  exit 3\n"
        "fi\n"
        f"{told_once(command)}"
    )
