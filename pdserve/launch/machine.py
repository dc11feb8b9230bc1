"""What this machine offers: facts for `pdserve doctor`, each read by one small function.

Nothing is changed and nothing heavy is imported: torch is asked in a process of its own, since a
broken driver can hang whoever loads it. A fact that cannot be read says so; it never raises.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pdserve import __version__, accel
from pdserve.launch.cpus import read_limits
from pdserve.launch.units import approximate_size
from pdserve.transfer.rdma import library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

State = Literal["ok", "absent", "problem"]

_PROBE_TIMEOUT = 60.0
"""Seconds for torch to load and to look for GPUs; cold shared file systems are slow."""
_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
_TORCH_PROBE = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
print(json.dumps({"version": torch.__version__, "built_for": torch.version.cuda,
                  "gpus": [[g.name, g.total_memory, f"{g.major}.{g.minor}"] for g in gpus]}))
"""

_CUDA_PROBE = """
from pdserve.transfer.cuda.nvidia import available
print(available() or "")
"""


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the report."""

    section: str
    name: str
    value: str
    state: State = "ok"
    """`absent` things are optional; a `problem` keeps pdserve from serving well, or at all."""


def read_facts() -> list[Fact]:
    """Everything, in the order of the report. Takes seconds where torch is installed."""
    readers: tuple[Callable[[], Iterator[Fact]], ...] = (
        *(_software, _cpu, _memory, _shared_memory, _limits),
        *(_gpu, _cuda_ipc, _rdma, _compiler, _engines, _plan),
    )
    return [fact for read in readers for fact in _guarded(read)]


def _guarded(read: Callable[[], Iterator[Fact]]) -> Iterator[Fact]:
    try:
        yield from read()
    except Exception as error:  # a strange machine is what a doctor is for
        what = f"could not be read: {type(error).__name__}: {error}"
        yield Fact(read.__name__.strip("_"), "?", what, "problem")


def _software() -> Iterator[Fact]:
    yield Fact("software", "pdserve", __version__)
    yield Fact("software", "python", f"{platform.python_version()} ({sys.executable})")
    yield Fact("software", "system", f"{platform.system()} {platform.release()}")
    state: State = "ok" if accel.NATIVE else "problem"
    yield Fact("software", "hot loops", accel.describe().partition(": ")[2], state)
    yield _package("software", "uvloop", "plain asyncio serves, slower", optional=False)


def _package(section: str, name: str, without: str, *, optional: bool = True) -> Fact:
    try:
        return Fact(section, name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Fact(section, name, f"not installed: {without}", "absent" if optional else "problem")


def _cpu() -> Iterator[Fact]:
    info = _table("/proc/cpuinfo")
    yield Fact("cpu", "model", info.get("model name") or platform.processor() or "unknown")
    flags = (info.get("flags") or info.get("Features") or "").split()
    yield Fact("cpu", "features", " ".join(f for f in _FEATURES if f in flags) or "none known")
    limits = read_limits()
    counts = f"{limits.cores} cores, {limits.logical} hardware threads, of {os.cpu_count()}"
    yield Fact("cpu", "affinity", counts)
    quota = "none" if limits.quota is None else f"{limits.quota:g} CPUs"
    yield Fact("cpu", "control group quota", quota)
    if limits.slurm is not None:
        yield Fact("cpu", "SLURM_CPUS_PER_TASK", str(limits.slurm))


def _memory() -> Iterator[Fact]:
    memory = _table("/proc/meminfo")
    if "MemTotal" not in memory:
        yield Fact("memory", "total", "unknown on this system", "absent")
        return
    yield Fact("memory", "total", _kib(memory["MemTotal"]))
    yield Fact("memory", "available", _kib(memory.get("MemAvailable", "0 kB")))
    limit = _read("/sys/fs/cgroup/memory.max") or _read(
        "/sys/fs/cgroup/memory/memory.limit_in_bytes"
    )
    if limit and limit.isdigit() and int(limit) < 2**60:
        yield Fact("memory", "control group limit", approximate_size(int(limit)))
    total = int(memory.get("HugePages_Total", "0"))
    size = _kib(memory.get("Hugepagesize", "0 kB"))
    yield Fact("memory", "huge pages", f"{total} of {size}", "ok" if total else "absent")
    transparent = _read("/sys/kernel/mm/transparent_hugepage/enabled") or "unknown"
    yield Fact("memory", "transparent huge pages", transparent)


def _shared_memory() -> Iterator[Fact]:
    if hasattr(os, "memfd_create"):
        os.close(os.memfd_create("pdserve-doctor"))
        yield Fact("shared memory", "memfd", "works")
    else:
        yield Fact("shared memory", "memfd", "not on this system: KV cannot be shared", "absent")
    if Path("/dev/shm").is_dir():
        usage = shutil.disk_usage("/dev/shm")
        sizes = f"{approximate_size(usage.free)} free of {approximate_size(usage.total)}"
        yield Fact("shared memory", "/dev/shm", sizes)
    else:
        yield Fact("shared memory", "/dev/shm", "does not exist", "absent")


def _limits() -> Iterator[Fact]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = hard != resource.RLIM_INFINITY and hard < 8192
    text = f"{_limit(soft)}, can be raised to {_limit(hard)}"
    text += ": fewer than the connections allowed by default" if few else ""
    yield Fact("limits", "open files", text, "problem" if few else "ok")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "unlimited" if soft == resource.RLIM_INFINITY else approximate_size(soft)
    yield Fact("limits", "locked memory", f"{locked} (RDMA registers its buffers)")


def _gpu() -> Iterator[Fact]:
    driver = (_read("/proc/driver/nvidia/version") or "").splitlines()
    yield Fact("gpu", "driver", driver[0] if driver else "none", "ok" if driver else "absent")
    if importlib.util.find_spec("torch") is None:
        yield Fact("gpu", "torch", "not installed: pip install 'pdserve[torch]'", "absent")
        return
    found = _ask_torch()
    if isinstance(found, str):
        yield Fact("gpu", "torch", found, "problem")
        return
    built = found["built_for"]
    yield Fact("gpu", "torch", f"{found['version']} ({f'CUDA {built}' if built else 'CPU only'})")
    for index, (name, memory, capability) in enumerate(found["gpus"]):
        details = f"{name}, {approximate_size(int(memory))}, compute capability {capability}"
        yield Fact("gpu", f"cuda:{index}", details)
    if not found["gpus"]:
        unused = bool(driver) and not built
        why = "a GPU is here, but this torch is built without CUDA" if unused else "none usable"
        yield Fact("gpu", "devices", why, "problem" if unused else "absent")


def _ask_torch() -> dict[str, list[list[str | int]]] | str:
    """What torch sees, or why it could not say."""
    command = [sys.executable, "-c", _TORCH_PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT)
    except subprocess.TimeoutExpired:
        return f"does not answer within {_PROBE_TIMEOUT:g} s: the GPU driver may hang"
    if done.returncode != 0:
        return (
            f"cannot be imported: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}"
        )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _cuda_ipc() -> Iterator[Fact]:
    """Whether KV can be copied from GPU to GPU of this host; asked in a process of its own."""
    command = [sys.executable, "-c", _CUDA_PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT)
        reason = done.stdout.strip() or done.stderr.strip()
    except subprocess.TimeoutExpired:
        reason = f"the driver does not answer within {_PROBE_TIMEOUT:g} s"
    text = f"not used: {reason.splitlines()[-1]}" if reason else "KV can be shared between GPUs"
    yield Fact("gpu", "cuda_ipc", text, "absent" if reason else "ok")


def _rdma() -> Iterator[Fact]:
    devices = Path("/sys/class/infiniband")
    found = sorted(devices.iterdir()) if devices.is_dir() else []
    for device in found:
        for port in sorted((device / "ports").iterdir()):
            state = (_read(port / "state") or "?").partition(": ")[2]
            link = f"{_read(port / 'link_layer')}, {state}, {_read(port / 'rate')}"
            yield Fact("rdma", f"{device.name} port {port.name}", link)
    if not found:
        why = "no adapter" if devices.is_dir() else "no RDMA in the kernel, or no adapter's driver"
        yield Fact("rdma", "devices", f"none: {why}", "absent")
    elif not (nodes := Path("/dev/infiniband")).is_dir() or not any(nodes.glob("uverbs*")):
        text = "no /dev/infiniband/uverbs*: load ib_uverbs, or pass them to the container"
        yield Fact("rdma", "access", text, "problem")
    missing = library.find()
    yield Fact("rdma", "pyverbs", missing or "can be imported", "absent" if missing else "ok")
    if found and missing:
        yield Fact("rdma", "transfers", f"not by these adapters: {missing}", "problem")


def _compiler() -> Iterator[Fact]:
    for name, commands in (("C++", ("c++", "g++", "clang++")), ("cmake", ("cmake",))):
        path = next((found for command in commands if (found := shutil.which(command))), None)
        if path is None:
            yield Fact("compiler", name, "none: the extension cannot be built here", "absent")
        else:
            yield Fact("compiler", name, _first_line([path, "--version"]))


def _engines() -> Iterator[Fact]:
    from pdserve.engine.load import installed_engines

    yield Fact("engines", "registered", ", ".join(installed_engines()) or "none")


def _plan() -> Iterator[Fact]:
    """What serving would use, were it started now without a flag."""
    limits = read_limits()
    yield Fact("pdserve will use", "compute threads", f"{limits.threads} ({limits.reason})")
    loop = "uvloop" if importlib.util.find_spec("uvloop") else "asyncio"
    yield Fact("pdserve will use", "event loop", loop)
    torch = importlib.util.find_spec("torch") is not None
    engine = "torch" if torch else "none: pip install 'pdserve[torch]'"
    yield Fact("pdserve will use", "engine", engine, "ok" if torch else "problem")
    from pdserve.errors import ConfigError
    from pdserve.worker.model import locate

    try:
        yield Fact("pdserve will use", "model", f"{locate('').name} (bundled)")
    except ConfigError as error:
        yield Fact("pdserve will use", "model", error.message, "problem")


def _table(path: str) -> dict[str, str]:
    """`name: value` lines; the first of a name counts."""
    found: dict[str, str] = {}
    for line in (_read(path) or "").splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found


def _read(path: str | Path) -> str | None:
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _kib(text: str) -> str:
    """`1024 kB`, as the kernel writes it, for people."""
    return approximate_size(int(text.split()[0]) * 1024)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _first_line(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    return (done.stdout or done.stderr).strip().partition("\n")[0]
