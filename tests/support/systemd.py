"""systemd on this machine alone: process 1 of namespaces of its own, with no units but the tests'.

It shares files and network with this machine, and neither its units nor its control groups. It
needs root.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Final

import psutil

PATIENCE: Final = 30.0
_numbers = itertools.count()
_SYSTEMD: Final = "/lib/systemd/systemd"
_BOOT: Final = """\
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /sys/fs/cgroup
mkdir /sys/fs/cgroup/systemd
mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
for folder in /etc/systemd/system /lib/systemd/system /lib/systemd/system-generators; do
  mount -t tmpfs tmpfs $folder
done
for target in sysinit basic shutdown small; do
  printf '[Unit]\\nDefaultDependencies=no\\n' > /lib/systemd/system/$target.target
done
mkdir /sys/fs/cgroup/systemd/{group}
echo 1 > /sys/fs/cgroup/systemd/{group}/cgroup.procs
exec unshare --cgroup sh -c '
  umount /sys/fs/cgroup/systemd
  mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
  container=test exec {systemd} --system --unit=small.target --log-target=null --show-status=0'
"""


class Systemd:
    """Starts with `with`; `environ` has its `systemctl` and `systemd-run` on the path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._group = f"pdserve-{os.getpid()}-{next(_numbers)}"
        self.environ = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}

    def __enter__(self) -> Systemd:
        boot = _BOOT.format(group=self._group, systemd=_SYSTEMD)
        command = ("unshare", "--pid", "--fork", "--mount", "--kill-child", "sh", "-c", boot)
        with (self._folder / "boot.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(psutil.Error, IndexError):
                first = psutil.Process(self._process.pid).children()[0].pid
                self._write("systemctl", first)
                self._write("systemd-run", first)
                if self.run("systemctl", "is-active", "small.target").returncode == 0:
                    return
            log = (self._folder / "boot.log").read_text()
            assert self._process.poll() is None, f"systemd does not start here: {log}"
            assert time.monotonic() < deadline, f"systemd is not ready: {log}"
            time.sleep(0.1)

    def _write(self, name: str, first: int) -> None:
        path = self._folder / name
        path.write_text(
            f'#!/bin/sh\nPATH=/usr/bin:/bin\nexec nsenter -t {first} -m -p -C /bin/{name} "$@"\n'
        )
        path.chmod(0o755)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command of this systemd."""
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=30, check=False
        )

    def signal_first(self, number: signal.Signals) -> None:
        """Sends its process 1 a signal: SIGSTOP makes it silent."""
        psutil.Process(self._process.pid).children()[0].send_signal(number)

    def __exit__(self, *exception: object) -> None:
        """The end of its process 1 ends everything in it."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children():
                child.send_signal(signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        deadline = time.monotonic() + PATIENCE
        groups = Path("/sys/fs/cgroup/systemd") / self._group
        while groups.exists() and time.monotonic() < deadline:  # until the last process is gone
            for folder in (*sorted(groups.rglob("*/"), reverse=True), groups):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            time.sleep(0.02)


def why_not() -> str | None:
    """Why systemd cannot run here; None when it can. With `PDSERVE_REQUIRE_SYSTEMD` it must."""
    if os.environ.get("PDSERVE_REQUIRE_SYSTEMD", "") not in ("", "0"):
        return None
    if os.geteuid() != 0:
        return "systemd in namespaces needs root"
    missing = [
        name
        for name in (_SYSTEMD, "systemd-run", "unshare", "nsenter")
        if shutil.which(name) is None
    ]
    return f"no {', '.join(missing)} here: apt-get install systemd" if missing else None
