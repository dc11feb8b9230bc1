"""The back ends there are: whether one can be used here, where it reaches, and how it is made.

Nothing of a back end is imported before somebody may use it.
"""

from __future__ import annotations

import functools
import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import ConfigError
from pdserve.messages.transfer import Offers
from pdserve.net.address import is_loopback
from pdserve.transfer.places import fabrics, interface_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.messages.engine import TransferSpec
    from pdserve.transfer.base import Ask, PeerKey, Region, Transport
    from pdserve.transfer.verify import Verify

__all__ = ["ORDER", "BackEnd", "offers_of", "standard"]

ORDER: Final = ("rdma", "cuda_ipc", "shm", "tcp")
"""Best first."""
ADAPTERS: Final = Path("/sys/class/infiniband")
INTERFACES: Final = Path("/sys/class/net")
_SAMPLE: Final = 8 << 20
"""Bytes: more than the caches of a core hold."""

Make = Callable[["PeerKey", "Sequence[Region]", "Ask"], "Transport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackEnd:
    """One way to move KV, on this machine."""

    name: str
    make: Make
    """A transport in the name of a node's life, on the running loop."""
    lacking: Callable[[Sequence[Region]], str] = lambda regions: ""
    """Why it cannot be used for these pools; empty: it can."""
    places: Callable[[], tuple[str, ...]] = tuple
    """Where it reaches: both ends must have one in common. Empty: anywhere."""
    expected: Callable[[], float] = field(default=lambda: 0.0)
    """Bytes per second that it usually brings; 0: unknown."""


def offers_of(backends: Sequence[BackEnd], regions: Sequence[Region]) -> Offers:
    """What of these can be used, and why the others cannot.

    Raises `ConfigError` with the reason of each when nothing is left.
    """
    places: dict[str, tuple[str, ...]] = {}
    lacking: dict[str, str] = {}
    for backend in backends:
        why_not = backend.lacking(regions)
        if why_not:
            lacking[backend.name] = why_not[:500]
        else:
            places[backend.name] = backend.places()
    if not places:
        reasons = "; ".join(f"{name}: {why}" for name, why in lacking.items())
        raise ConfigError(
            f"KV cannot be moved by what --transfer allows here ({reasons}); "
            "--transfer=auto takes whatever is possible"
        )
    return Offers(places, lacking)


def standard(spec: TransferSpec) -> list[BackEnd]:
    """Those that `spec` allows, best first. Raises `ConfigError` for an unknown name."""
    made = {
        "rdma": BackEnd(
            name="rdma",
            make=_make_rdma,
            lacking=_lacking_rdma,
            places=lambda: fabrics(ADAPTERS),
            expected=_rdma_rate,
        ),
        "cuda_ipc": BackEnd(
            name="cuda_ipc",
            make=lambda key, regions, ask: _make_cuda_ipc(spec, key, regions, ask),
            lacking=_lacking_cuda_ipc,
            places=_this_host,
        ),
        "shm": BackEnd(
            name="shm",
            make=lambda key, regions, ask: _make_shm(spec, key, regions, ask),
            lacking=_lacking_shm,
            places=_this_host,
            expected=_copy_rate,
        ),
        "tcp": BackEnd(
            name="tcp",
            make=lambda key, regions, ask: _make_tcp(spec, key, regions, ask),
            lacking=_lacking_tcp,
            expected=lambda: _tcp_rate(spec),
        ),
    }
    unknown = [name for name in spec.backends if name not in made]
    if unknown:
        known = ", ".join(ORDER)
        raise ConfigError(f"there is no way to move KV called {unknown[0]!r}; there are {known}")
    return [made[name] for name in spec.backends or ORDER]


# ------------------------------------------------------------------------------ rdma


def _lacking_rdma(regions: Sequence[Region]) -> str:
    module = _module("pdserve.transfer.rdma")
    return "this build has none" if module is None else module.available() or ""


def _make_rdma(key: PeerKey, regions: Sequence[Region], ask: Ask) -> Transport:
    module = importlib.import_module("pdserve.transfer.rdma")
    made: Transport = module.RdmaTransport(*key, regions, ask)
    return made


def _rdma_rate() -> float:
    """Of the fastest adapter, by what the kernel says of its ports."""
    rates = [0.0]
    for file in ADAPTERS.glob("*/ports/*/rate"):
        try:
            rates.append(float(file.read_text("ascii").split()[0]) * 1e9 / 8)  # "100 Gb/sec (…)"
        except (OSError, ValueError, IndexError):
            continue
    return max(rates)


# ------------------------------------------------------------------------------ one host


def _this_host() -> tuple[str, ...]:
    """Sockets and descriptors pass within one kernel, network namespace and user."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return ("unknown",)
    return (f"host {boot}, network {network}, user {os.geteuid()}",)


def _lacking_cuda_ipc(regions: Sequence[Region]) -> str:
    module = _module("pdserve.transfer.cuda_ipc")
    if module is None:
        return "this build has none"
    if any(region.view is not None for region in regions):
        return "the pool is in host memory"
    return module.available() or ""


def _make_cuda_ipc(
    spec: TransferSpec, key: PeerKey, regions: Sequence[Region], ask: Ask
) -> Transport:
    module = importlib.import_module("pdserve.transfer.cuda_ipc")
    made: Transport = module.CudaIpcTransport(*key, regions, ask, verify=spec.verify)
    return made


def _lacking_shm(regions: Sequence[Region]) -> str:
    if any(region.view is None for region in regions):
        return "the pool is in device memory"
    if any(region.fd is None for region in regions):
        return "the pool cannot be shared: the system offers no memfd"
    return "" if _this_host() != ("unknown",) else "this system does not say which host it is"


@functools.cache
def _copy_rate() -> float:
    """What one thread of this machine copies in memory, measured once per process."""
    source, destination = bytearray(_SAMPLE), bytearray(_SAMPLE)
    destination[:] = source  # pages are there from now on
    begin = time.perf_counter()
    destination[:] = source
    return _SAMPLE / max(1e-6, time.perf_counter() - begin)


def _make_shm(spec: TransferSpec, key: PeerKey, regions: Sequence[Region], ask: Ask) -> Transport:
    from pdserve.transfer.shm import ShmTransport

    return ShmTransport(*key, regions, ask, verify=spec.verify)


# ------------------------------------------------------------------------------ tcp


def _lacking_tcp(regions: Sequence[Region]) -> str:
    if any(region.view is None for region in regions):
        return "the pool is in device memory"
    return ""


def _make_tcp(spec: TransferSpec, key: PeerKey, regions: Sequence[Region], ask: Ask) -> Transport:
    """A network is no memory: unless nothing is to be checked, all is."""
    from pdserve.net.tls import Tls
    from pdserve.transfer.tcp import TcpTransport

    tls = None
    if spec.tls is not None:
        cert, key_file, ca = spec.tls
        tls = Tls.load(Path(cert), Path(key_file), Path(ca) if ca else None)
    verify: Verify = "off" if spec.verify == "off" else "all"
    return TcpTransport(
        *key, regions, ask, host=spec.host, advertise=spec.advertise, verify=verify, tls=tls
    )


def _tcp_rate(spec: TransferSpec) -> float:
    """Of the interface that peers reach, as the kernel has it; within one host every byte is copied
    in and out again."""
    host = spec.advertise or spec.host
    if is_loopback(host):
        return _copy_rate() / 2
    interface = interface_of(host)
    try:
        speed = float((INTERFACES / interface / "speed").read_text("ascii")) if interface else 0.0
    except (OSError, ValueError):  # a virtual interface has none
        return 0.0
    return max(0.0, speed) * 1e6 / 8


def _module(name: str) -> Any:
    """None where this build does not have it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            return None
        raise
