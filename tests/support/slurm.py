"""Slurm on this machine alone: munged, slurmctld and slurmd with everything in one directory.

It may pretend to be several nodes, each with a slurmd of its own. No control groups, no accounting,
ports of its own: it disturbs no other Slurm and needs no service manager. It needs root, since
slurmd starts jobs in other users' names.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PROGRAMS: Final = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "squeue",
    "scontrol",
    "scancel",
)
PATIENCE: Final = 60.0
_CONF: Final = """\
ClusterName=pdserve-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait={kill_wait}
MessageTimeout=5
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes=ALL MaxTime=1 State=UP
"""


def why_not() -> str | None:
    """Why Slurm cannot run here; None when it can. With `PDSERVE_REQUIRE_SLURM` it must."""
    if os.environ.get("PDSERVE_REQUIRE_SLURM", "") not in ("", "0"):
        return None
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin"))
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return f"no {', '.join(missing)} here: apt-get install slurm-wlm munge"
    return "slurmd needs root" if os.geteuid() != 0 else None


class Slurm:
    """Starts with `with`."""

    def __init__(
        self, folder: Path, nodes: int = 1, *, cpus: int | None = None, kill_wait: int = 30
    ) -> None:
        """Args: `cpus` of each node, also more than there are; `kill_wait` in seconds."""
        self.folder, self._kill_wait = folder, kill_wait
        self._cpus = cpus or os.cpu_count()
        host = socket.gethostname().partition(".")[0]
        self.nodes = [host] if nodes == 1 else [f"n{number}" for number in range(1, nodes + 1)]
        self.environ = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": os.pathsep.join((os.environ["PATH"], "/usr/sbin")),
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        try:
            self._configure()
            self._munged()
            self.start_controller()
            for node in self.nodes:
                (self.folder / f"spool-{node}").mkdir()
                self._daemon("slurmd", "-D", "-N", node)
            self.until(self._all_idle, "idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        """Steps outlive slurmd: whatever a failed test left must end before it."""
        if (self.folder / "slurm.conf").exists():
            self._end_jobs()
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def start_controller(self) -> None:
        """Starts `slurmctld`, which reads its state."""
        self._controller = self._daemon("slurmctld", "-D")

    def stop_controller(self) -> None:
        """Ends it in order; jobs go on."""
        self._controller.send_signal(signal.SIGTERM)
        self._controller.wait(PATIENCE)
        self._daemons.remove(self._controller)

    @property
    def controller_is_away(self) -> bool:
        """True after `stop_controller`."""
        return self._controller not in self._daemons

    def signal_controller(self, number: signal.Signals) -> None:
        """Sends it a signal: SIGSTOP makes it silent."""
        self._controller.send_signal(number)

    def _all_idle(self) -> bool:
        shown = self.run("scontrol", "show", "node").stdout
        return shown.count("State=IDLE ") == len(self.nodes)

    def run(self, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """A command with this Slurm's configuration."""
        return subprocess.run(
            command,
            env=self.environ | environ,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def until(self, holds: Callable[[], object], what: str) -> None:
        """Wait; a failure shows the logs."""
        deadline = time.monotonic() + PATIENCE
        while not holds():
            if time.monotonic() > deadline:
                logs = [
                    f"{path}:\n{path.read_text()[-4000:]}" for path in self.folder.glob("*.log")
                ]
                raise AssertionError("\n".join((f"never {what}", *logs)))
            time.sleep(0.1)

    def _end_jobs(self) -> None:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--state=PENDING")
            self.run("scancel", "--state=RUNNING")
            self.until(lambda: not self.run("squeue", "--noheader").stdout.strip(), "without jobs")

    # ------------------------------------------------------------------ starting

    def _configure(self) -> None:
        (self.folder / "state").mkdir()
        host = socket.gethostname().partition(".")[0]
        with contextlib.ExitStack() as stack:
            servers = [
                stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                for _ in (host, *self.nodes)
            ]
            ports = [server.getsockname()[1] for server in servers]
        each = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs={self._cpus} State=UNKNOWN"
        nodes = zip(self.nodes, ports[1:], strict=True)
        lines = "\n".join(f"NodeName={name} Port={port} {each}" for name, port in nodes)
        conf = _CONF.format(
            host=host, ports=ports, folder=self.folder, nodes=lines, kill_wait=self._kill_wait
        )
        (self.folder / "slurm.conf").write_text(conf)

    def _munged(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        names = ("key-file", "log-file", "pid-file", "seed-file", "socket")
        files = {name: self.folder / f"munge.{name.partition('-')[0]}" for name in names}
        files["socket"] = self.folder / "munge.socket"
        self._daemon(
            *("munged", "--foreground", "--force"),
            *(f"--{name}={path}" for name, path in files.items()),
        )
        self.until(files["socket"].exists, "munge")

    def _daemon(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{command[0]}.out.log").open("ab") as log:
            daemon = subprocess.Popen(command, env=self.environ, stdout=log, stderr=log)
        self._daemons.append(daemon)
        return daemon
