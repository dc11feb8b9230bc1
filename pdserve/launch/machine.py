"""Reads facts about this machine for `pdserve doctor`, one small function each.

It changes nothing and imports nothing heavy: torch is queried in a child process, since a broken
driver can hang its importer. A fact that cannot be read is reported as such; no function raises.
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
from pdserve.launch.config.units import approximate_size
from pdserve.launch.cpus import read_cpu_limits
from pdserve.limits.memory import available, read_bounds
from pdserve.transfer.rdma import pyverbs_loader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FactState = Literal["ok", "absent", "problem"]

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
from pdserve.transfer.cuda.nvidia import unavailable_reason
print(unavailable_reason() or "")
"""


@dataclass(frozen=True, slots=True)
class MachineFact:
    """One line of the report."""

    section: str
    name: str
    value: str
    state: FactState = "ok"
    """`absent` facts are optional; a `problem` makes serving bad or impossible."""


def read_facts() -> list[MachineFact]:
    """All facts, in the report's order. Takes seconds where torch is installed."""
    readers: tuple[Callable[[], Iterator[MachineFact]], ...] = (
        *(_software, _cpu, _memory, _shared_memory, _limits),
        *(_gpu, _cuda_ipc, _rdma, _compiler, _engines, _plan),
    )
    return [fact for read in readers for fact in _guarded(read)]


def _guarded(read: Callable[[], Iterator[MachineFact]]) -> Iterator[MachineFact]:
    try:
        yield from read()
    except Exception as error:
        # This report is for unusual machines too, so a reader that fails becomes a row.
        what = f"could not be read: {type(error).__name__}: {error}"
        yield MachineFact(read.__name__.strip("_"), "?", what, "problem")


def _software() -> Iterator[MachineFact]:
    yield MachineFact("software", "pdserve", __version__)
    yield MachineFact("software", "python", f"{platform.python_version()} ({sys.executable})")
    yield MachineFact("software", "system", f"{platform.system()} {platform.release()}")
    # Without native code pdserve still serves, more slowly.
    state: FactState = "ok" if accel.NATIVE else "absent"
    yield MachineFact("software", "hot loops", accel.describe().partition(": ")[2], state)
    yield _package("software", "uvloop", "plain asyncio serves, slower")


def _package(section: str, name: str, without: str) -> MachineFact:
    try:
        return MachineFact(section, name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return MachineFact(section, name, f"not installed: {without}", "absent")


def _cpu() -> Iterator[MachineFact]:
    info = _table("/proc/cpuinfo")
    yield MachineFact("cpu", "model", info.get("model name") or platform.processor() or "unknown")
    flags = (info.get("flags") or info.get("Features") or "").split()
    yield MachineFact(
        "cpu", "features", " ".join(f for f in _FEATURES if f in flags) or "none known"
    )
    limits = read_cpu_limits()
    counts = f"{limits.cores} cores, {limits.logical} hardware threads, of {os.cpu_count()}"
    yield MachineFact("cpu", "affinity", counts)
    quota = "none" if limits.quota is None else f"{limits.quota:g} CPUs"
    yield MachineFact("cpu", "control group quota", quota)
    if limits.slurm is not None:
        yield MachineFact("cpu", "SLURM_CPUS_PER_TASK", str(limits.slurm))


def _memory() -> Iterator[MachineFact]:
    memory = _table("/proc/meminfo")
    if "MemTotal" not in memory:
        yield MachineFact("memory", "total", "unknown on this system", "absent")
        return
    yield MachineFact("memory", "total", _kib(memory["MemTotal"]))
    yield MachineFact("memory", "available", _kib(memory.get("MemAvailable", "0 kB")))
    for bound in read_bounds()[1:]:
        left = f"{approximate_size(bound.free)} of {approximate_size(bound.limit)} left"
        yield MachineFact("memory", "limit", f"{left}: {bound.name}")
    total = int(memory.get("HugePages_Total", "0"))
    size = _kib(memory.get("Hugepagesize", "0 kB"))
    yield MachineFact("memory", "huge pages", f"{total} of {size}", "ok" if total else "absent")
    transparent = _read("/sys/kernel/mm/transparent_hugepage/enabled") or "unknown"
    yield MachineFact("memory", "transparent huge pages", transparent)


def _shared_memory() -> Iterator[MachineFact]:
    if hasattr(os, "memfd_create"):
        os.close(os.memfd_create("pdserve-doctor"))
        yield MachineFact("shared memory", "memfd", "works")
    else:
        yield MachineFact(
            "shared memory", "memfd", "not on this system: KV cannot be shared", "absent"
        )
    if Path("/dev/shm").is_dir():
        usage = shutil.disk_usage("/dev/shm")
        sizes = f"{approximate_size(usage.free)} free of {approximate_size(usage.total)}"
        yield MachineFact("shared memory", "/dev/shm", sizes)
    else:
        yield MachineFact("shared memory", "/dev/shm", "does not exist", "absent")


def _limits() -> Iterator[MachineFact]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = hard != resource.RLIM_INFINITY and hard < 8192
    text = f"{_limit(soft)}, can be raised to {_limit(hard)}"
    text += ": fewer than the connections allowed by default" if few else ""
    yield MachineFact("limits", "open files", text, "problem" if few else "ok")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "unlimited" if soft == resource.RLIM_INFINITY else approximate_size(soft)
    yield MachineFact("limits", "locked memory", f"{locked} (RDMA registers its buffers)")


def _gpu() -> Iterator[MachineFact]:
    driver = (_read("/proc/driver/nvidia/version") or "").splitlines()
    yield MachineFact(
        "gpu", "driver", driver[0] if driver else "none", "ok" if driver else "absent"
    )
    if importlib.util.find_spec("torch") is None:
        yield MachineFact("gpu", "torch", "not installed: pip install 'pdserve[torch]'", "absent")
        return
    found = _ask_torch()
    if isinstance(found, str):
        yield MachineFact("gpu", "torch", found, "problem")
        return
    built = found["built_for"]
    yield MachineFact(
        "gpu", "torch", f"{found['version']} ({f'CUDA {built}' if built else 'CPU only'})"
    )
    for index, (name, memory, capability) in enumerate(found["gpus"]):
        details = f"{name}, {approximate_size(int(memory))}, compute capability {capability}"
        yield MachineFact("gpu", f"cuda:{index}", details)
    if not found["gpus"]:
        unused = bool(driver) and not built
        why = "a GPU is here, but this torch is built without CUDA" if unused else "none usable"
        yield MachineFact("gpu", "devices", why, "problem" if unused else "absent")


def _ask_torch() -> dict[str, list[list[str | int]]] | str:
    """What torch reports, or why it could not."""
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


def _cuda_ipc() -> Iterator[MachineFact]:
    """Return whether KV can be copied between GPUs of this host; tested in a child process."""
    command = [sys.executable, "-c", _CUDA_PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT)
        reason = done.stdout.strip() or done.stderr.strip()
    except subprocess.TimeoutExpired:
        reason = f"the driver does not answer within {_PROBE_TIMEOUT:g} s"
    text = f"not used: {reason.splitlines()[-1]}" if reason else "KV can be shared between GPUs"
    yield MachineFact("gpu", "cuda_ipc", text, "absent" if reason else "ok")


def _rdma() -> Iterator[MachineFact]:
    devices = Path("/sys/class/infiniband")
    found = sorted(devices.iterdir()) if devices.is_dir() else []
    for device in found:
        for port in sorted((device / "ports").iterdir()):
            state = (_read(port / "state") or "?").partition(": ")[2]
            link = f"{_read(port / 'link_layer')}, {state}, {_read(port / 'rate')}"
            yield MachineFact("rdma", f"{device.name} port {port.name}", link)
    if not found:
        why = "no adapter" if devices.is_dir() else "no RDMA in the kernel, or no adapter's driver"
        yield MachineFact("rdma", "devices", f"none: {why}", "absent")
    elif not (nodes := Path("/dev/infiniband")).is_dir() or not any(nodes.glob("uverbs*")):
        text = "no /dev/infiniband/uverbs*: load ib_uverbs, or pass them to the container"
        yield MachineFact("rdma", "access", text, "problem")
    missing = pyverbs_loader.missing_reason()
    yield MachineFact(
        "rdma", "pyverbs", missing or "can be imported", "absent" if missing else "ok"
    )
    if found and missing:
        yield MachineFact("rdma", "transfers", f"not by these adapters: {missing}", "problem")


def _compiler() -> Iterator[MachineFact]:
    for name, commands in (("C++", ("c++", "g++", "clang++")), ("cmake", ("cmake",))):
        path = next((found for command in commands if (found := shutil.which(command))), None)
        if path is None:
            yield MachineFact(
                "compiler", name, "none: the extension cannot be built here", "absent"
            )
        else:
            yield MachineFact("compiler", name, _first_line([path, "--version"]))


def _engines() -> Iterator[MachineFact]:
    from pdserve.engine_core.engine_loader import installed_engines, missing_parts

    names = installed_engines()
    yield MachineFact("engines", "registered", ", ".join(names) or "none")
    for name in names:
        if lacking := missing_parts(name):
            yield MachineFact("engines", name, f"needs {'; '.join(lacking)}", "absent")


def _plan() -> Iterator[MachineFact]:
    """The settings that serving without flags would use now."""
    limits = read_cpu_limits()
    yield MachineFact("pdserve will use", "compute threads", f"{limits.threads} ({limits.reason})")
    bound = available()
    size = approximate_size(bound.free // 4)
    text = f"up to {size} on a CPU: a quarter of what {bound.name} leaves; else --kv-memory"
    yield MachineFact("pdserve will use", "KV memory", text)
    loop = "uvloop" if importlib.util.find_spec("uvloop") else "asyncio"
    yield MachineFact("pdserve will use", "event loop", loop)
    torch = importlib.util.find_spec("torch") is not None
    engine = "torch" if torch else "none: pip install 'pdserve[torch]'"
    yield MachineFact("pdserve will use", "engine", engine, "ok" if torch else "problem")
    from pdserve.errors import ConfigError
    from pdserve.worker.model import locate

    try:
        yield MachineFact("pdserve will use", "model", f"{locate('').name} (bundled)")
    except ConfigError as error:
        yield MachineFact("pdserve will use", "model", error.message, "problem")


def _table(path: str) -> dict[str, str]:
    """Reads `name: value` lines; the first line of a name counts."""
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
    """Formats `1024 kB`, the kernel's form, for display."""
    return approximate_size(int(text.split()[0]) * 1024)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _first_line(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    return (done.stdout or done.stderr).strip().partition("\n")[0]
