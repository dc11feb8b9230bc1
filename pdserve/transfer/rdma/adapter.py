"""Wraps one RDMA adapter: its port, this node's pools registered with it, and queue pairs. Calls
go to pyverbs and block for milliseconds; registering a large pool blocks for seconds.

Each queue pair has its own completion queue and channel, with room for every work request that it
can have: a completion queue that overflows loses completions, and so no peer can fill another's. A
queue pair that has failed, or whose path has ended, is destroyed and never used again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import logging
import os
import secrets
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import TransferError
from pdserve.transfer.copy_plan import block_bytes
from pdserve.transfer.rdma.device_memory import has_peermem
from pdserve.transfer.rdma.ibverbs_ffi import (
    ACCESS,
    IbvAsyncEvent,
    IbvDevice,
    MemoryRegion,
    device_of,
    next_event,
    queue_pair_of,
    register,
    unregister,
)
from pdserve.transfer.rdma.negotiate import Gid, LinkLayer, RailOffer, choose_gid, common_mtu
from pdserve.transfer.rdma.work_requests import post_receives, region_slices

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator, Sequence

    from pdserve.ids import Bytes
    from pdserve.transfer.base import Region
    from pdserve.transfer.cuda.driver import DmaBufExport
    from pdserve.transfer.rdma.negotiate import DeviceName
    from pdserve.transfer.rdma.pyverbs_loader import PyverbsModules

__all__ = [
    "SLICE_BYTES",
    "Adapter",
    "PyverbsQueuePair",
    "QueuePairOptions",
    "region_address",
    "slice_bytes",
]

_log = logging.getLogger(__name__)

SLICE_BYTES: Final[Bytes] = 7 << 29
"""Most bytes of one registration, 3.5 GiB: some adapters and drivers allow less than 4 GiB."""
_ACTIVE: Final = 4
_ETHERNET: Final = 2
_RELIABLE: Final = 2
_MAX_GIDS: Final = 256
_RNR_TIMER: Final = 12
"""0.64 ms: how long a sender waits before it retries a notification for which the receiver had no
room."""
_RNR_RETRIES: Final = 7
"""7 means unlimited: a busy event loop is no failure. The path's patience bounds it."""
_HOPS: Final = 64
_READS: Final = 16


@dataclass(frozen=True, slots=True)
class QueuePairOptions:
    """Options of every queue pair."""

    depth: int = 1024
    """Most work requests posted at a time; fewer if the adapter allows fewer."""
    receives: int = 512
    """Most notifications that may arrive before this node has read any."""
    timeout: int = 14
    """Acknowledgement timeout, as the exponent in 4.096 µs * 2^timeout: 14 is 67 ms. Adapters may
    take up to four times as long."""
    retries: int = 7
    """Retransmissions before the path is lost, which takes 0.5 s or more."""
    traffic_class: int = 0
    """RoCE traffic class, by which switches recognise lossless traffic."""
    service_level: int = 0
    """InfiniBand service level, or RoCE priority."""
    slice: Bytes = SLICE_BYTES
    """Most bytes of one registration."""


# ------------------------------------------------------------------------------ memory


def region_address(region: Region) -> int:
    """Address of a pool's first byte. Errors: `TransferError` for a pool that an adapter cannot
    register."""
    if region.view is None:
        if not region.address:
            reason = "a pool in device memory needs its address"
            raise TransferError.at("", "this node over rdma", "register", reason)
        return region.address
    return ctypes.addressof(ctypes.c_char.from_buffer(region.view))


def slice_bytes(region: Region, most: Bytes) -> Bytes:
    """Bytes of one registration: whole blocks, at most `most` bytes unless a block is larger; the
    whole pool if it fits."""
    block = block_bytes(region.layout)
    return min(region.size, max(1, most // block) * block)


# ------------------------------------------------------------------------------ the adapter


class Adapter:
    """One adapter's open device. All methods raise `TransferError`."""

    def __init__(self, verbs: PyverbsModules, name: DeviceName) -> None:
        self.verbs = verbs
        self.name = name
        self.regions: list[array[int]] = []
        """Handles of this node's pools in the adapter's work requests, by the pools' places."""
        self._registered: list[MemoryRegion] = []
        self._remote_keys: list[tuple[int, ...]] = []
        self._vectors = count()
        with self._step("open"):
            self._context = verbs.device.Context(name=name.name)
            try:
                self._read_port()
                self._domain = verbs.pd.PD(self._context)
                probe = verbs.mr.MR(self._domain, 4096, ACCESS)
                self.device: IbvDevice = device_of(probe)
                probe.close()
                os.set_blocking(self.device.async_fd, False)
            except BaseException:
                self._context.close()
                raise

    def _read_port(self) -> None:
        port = self._context.query_port(self.name.port)
        if port.state != _ACTIVE:
            raise OSError(errno.ENETDOWN, f"the port is in state {port.state}, not active")
        limits = self._context.query_device()
        self.link: LinkLayer = "roce" if port.link_layer == _ETHERNET else "infiniband"
        self.lid: int = port.lid
        self.mtu: int = port.active_mtu
        self.longest: Bytes = port.max_msg_sz
        self.max_depth: int = limits.max_qp_wr
        self.reads: int = min(_READS, limits.max_qp_rd_atom)
        table = [
            Gid(entry.gid_index, int(entry.gid_type), ipaddress.IPv6Address(entry.gid_str()).packed)
            for entry in self._context.query_gid_table(_MAX_GIDS)
            if entry.port_num == self.name.port
        ]
        self.gid = choose_gid(table, self.link, self.name.gid_index)

    @contextlib.contextmanager
    def _step(self, step: str) -> Iterator[None]:
        """Maps errors of pyverbs and the kernel to `TransferError`."""
        try:
            yield
        except self.verbs.errors as error:
            raise TransferError.at("", f"{self.name} over rdma", step, str(error)) from error

    # ------------------------------------------------------------------ memory

    def register(
        self, regions: Sequence[Region], buffers: Sequence[DmaBufExport | None], most: Bytes
    ) -> None:
        """Register these pools with the adapter, in slices of at most `most` bytes. `buffers`: the
        DMA-BUF of each that has one. May take seconds, without the GIL."""
        for region, buffer in zip(regions, buffers, strict=True):
            self.regions.append(self._register(region, buffer, slice_bytes(region, most)))

    def _register(self, region: Region, buffer: DmaBufExport | None, size: Bytes) -> array[int]:
        address = region_address(region)
        keys = []
        for offset in range(0, region.size, size):
            length = min(size, region.size - offset)
            try:
                slice = self._register_slice(buffer, address, offset, length)
            except OSError as error:
                raise self._refused(region, length, error) from error
            self._registered.append(slice)
            keys.append(slice)
        self._remote_keys.append(tuple(slice.remote_key for slice in keys))
        return region_slices(address, size, tuple(slice.local_key for slice in keys))

    def _register_slice(
        self, buffer: DmaBufExport | None, address: int, offset: Bytes, length: Bytes
    ) -> MemoryRegion:
        """`offset`: in the pool that begins at `address`. Without a DMA-BUF, or if the adapter's
        driver takes none, device memory is registered like the host's: that works where
        nvidia-peermem connects both drivers."""
        if buffer is None:
            return register(self.device, address + offset, length)
        try:
            place = buffer.offset + offset
            return register(self.device, address + offset, length, dmabuf=buffer.fd, offset=place)
        except OSError as error:
            if not has_peermem():
                raise
            _log.warning(
                "%s takes no DMA-BUF (%s): device memory is registered by its address "
                "(nvidia-peermem)",
                self.name,
                error.strerror,
            )
            return register(self.device, address + offset, length)

    def _refused(self, region: Region, length: Bytes, error: OSError) -> TransferError:
        where = "host memory" if region.view is not None else "device memory"
        reason = f"{length} bytes of {where} cannot be registered: {error.strerror}"
        if error.errno == errno.ENOMEM:
            reason += " (is locked memory limited? see ulimit -l)"
        elif region.view is None and error.errno in (errno.EOPNOTSUPP, errno.EFAULT):
            reason += " (modprobe nvidia-peermem, or an adapter whose driver takes DMA-BUF)"
        return TransferError.at("", f"{self.name} over rdma", "register", reason)

    def remote_keys(self, region: int) -> tuple[int, ...]:
        """The keys of a region's slices, for peers."""
        return self._remote_keys[region]

    # ------------------------------------------------------------------ the rest

    def pair(self, place: int, options: QueuePairOptions) -> PyverbsQueuePair:
        """Create a queue pair; `place` is the adapter's index among this node's."""
        with self._step("queue pair"):
            return PyverbsQueuePair(self, place, options)

    def events(self) -> list[IbvAsyncEvent]:
        """Failures that the adapter has reported by itself. Does not block."""
        return [event for event in iter(partial(next_event, self.device), None) if event.failure]

    def close(self) -> None:
        """Unregister the pools and close the device; its queue pairs must be destroyed."""
        with self._step("close"):
            while self._registered:
                unregister(self._registered.pop())
            self._context.close()


# ------------------------------------------------------------------------------ queue pairs


class PyverbsQueuePair:
    """A queue pair of pyverbs, with its completion queue and channel."""

    def __init__(self, adapter: Adapter, place: int, options: QueuePairOptions) -> None:
        self.adapter = adapter
        self.depth = min(options.depth, adapter.max_depth)
        self.receives = min(options.receives, adapter.max_depth)
        self._options = options
        self._channel: Any = None
        self._queue: Any = None
        self._pair: Any = None
        try:
            self._create(place)
        except BaseException:
            self.destroy()
            raise

    def _create(self, place: int) -> None:
        adapter, verbs = self.adapter, self.adapter.verbs
        context = adapter._context
        self._channel = verbs.cq.CompChannel(context)
        vector = next(adapter._vectors) % context.num_comp_vectors
        room = self.depth + self.receives
        self._queue = verbs.cq.CQ(context, room, None, self._channel, vector)
        limits = verbs.qp.QPCap(
            max_send_wr=self.depth, max_recv_wr=self.receives, max_send_sge=1, max_recv_sge=1
        )
        wanted = verbs.qp.QPInitAttr(
            qp_type=_RELIABLE, scq=self._queue, rcq=self._queue, cap=limits, sq_sig_all=0
        )
        self._pair = verbs.qp.QP(adapter._domain, wanted)
        self.raw = queue_pair_of(self._pair, adapter.device)
        os.set_blocking(self.raw.events_fd, False)
        self._queue.req_notify()
        self._attributes: Any = verbs.qp.QPAttr(port_num=adapter.name.port)
        self._attributes.qp_access_flags = ACCESS
        self._pair.to_init(self._attributes)
        self.receive(self.receives)
        self.offer = RailOffer(
            device=place,
            link=adapter.link,
            number=self._pair.qp_num,
            sequence=secrets.randbits(24),
            gid=adapter.gid.value,
            lid=adapter.lid,
            mtu=adapter.mtu,
            reads=adapter.reads,
        )

    def connect(self, peer: RailOffer) -> None:
        """Connect to the peer's queue pair; afterwards writes may be posted and may arrive. Errors:
        `PlanError`, `TransferError`."""
        attributes, ours, options = self._attributes, self.offer, self._options
        attributes.path_mtu = common_mtu(ours, peer)
        attributes.ah_attr = self._way_to(peer)
        attributes.dest_qp_num = peer.number
        attributes.rq_psn, attributes.sq_psn = peer.sequence, ours.sequence
        attributes.max_rd_atomic = min(ours.reads, peer.reads)
        attributes.max_dest_rd_atomic = min(ours.reads, peer.reads)
        attributes.min_rnr_timer, attributes.rnr_retry = _RNR_TIMER, _RNR_RETRIES
        attributes.timeout, attributes.retry_cnt = options.timeout, options.retries
        with self.adapter._step("connect"):
            self._pair.to_rtr(attributes)
            self._pair.to_rts(attributes)

    def _way_to(self, peer: RailOffer) -> Any:
        addr, adapter, options = self.adapter.verbs.addr, self.adapter, self._options
        common = {"port_num": adapter.name.port, "sl": options.service_level}
        if adapter.link == "infiniband" and peer.gid[:8] == self.offer.gid[:8]:
            return addr.AHAttr(dlid=peer.lid, is_global=0, **common)
        route = addr.GlobalRoute(
            dgid=addr.GID(ipaddress.IPv6Address(peer.gid).exploded),
            sgid_index=adapter.gid.index,
            hop_limit=_HOPS,
            traffic_class=options.traffic_class,
        )
        return addr.AHAttr(dlid=peer.lid, is_global=1, gr=route, **common)

    def receive(self, number: int) -> None:
        """Post so many receives for notifications. Errors: `OSError`."""
        error = post_receives(self.raw.post_receive, self.raw.pair, number)
        if error:
            raise OSError(error, os.strerror(error))

    def rearm(self) -> bool:
        """Read the channel's event and ask for the next one; False: there was none."""
        try:
            self._channel.get_cq_event(self._queue)
        except self.adapter.verbs.pyverbs_error.PyverbsRDMAError as error:
            if error.error_code == errno.EAGAIN:
                return False
            raise OSError(error.error_code, str(error)) from error
        self._queue.ack_events(1)
        self._queue.req_notify()
        return True

    def destroy(self) -> None:
        """Destroy the queue pair; afterwards it sends and receives nothing. Idempotent. Errors:
        `TransferError`; it may then still be in use."""
        with self.adapter._step("destroy"):
            for part in ("_pair", "_queue", "_channel"):
                held = getattr(self, part)
                if held is not None:
                    held.close()
                    setattr(self, part, None)
