"""Finds the C objects behind pyverbs' objects, and calls what libibverbs has and pyverbs lacks, or
calls without releasing the GIL.

pyverbs tells where its C objects are only from release 61 on. For all releases alike, the pointer
is searched among the words of the Python object: it is the one that leads to a memory region, or a
queue pair, with the same numbers that pyverbs reports. Words are followed by reading this process's
memory through the kernel, which answers a wrong address with an error instead of a crash.

A queue pair leads to everything else: its device's context and the table of functions in it, its
completion queue, that queue's channel and the channel's descriptor. The offsets are rdma-core's
stable ABI on 64-bit machines.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pdserve.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.ids import Bytes

__all__ = [
    "ACCESS",
    "IbvAsyncEvent",
    "IbvDevice",
    "IbvQueuePair",
    "MemoryRegion",
    "device_of",
    "next_event",
    "queue_pair_of",
    "register",
    "unregister",
]

_POLL_CQ, _POST_SEND, _POST_RECEIVE = 96, 208, 216
_COMMAND_FD, _ASYNC_FD = 264, 268
_RELIABLE: Final = 2
ACCESS: Final = 3
"""Access flags: local and remote writes. Nothing is read over the network."""


class IbvDevice(NamedTuple):
    """Addresses of one opened adapter."""

    context: int
    domain: int
    async_fd: int


class IbvQueuePair(NamedTuple):
    """Addresses of one queue pair, and the descriptor that says when to poll."""

    pair: int
    queue: int
    post_send: int
    post_receive: int
    poll: int
    events_fd: int


class MemoryRegion(NamedTuple):
    """A registered slice of memory."""

    handle: int
    local_key: int
    remote_key: int


# ------------------------------------------------------------------------------ finding them


class _Memory:
    """Reads this process's memory without risk of a crash."""

    def __init__(self) -> None:
        self._fd = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> _Memory:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self, address: int, size: Bytes) -> bytes:
        """Bytes at an address; fewer if fewer are readable."""
        if not 4096 <= address < 1 << 47:
            return b""
        try:
            return os.pread(self._fd, size, address)
        except OSError:
            return b""

    def words(self, address: int, count: int) -> tuple[int, ...]:
        data = self.read(address, 8 * count)
        return struct.unpack(f"<{len(data) // 8}Q", data[: len(data) // 8 * 8])

    def numbers(self, address: int, count: int) -> tuple[int, ...]:
        """32-bit numbers at an address."""
        data = self.read(address, 4 * count)
        return struct.unpack(f"<{len(data) // 4}I", data[: len(data) // 4 * 4])

    def candidates(self, instance: Any) -> Iterator[int]:
        """Words behind a Python object's header that may be pointers."""
        size = type(instance).__basicsize__ // 8
        yield from self.words(id(instance), size)[2:]


def _missing(what: str) -> TransferError:
    reason = f"this pyverbs keeps its {what} in an unknown way"
    return TransferError.at("", "this node over rdma", "set-up", reason)


def device_of(region: Any) -> IbvDevice:
    """The adapter that a `pyverbs.mr.MR` was registered with. Errors: `TransferError`."""
    with _Memory() as memory:
        for pointer in memory.candidates(region):
            context, domain, address, length = (*memory.words(pointer, 4), 0, 0, 0, 0)[:4]
            if (address, length) != (region.buf, region.length):
                continue
            if memory.numbers(pointer + 36, 2) == (region.lkey, region.rkey):
                return _checked(memory, context, domain)
    raise _missing("memory regions")


def _checked(memory: _Memory, context: int, domain: int) -> IbvDevice:
    """The context, checked by its own descriptors."""
    command, events = (*memory.numbers(context + _COMMAND_FD, 2), 0, 0)[:2]
    try:
        link = os.readlink(f"/proc/self/fd/{command}")
    except OSError:
        link = ""
    if memory.words(domain, 1) != (context,) or "uverbs" not in link:
        raise _missing("contexts")
    return IbvDevice(context, domain, events)


def queue_pair_of(instance: Any, device: IbvDevice) -> IbvQueuePair:
    """The C object of a `pyverbs.qp.QP`. Errors: `TransferError`."""
    number = instance.qp_num
    with _Memory() as memory:
        for pointer in memory.candidates(instance):
            head = memory.words(pointer, 6)
            about = memory.numbers(pointer + 48, 4)
            if (
                len(head) == 6
                and head[0] == device.context
                and head[2] == device.domain
                and about[1:2] == (number,)
                and about[3:4] == (_RELIABLE,)
            ):
                return _pair(memory, pointer, head[3], device)
    raise _missing("queue pairs")


def _pair(memory: _Memory, pair: int, queue: int, device: IbvDevice) -> IbvQueuePair:
    context, channel = (*memory.words(queue, 2), 0, 0)[:2]
    if context != device.context or memory.words(channel, 1) != (context,):
        raise _missing("completion channels")
    (events_fd,) = memory.numbers(channel + 8, 1)
    functions = {
        at: memory.words(context + at, 1)[0] for at in (_POLL_CQ, _POST_SEND, _POST_RECEIVE)
    }
    return IbvQueuePair(
        pair,
        queue,
        functions[_POST_SEND],
        functions[_POST_RECEIVE],
        functions[_POLL_CQ],
        events_fd,
    )


# ------------------------------------------------------------------------------ registering


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    library.ibv_reg_mr.restype = ctypes.c_void_p
    library.ibv_reg_mr.argtypes = (
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
    )
    library.ibv_dereg_mr.argtypes = (ctypes.c_void_p,)
    library.ibv_get_async_event.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    library.ibv_ack_async_event.argtypes = (ctypes.c_void_p,)
    if hasattr(library, "ibv_reg_dmabuf_mr"):
        library.ibv_reg_dmabuf_mr.restype = ctypes.c_void_p
        library.ibv_reg_dmabuf_mr.argtypes = (
            ctypes.c_void_p,
            ctypes.c_uint64,
            ctypes.c_size_t,
            ctypes.c_uint64,
            ctypes.c_int,
            ctypes.c_int,
        )
    return library


def register(
    device: IbvDevice, address: int, size: Bytes, *, dmabuf: int | None = None, offset: Bytes = 0
) -> MemoryRegion:
    """Register memory for local and remote writes; with `dmabuf`, the device memory behind that
    descriptor. Blocks while pages are locked, without the GIL. Errors: OSError."""
    library = _library()
    if dmabuf is None:
        handle = library.ibv_reg_mr(device.domain, address, size, ACCESS)
    elif hasattr(library, "ibv_reg_dmabuf_mr"):
        handle = library.ibv_reg_dmabuf_mr(device.domain, offset, size, address, dmabuf, ACCESS)
    else:
        raise OSError(errno.EOPNOTSUPP, "this libibverbs does not support DMA-BUF")
    if not handle:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    with _Memory() as memory:
        local, remote = memory.numbers(handle + 36, 2)
    return MemoryRegion(handle, local, remote)


def unregister(region: MemoryRegion) -> None:
    """Unregister memory: the adapter cannot reach it any more. Errors: OSError."""
    number = _library().ibv_dereg_mr(region.handle)
    if number:
        raise OSError(number, os.strerror(number))


# ------------------------------------------------------------------------------ what it reports


class IbvAsyncEvent(NamedTuple):
    """An asynchronous event of an adapter."""

    failure: str
    """What has failed; empty: nothing."""
    element: int
    """Address of the queue pair or completion queue concerned; 0: the whole adapter."""


class _RawEvent(ctypes.Structure):
    _fields_ = (("element", ctypes.c_uint64), ("kind", ctypes.c_int))


_FAILURES: Final = {
    0: "a completion queue has failed",
    1: "a queue pair has failed",
    2: "a queue pair was asked for what it does not do",
    3: "a queue pair refused an access",
    8: "the adapter has failed",
}
"""Texts of `ibv_event_type`. A port that goes down is no failure: it may be up again before the
retries end."""
_ADAPTER: Final = 8


def next_event(device: IbvDevice) -> IbvAsyncEvent | None:
    """The adapter's next event; None: there is none. The descriptor must be non-blocking."""
    library, event = _library(), _RawEvent()
    if library.ibv_get_async_event(device.context, ctypes.addressof(event)):
        return None
    library.ibv_ack_async_event(ctypes.addressof(event))
    element = 0 if event.kind == _ADAPTER else event.element
    return IbvAsyncEvent(_FAILURES.get(event.kind, ""), element)
