import os
from pathlib import Path

import pytest

from pdserve.launch import cpus
from pdserve.launch.cpus import CpuLimits, read_cpu_limits


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A file tree that stands in for `/`, with eight CPUs in the affinity mask."""
    monkeypatch.setattr(cpus, "_affinity", lambda pid: set(range(8)))

    def write(files: dict[str, str]) -> Path:
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return write


def test_without_limits_every_cpu_counts(machine):
    limits = read_cpu_limits({}, machine({}))
    assert limits == CpuLimits(logical=8, cores=8)
    assert (limits.threads, limits.reason) == (8, "CPU affinity")


def test_hardware_threads_of_one_core_count_once(machine):
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    root = machine({siblings.format(cpu): f"{cpu % 4},{cpu % 4 + 4}\n" for cpu in range(8)})
    limits = read_cpu_limits({}, root)
    assert limits.threads == 4
    assert "8 hardware threads" in limits.reason


def test_the_least_quota_on_the_way_up_counts_in_version_2(machine):
    root = machine(
        {
            "proc/self/cgroup": "0::/user.slice/job\n",
            "sys/fs/cgroup/user.slice/cpu.max": "350000 100000\n",
            "sys/fs/cgroup/user.slice/job/cpu.max": "max 100000\n",
        }
    )
    limits = read_cpu_limits({}, root)
    assert limits.quota == 3.5
    assert limits.threads == 3
    assert "3.5 CPUs" in limits.reason


def test_a_container_sees_its_quota_at_the_mount(machine):
    root = machine(
        {
            "proc/self/cgroup": "0::/somewhere/outside\n",
            "sys/fs/cgroup/cpu.max": "50000 100000\n",
        }
    )
    assert read_cpu_limits({}, root).threads == 1


@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
def test_version_1_quotas_count(machine, folder):
    root = machine(
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/job\n3:memory:/job\n",
            f"sys/fs/cgroup/{folder}/job/cpu.cfs_quota_us": "200000",
            f"sys/fs/cgroup/{folder}/job/cpu.cfs_period_us": "100000",
        }
    )
    assert read_cpu_limits({}, root).threads == 2


def test_no_quota_in_version_1_is_minus_one(machine):
    root = machine(
        {
            "proc/self/cgroup": "4:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        }
    )
    assert read_cpu_limits({}, root).quota is None


def test_slurm_bounds_the_threads(machine):
    limits = read_cpu_limits({"SLURM_CPUS_PER_TASK": "2"}, machine({}))
    assert (limits.threads, limits.reason) == (2, "SLURM_CPUS_PER_TASK")


@pytest.mark.parametrize("text", ["", "many", "0"])
def test_a_strange_slurm_value_is_no_limit(machine, text):
    assert read_cpu_limits({"SLURM_CPUS_PER_TASK": text}, machine({})).slurm is None


def test_this_machine_grants_at_least_one_thread():
    assert 1 <= read_cpu_limits().threads <= (os.cpu_count() or 1)
