"""Lists the KV transfer backends: whether each works here, where it reaches, how it is created.

No backend is imported before it is needed.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdserve.errors import ConfigError, TransferError
from pdserve.messages.transfer import BackendOffers
from pdserve.net.address import is_loopback
from pdserve.transfer.nic_topology import fabrics, interface_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import NodeLife
    from pdserve.messages.engine import TransferSpec
    from pdserve.transfer.base import CallPeer, KvTransport, Region
    from pdserve.transfer.rdma.adapters import Adapters
    from pdserve.transfer.verify import Verify

__all__ = ["BACKEND_ORDER", "TransferBackend", "backend_offers", "make_backends"]

_log = logging.getLogger(__name__)

BACKEND_ORDER: Final = ("rdma", "cuda_ipc", "shm", "tcp")
"""Best first."""
ADAPTERS: Final = Path("/sys/class/infiniband")
INTERFACES: Final = Path("/sys/class/net")
_SAMPLE: Final = 8 << 20
"""Bytes copied to measure the copy rate: more than a core's caches hold."""

TransportFactory = Callable[["NodeLife", "Sequence[Region]", "CallPeer"], "KvTransport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferBackend:
    """One way to move KV, as this machine offers it."""

    name: str
    make: TransportFactory
    """Creates a transport in the name of a node's life, on the running loop."""
    lacking: Callable[[Sequence[Region]], str] = lambda regions: ""
    """Returns why the backend cannot be used for these pools; empty: it can. It does the slow
    preparations that need no peer, such as registering the pools, so it is called once, before the
    engine is ready."""
    places: Callable[[], tuple[str, ...]] = tuple
    """Returns the fabrics that the backend reaches: two workers need one in common. Empty: it
    reaches any worker."""
    expected: Callable[[], float] = field(default=lambda: 0.0)
    """Returns the usual bandwidth in bytes per second; 0: unknown."""
    close: Callable[[], None] = lambda: None
    """Undoes what `lacking` did, once no transport is left. Idempotent."""


def backend_offers(backends: Sequence[TransferBackend], regions: Sequence[Region]) -> BackendOffers:
    """Tell which of these backends can be used, and why the others cannot.

    Errors: `ConfigError` with the reason of each when none is left.
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
            f"no KV transfer backend that --transfer allows works here ({reasons}); "
            "--transfer=auto allows all of them"
        )
    return BackendOffers(places, lacking)


def make_backends(spec: TransferSpec) -> list[TransferBackend]:
    """The backends that `spec` allows, best first. Errors: `ConfigError` for an unknown name."""
    rdma = _Rdma(spec)
    made = {
        "rdma": TransferBackend(
            name="rdma",
            make=rdma.make,
            lacking=rdma.lacking,
            places=lambda: fabrics(ADAPTERS),
            expected=_rdma_rate,
            close=rdma.close,
        ),
        "cuda_ipc": TransferBackend(
            name="cuda_ipc",
            make=lambda key, regions, ask: _make_cuda_ipc(spec, key, regions, ask),
            lacking=_lacking_cuda_ipc,
            places=_this_host,
        ),
        "shm": TransferBackend(
            name="shm",
            make=lambda key, regions, ask: _make_shm(spec, key, regions, ask),
            lacking=_lacking_shm,
            places=_this_host,
            expected=_copy_rate,
        ),
        "tcp": TransferBackend(
            name="tcp",
            make=lambda key, regions, ask: _make_tcp(spec, key, regions, ask),
            lacking=_lacking_tcp,
            expected=lambda: _tcp_rate(spec),
        ),
    }
    unknown = [name for name in spec.backends if name not in made]
    if unknown:
        known = ", ".join(BACKEND_ORDER)
        raise ConfigError(f"there is no KV transfer backend {unknown[0]!r}; known: {known}")
    return [made[name] for name in spec.backends or BACKEND_ORDER]


# ------------------------------------------------------------------------------ rdma


class _Rdma:
    """The RDMA adapters of one engine: its pools are registered once, for all lives of its node."""

    def __init__(self, spec: TransferSpec) -> None:
        self._spec = spec
        self._adapters: Adapters | None = None

    def lacking(self, regions: Sequence[Region]) -> str:
        """Check for pyverbs and register the pools with the adapters; returns why rdma cannot be
        used, empty if it can."""
        if not _in_build("pdserve.transfer.rdma"):
            return "this build has none"
        from pdserve.transfer.rdma.device_memory import unsupported_reason
        from pdserve.transfer.rdma.pyverbs_loader import unavailable_reason

        in_device = any(region.view is None for region in regions)
        if in_device and self._spec.verify == "all":
            return (
                "--verify-kv=all: what an adapter writes to device memory is not compared "
                "(cuda_ipc compares it; sample and off allow rdma)"
            )
        why = unavailable_reason() or unsupported_reason(regions) or self._register(regions)
        if not why and in_device and self._spec.verify != "off":
            _log.warning(
                "--verify-kv=%s: rdma does not compare KV in device memory (cuda_ipc does)",
                self._spec.verify,
            )
        return why

    def _register(self, regions: Sequence[Region]) -> str:
        if self._adapters is not None:
            return ""
        from pdserve.transfer.rdma.adapter import QueuePairOptions
        from pdserve.transfer.rdma.adapters import Adapters

        options = QueuePairOptions(traffic_class=self._spec.rdma_traffic_class)
        adapters = Adapters(regions, self._spec.rdma_devices, options)
        try:
            adapters.open()
        except TransferError as error:
            _log.warning("rdma cannot be used for KV transfers: %s", error.message)
            return error.message
        self._adapters = adapters
        return ""

    def make(self, key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
        """Create the transport of one life of the node, on the adapters that are open."""
        from pdserve.transfer.rdma.transport import RdmaTransport

        return RdmaTransport(*key, regions, ask, adapters=self._adapters)

    def close(self) -> None:
        """Close the adapters; the pools are no longer registered."""
        adapters, self._adapters = self._adapters, None
        if adapters is not None:
            adapters.close()


def _rdma_rate() -> float:
    """Rate of the fastest adapter, by what the kernel says of its ports."""
    rates = [0.0]
    for file in ADAPTERS.glob("*/ports/*/rate"):
        try:
            rates.append(float(file.read_text("ascii").split()[0]) * 1e9 / 8)  # "100 Gb/sec (…)"
        except (OSError, ValueError, IndexError):
            continue
    return max(rates)


# ------------------------------------------------------------------------------ one host


def _this_host() -> tuple[str, ...]:
    """The place of backends that need one kernel, network namespace and user."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return ("unknown",)
    return (f"host {boot}, network {network}, user {os.geteuid()}",)


def _lacking_cuda_ipc(regions: Sequence[Region]) -> str:
    if not _in_build("pdserve.transfer.same_host.cuda_ipc"):
        return "this build has none"
    if any(region.view is not None for region in regions):
        return "the pool is in host memory"
    from pdserve.transfer.cuda.nvidia import unavailable_reason
    from pdserve.transfer.same_host.cuda_ipc import unsupported_reason

    return unavailable_reason() or unsupported_reason(regions)


def _make_cuda_ipc(
    spec: TransferSpec, key: NodeLife, regions: Sequence[Region], ask: CallPeer
) -> KvTransport:
    from pdserve.transfer.same_host.cuda_ipc import CudaIpcTransport

    return CudaIpcTransport(*key, regions, ask, verify=spec.verify)


def _lacking_shm(regions: Sequence[Region]) -> str:
    if any(region.view is None for region in regions):
        return "the pool is in device memory"
    if any(region.fd is None for region in regions):
        return "the pool cannot be shared: the system offers no memfd"
    return "" if _this_host() != ("unknown",) else "this system does not say which host it is"


@functools.cache
def _copy_rate() -> float:
    """Bytes per second that one thread of this machine copies in memory, measured once per
    process."""
    source, destination = bytearray(_SAMPLE), bytearray(_SAMPLE)
    destination[:] = source  # pages are there from now on
    begin = time.perf_counter()
    destination[:] = source
    return _SAMPLE / max(1e-6, time.perf_counter() - begin)


def _make_shm(
    spec: TransferSpec, key: NodeLife, regions: Sequence[Region], ask: CallPeer
) -> KvTransport:
    from pdserve.transfer.same_host.shm import ShmTransport

    return ShmTransport(*key, regions, ask, verify=spec.verify)


# ------------------------------------------------------------------------------ tcp


def _lacking_tcp(regions: Sequence[Region]) -> str:
    """Pools in device memory are staged through pinned host memory."""
    if all(region.view is not None for region in regions):
        return ""
    if not _in_build("pdserve.transfer.cuda.host_staging"):
        return "the pool is in device memory, and this build cannot stage it"
    from pdserve.transfer.cuda.host_staging import unsupported_reason
    from pdserve.transfer.cuda.nvidia import unavailable_reason

    why = unavailable_reason() or unsupported_reason(regions)
    return f"the pool is in device memory and cannot be staged: {why}" if why else ""


def _make_tcp(
    spec: TransferSpec, key: NodeLife, regions: Sequence[Region], ask: CallPeer
) -> KvTransport:
    """A network is no memory: unless nothing is to be checked, all is."""
    from pdserve.net.transport.certificates import Certificates
    from pdserve.transfer.tcp.transport import TcpTransport

    tls = None
    if spec.tls is not None:
        cert, key_file, ca = spec.tls
        tls = Certificates(Path(cert), Path(key_file), Path(ca) if ca else None)
    verify: Verify = "off" if spec.verify == "off" else "all"
    return TcpTransport(
        *key, regions, ask, host=spec.host, advertise=spec.advertise, verify=verify, tls=tls
    )


def _tcp_rate(spec: TransferSpec) -> float:
    """The rate of the interface that peers reach, as the kernel reports it. Within one host every
    byte is copied in and out again."""
    host = spec.advertise or spec.host
    if is_loopback(host):
        return _copy_rate() / 2
    interface = interface_of(host)
    try:
        speed = float((INTERFACES / interface / "speed").read_text("ascii")) if interface else 0.0
    except (OSError, ValueError):  # a virtual interface has none
        return 0.0
    return max(0.0, speed) * 1e6 / 8


def _in_build(module: str) -> bool:
    """True if this build has the backend."""
    return importlib.util.find_spec(module) is not None
