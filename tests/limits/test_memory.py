"""Every limit on memory is seen, and what is left of it is added up as the kernel does."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import pytest

from pdserve.limits.memory import available, oom_kills, read_bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

Machine = dict[str, str]

MIB = 1 << 20
MEMINFO = "MemTotal: 16000 kB\nMemFree: 1 kB\nMemAvailable: 8000 kB\n"
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[Machine], Path]:
    """A file tree that stands in for `/`."""

    def write(files: Machine) -> Path:
        for path, text in ({"proc/meminfo": MEMINFO} | files).items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return write


def least(root: Path, environ: Mapping[str, str] | None = None) -> tuple[str, int]:
    bound = available(environ or {}, root)
    return bound.name, bound.free


def test_without_limits_the_machine_counts(machine: Callable[[Machine], Path]) -> None:
    assert least(machine({})) == ("the machine", 8000 << 10)


@pytest.mark.parametrize("file", ["memory.max", "memory.high"])
@pytest.mark.parametrize("mount", [V2, f"{V2}/unified"])
def test_an_ancestor_of_version_2_counts(
    machine: Callable[[Machine], Path], file: str, mount: str
) -> None:
    """As systemd's MemoryMax of a slice, or Slurm's of a job."""
    root = machine(
        {
            "proc/self/cgroup": "0::/user.slice/job/step\n",
            f"{mount}/user.slice/memory.max": "max\n",
            f"{mount}/user.slice/job/{file}": "3000000\n",
            f"{mount}/user.slice/job/memory.current": "1000000\n",
            f"{mount}/user.slice/job/step/memory.max": "max\n",
        }
    )
    assert least(root) == (f"{file} of control group /user.slice/job", 2000000)


def test_a_limit_of_version_1_counts(machine: Callable[[Machine], Path]) -> None:
    root = machine(
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/abc\n0::/\n",
            f"{V1}/memory.limit_in_bytes": "9223372036854771712\n",
            f"{V1}/memory.usage_in_bytes": "9000000\n",
            f"{V1}/docker/abc/memory.limit_in_bytes": "5000000\n",
            f"{V1}/docker/abc/memory.usage_in_bytes": "1000000\n",
        }
    )
    assert least(root) == ("memory.limit_in_bytes of control group /docker/abc", 4000000)


@pytest.mark.parametrize("path", ["/outside/of/what/is/mounted", "/../../above"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_container_sees_its_limit_at_the_mount(
    machine: Callable[[Machine], Path], path: str, version: int
) -> None:
    line, file = f"4:memory:{path}\n", f"{V1}/memory.limit_in_bytes"
    if version == 2:
        line, file = f"0::{path}\n", f"{V2}/memory.max"
    assert least(machine({"proc/self/cgroup": line, file: "7000\n"}))[1] == 7000


@pytest.mark.parametrize(
    ("line", "mount", "files"),
    [
        ("0::/a\n", f"{V2}/a", ("memory.max", "memory.current", "", "file_")),
        (
            "4:memory:/a\n",
            f"{V1}/a",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_", "total_"),
        ),
    ],
)
def test_file_cache_that_can_be_dropped_is_free(
    machine: Callable[[Machine], Path], line: str, mount: str, files: tuple[str, str, str, str]
) -> None:
    limit, used, prefix, dirty = files
    stat = (
        f"anon 9\n{prefix}inactive_file 300\n{prefix}active_file 200\n"
        f"{dirty}dirty 40\n{dirty}writeback 10\n"
    )
    root = machine(
        {
            "proc/self/cgroup": line,
            f"{mount}/{limit}": "1000",
            f"{mount}/{used}": "800",
            f"{mount}/memory.stat": stat,
        }
    )
    assert least(root)[1] == 1000 - (800 - 450)


def test_a_group_above_its_limit_has_nothing_free(machine: Callable[[Machine], Path]) -> None:
    files = {f"{V2}/memory.high": "100", f"{V2}/memory.current": "300"}
    assert least(machine({"proc/self/cgroup": "0::/\n"} | files))[1] == 0


@pytest.mark.parametrize(
    ("environ", "free"),
    [
        ({"SLURM_MEM_PER_NODE": "5"}, 3 * MIB),
        ({"SLURM_MEM_PER_CPU": "2", "SLURM_CPUS_ON_NODE": "3"}, 4 * MIB),
        ({"SLURM_MEM_PER_NODE": "0"}, 8000 << 10),
        ({"SLURM_MEM_PER_CPU": "2"}, 8000 << 10),
        ({"SLURM_MEM_PER_NODE": "much"}, 8000 << 10),
    ],
)
def test_slurms_words_count_less_what_this_process_has(
    machine: Callable[[Machine], Path], environ: dict[str, str], free: int
) -> None:
    root = machine({"proc/self/status": "VmSize: 9 kB\nRssAnon: 1024 kB\nRssShmem: 1024 kB\n"})
    assert least(root, environ)[1] == free


def test_an_address_space_limit_counts(machine: Callable[[Machine], Path]) -> None:
    root = machine({"proc/self/status": "VmSize:\t     1000 kB\n"})
    bound = read_bounds({}, root, address_space=3000 << 10)[-1]
    assert (bound.name, bound.free) == ("RLIMIT_AS (ulimit -v)", 2000 << 10)
    assert len(read_bounds({}, root, address_space=resource.RLIM_INFINITY)) == 1


def test_kills_for_want_of_memory_are_those_of_the_group(
    machine: Callable[[Machine], Path],
) -> None:
    root = machine({"proc/vmstat": "pgfault 7\noom_kill 3\n"})
    assert oom_kills(root) == 3
    machine({"proc/self/cgroup": "0::/a\n", f"{V2}/a/memory.events": "oom 9\noom_kill 2\n"})
    assert oom_kills(root) == 2
    machine(
        {"proc/self/cgroup": "4:memory:/b\n", f"{V1}/b/memory.oom_control": "oom_kill 1\n"},
    )
    assert oom_kills(root) == 1


def test_this_machine_has_some() -> None:
    assert available().free > 0
    assert oom_kills() >= 0
