"""Finds the control groups of this process, version 1 or 2. It only finds folders; callers read the
limits in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Cgroup", "groups", "read"]

_MOUNTS_V2 = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
"""Mount points of version 2; the second is used beside version 1."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """One control group."""

    folder: Path
    version: int
    name: str
    """Its path below the mount, as in `/proc/self/cgroup`."""


def groups(controller: str, root: Path = Path("/")) -> list[Cgroup]:
    """The control groups that apply to this process: its own, then each visible ancestor.

    In a container the path in `/proc/self/cgroup` may lead outside of the mount; then the mount
    itself is the group. `root` replaces `/` in tests.
    """
    found: list[Cgroup] = []
    for line in (read(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            for mount in _MOUNTS_V2:
                found += _upwards(root / mount, path, 2)
        elif controller in controllers.split(","):
            for mount_v1 in _mounts_v1(controller, root):
                found += _upwards(mount_v1, path, 1)
    return found


def _mounts_v1(controller: str, root: Path) -> list[Path]:
    """The mount of a version 1 controller; controllers mounted together share a folder:
    `cpu,cpuacct`.
    """
    try:
        folders = sorted((root / "sys/fs/cgroup").iterdir())
    except OSError:
        return []
    return [folder for folder in folders if controller in folder.name.split(",")]


def _upwards(mount: Path, path: str, version: int) -> Iterator[Cgroup]:
    name = PurePosixPath(path)
    if ".." in name.parts:
        # The group is above the root of this control-group namespace.
        name = PurePosixPath("/")
    for each in (name, *name.parents):
        folder = mount / each.relative_to("/")
        if folder.is_dir():
            yield Cgroup(folder, version, str(each))


def read(path: Path) -> str | None:
    """The stripped text of a file; None if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
