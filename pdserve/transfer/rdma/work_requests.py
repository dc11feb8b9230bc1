"""Fills work requests as the C structures of libibverbs, and posts them as a chain.

A `SendTable` is filled from its first entry on, posted in one call, and filled anew: the device has
copied what was posted. What never changes (the links between entries, the addresses of their
pieces) is written once. One of every few work requests asks for a completion, and so does the last
of every post; each has its number on its queue pair, so that a completion tells how far the queue
is.

A region is an array of int64: its address, the bytes of one registered slice of it, and the key of
each slice. A run that crosses slices becomes several work requests.

Of a queue pair it knows only the address, and the address of the device's post function. The
layouts are rdma-core's stable ABI on 64-bit little-endian machines. `native/src/bind_rdma.cpp` is
the native twin that workers use; this one serves without a compiler.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

from pdserve import accel

if TYPE_CHECKING:
    from pdserve.ids import Bytes

__all__ = [
    "SendTable",
    "SendTablePure",
    "WorkCompletion",
    "new_table",
    "poll_completions",
    "poll_completions_pure",
    "post_receives",
    "post_receives_pure",
    "region_slices",
]

_WRITE: Final = 0
_WRITE_WITH_WORD: Final = 1
_SIGNALED: Final = 2
_REQUEST: Final = 16
"""64-bit words of one entry: id, next, list, pieces and opcode, flags and immediate data, address,
key."""
_POLLED: Final = 64
_COMPLETION: Final = struct.Struct("<QiiIIIIIIHHBB2x")
_POST = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_POLL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)


class WorkCompletion(NamedTuple):
    """One work completion; without success only id, status and vendor error are valid."""

    id: int
    status: int
    opcode: int
    word: int
    vendor: int


def region_slices(address: int, size: Bytes, keys: tuple[int, ...]) -> array[int]:
    """A region in the form that tables take; `size` is the bytes of one slice."""
    return array("q", (address, size, *keys))


class SendTablePure:
    """Pure-Python version of the native send table."""

    def __init__(self, depth: int) -> None:
        if depth < 1:
            raise ValueError("a table has at least one entry")
        self.depth = depth
        self._memory = ctypes.create_string_buffer(8 * _REQUEST * depth)
        self._pieces_memory = ctypes.create_string_buffer(16 * depth)
        self._words = memoryview(self._memory).cast("B").cast("Q")
        self._pieces = memoryview(self._pieces_memory).cast("B").cast("Q")
        base, pieces = ctypes.addressof(self._memory), ctypes.addressof(self._pieces_memory)
        for at in range(depth):
            self._words[_REQUEST * at + 1] = base + 8 * _REQUEST * (at + 1) if at < depth - 1 else 0
            self._words[_REQUEST * at + 2] = pieces + 16 * at

    def fill(
        self,
        at: int,
        stop: int,
        source: array[int],
        destination: array[int],
        length: array[int],
        run: int,
        done: Bytes,
        ours: array[int],
        theirs: array[int],
    ) -> tuple[int, int, Bytes]:
        """Write entries from `at` on, before `stop`, beginning `done` bytes into a run. Returns the
        next position in the table and in the runs."""
        count = len(length)
        if len(source) != count or len(destination) != count or stop > self.depth or at < 0:
            raise ValueError("three arrays of one size, and entries of the table")
        while run < count and at < stop:
            here, there = source[run] + done, destination[run] + done
            left = length[run] - done
            if left <= 0:
                raise ValueError("a run has at least one byte")
            key, left = _key(ours, here, left)
            remote_key, left = _key(theirs, there, left)
            if left > 0x7FFF_FFFF:
                raise ValueError("a work request has at most 2 GiB")
            self._pieces[2 * at] = ours[0] + here
            self._pieces[2 * at + 1] = left | key << 32
            self._words[_REQUEST * at + 3] = 1 | _WRITE << 32
            self._words[_REQUEST * at + 5] = theirs[0] + there
            self._words[_REQUEST * at + 6] = remote_key
            at, done = at + 1, done + left
            if done == length[run]:
                run, done = run + 1, 0
        return at, run, done

    def empty(self, at: int, word: int, theirs: array[int]) -> None:
        """Write an entry without data: a notification, or with -1 one that only completes."""
        self._check(at)
        opcode = _WRITE if word < 0 else _WRITE_WITH_WORD
        swapped = int.from_bytes((word & 0xFFFF_FFFF).to_bytes(4, "big"), "little")
        self._words[_REQUEST * at + 3] = opcode << 32
        self._words[_REQUEST * at + 4] = swapped << 32
        self._words[_REQUEST * at + 5] = theirs[0]
        self._words[_REQUEST * at + 6] = theirs[2]

    def post(self, function: int, pair: int, count: int, first: int, every: int) -> tuple[int, int]:
        """Post the first `count` entries, numbered from `first` on. Returns errno, 0 without an
        error, and how many were posted."""
        if not 0 < count <= self.depth or every < 1:
            raise ValueError("nothing to post")
        words = self._words
        for at in range(count):
            words[_REQUEST * at] = first + at
            signaled = (first + at) % every == 0 or at + 1 == count
            word = words[_REQUEST * at + 4] >> 32 << 32
            words[_REQUEST * at + 4] = word | (_SIGNALED if signaled else 0)
        last = _REQUEST * (count - 1) + 1
        linked, words[last] = words[last], 0
        base, bad = ctypes.addressof(self._memory), ctypes.c_void_p()
        error = _POST(function)(pair, base, ctypes.addressof(bad))
        words[last] = linked
        posted = (bad.value - base) // (8 * _REQUEST) if error and bad.value else count
        return error, posted

    def row(self, at: int) -> tuple[int, int, int, int, int, int, int, int, int, int]:
        """One entry for tests: id, opcode, flags, pieces, address, length, key, remote address,
        remote key, immediate data."""
        self._check(at)
        number, _, _, kind, flags, remote, key = self._words[_REQUEST * at :][:7]
        address, piece = self._pieces[2 * at : 2 * at + 2]
        word = int.from_bytes((flags >> 32).to_bytes(4, "little"), "big")
        low = 0xFFFF_FFFF
        return (
            *(number, kind >> 32, flags & low, kind & low),
            *(address, piece & low, piece >> 32, remote, key & low, word),
        )

    def _check(self, at: int) -> None:
        if not 0 <= at < self.depth:
            raise ValueError("no such entry")


def _key(region: array[int], offset: Bytes, left: Bytes) -> tuple[int, Bytes]:
    """The key of the slice that holds `offset`, and how much of a run lies in that slice."""
    place = offset // region[1]
    if not 0 <= place < len(region) - 2:
        raise ValueError("a run leaves its region")
    return region[2 + place], min(left, (place + 1) * region[1] - offset)


def post_receives_pure(function: int, pair: int, count: int) -> int:
    """Post so many receives for notifications. Returns errno, or 0."""
    if count < 1:
        raise ValueError("nothing to post")
    memory = ctypes.create_string_buffer(32 * count)
    base, bad = ctypes.addressof(memory), ctypes.c_void_p()
    words = memoryview(memory).cast("B").cast("Q")
    for at in range(count - 1):
        words[4 * at + 1] = base + 32 * (at + 1)
    error: int = _POST(function)(pair, base, ctypes.addressof(bad))
    return error


def poll_completions_pure(function: int, queue: int) -> list[tuple[int, int, int, int, int]]:
    """Poll up to 64 completions, as tuples of `WorkCompletion`."""
    memory = ctypes.create_string_buffer(_COMPLETION.size * _POLLED)
    count = _POLL(function)(queue, _POLLED, ctypes.addressof(memory))
    if count < 0:
        raise ValueError("the completion queue cannot be read")
    found = []
    for at in range(count):
        number, status, opcode, vendor, _, word, *_ = _COMPLETION.unpack_from(
            memory, at * _COMPLETION.size
        )
        swapped = int.from_bytes(word.to_bytes(4, "little"), "big")
        found.append((number, status, opcode, swapped, vendor))
    return found


if TYPE_CHECKING:
    SendTable = SendTablePure | accel.native.SendTable
elif accel.NATIVE:
    SendTable = accel.native.SendTable
else:
    SendTable = SendTablePure


def new_table(depth: int) -> SendTable:
    """A send table: native if available."""
    return accel.native.SendTable(depth) if accel.NATIVE else SendTablePure(depth)


post_receives = accel.native.post_receives if accel.NATIVE else post_receives_pure
poll_completions = accel.native.poll_completions if accel.NATIVE else poll_completions_pure
