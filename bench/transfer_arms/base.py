"""The interface of every arm, and its two processes. Needs only Python.

    python -m bench.transfer_arms.NAME driver      speaks with bench/transfer.py, moves, takes times
    python -m bench.transfer_arms.NAME partner     speaks with the driver: the other end

The bytes go from the driver's pool to the partner's. Both processes exchange lines of JSON over
their standard input and output; output of libraries goes to standard error.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from random import Random
from typing import IO, TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BLOCK = 64 * 1024
POOL = 512 << 20
"""Bytes at each end: more than the caches hold, so that a transfer finds none of its bytes there.
"""
BLOCKS = POOL // BLOCK
_MARK = 64
"""Bytes at a block's beginning that identify the block and its owner."""


class Arm:
    """One way of moving blocks. The same class serves as driver and as partner."""

    name: ClassVar[str]
    about: ClassVar[str]
    modes: ClassVar[tuple[str, ...]] = ("",)
    block: ClassVar[int] = BLOCK
    """Bytes of a block."""
    blocks: ClassVar[int] = BLOCKS
    """Blocks at each end."""

    # ------------------------------------------------------------------ the driver

    def connect(self, partner: Talk | None) -> None:
        """Makes the pool and connects to the other process."""
        raise NotImplementedError

    def move(self, mode: str, here: Sequence[int], there: Sequence[int]) -> float:
        """Moves these blocks; returns the seconds until they are known to have arrived."""
        raise NotImplementedError

    def mark(self, here: int, value: bytes) -> None:
        """Overwrites a block's beginning."""
        raise NotImplementedError

    def found(self, there: int, partner: Talk | None) -> bytes:
        """Returns a block's beginning at the other end."""
        assert partner is not None
        return bytes.fromhex(partner.ask({"what": "look", "block": there})["bytes"])

    # ------------------------------------------------------------------ the partner

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answers a request of the driver."""
        raise NotImplementedError


class Pool:
    """Anonymous memory that has been touched, and its address."""

    def __init__(self, value: int) -> None:
        self.map = mmap.mmap(-1, POOL)
        self.view = memoryview(self.map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        fill(self.view, value)

    def at(self, block: int) -> int:
        """A block's address."""
        return self.address + block * BLOCK

    def head(self, block: int) -> memoryview:
        """A block's beginning."""
        return self.view[block * BLOCK : block * BLOCK + _MARK]


def fill(view: memoryview, value: int) -> None:
    """Touches every page with bytes that differ from page to page, so that no pages are shared."""
    piece = Random(value).randbytes(1 << 20)
    for at in range(0, len(view), len(piece)):
        view[at : at + len(piece)] = piece


class Talk:
    """Sends requests to another process, one at a time."""

    def __init__(
        self, command: Sequence[str], log: IO[bytes] | None = None, *, group: bool = False
    ) -> None:
        """`group`: the process stays in this one's group, which pauses as a whole."""
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            process_group=None if group else 0,
        )

    def pause(self) -> None:
        """Stop the process and its children: some have threads that never sleep."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends a request and returns the answer; raises `RuntimeError` if the process ended or
        failed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError("the process has ended") from None
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the process has ended"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        """Closes the process's input, which ends it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def run(arm: Arm, *, alone: bool = False) -> None:
    """Runs the driver or the partner, as the command line says, until the input ends."""
    role, processors = sys.argv[1], sys.argv[2:]
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if processors:
        os.sched_setaffinity(0, {int(processors[role == "partner"])})
    if role == "partner":
        _serve(answers, arm.answer)
        return
    partner = None
    if not alone:
        module = "bench.transfer_arms." + os.path.basename(sys.argv[0]).removesuffix(".py")
        partner = Talk([sys.executable, "-m", module, "partner", *processors], group=True)
    lists = _Lists(arm.blocks)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if request["what"] == "connect":
            arm.connect(partner)
            return {}
        return _measure(arm, partner, lists, request)

    _serve(answers, answer)
    if partner is not None:
        partner.close()


def _serve(answers: IO[bytes], answer: Any) -> None:
    for line in sys.stdin:
        try:
            found = answer(json.loads(line))
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(found).encode() + b"\n")
        answers.flush()
    os._exit(0) if sys.argv[1] == "partner" else None


class _Lists:
    """Blocks of both ends, each in its own random order. No two neighbours merge, and a block is
    reused only after all others."""

    def __init__(self, blocks: int) -> None:
        self.here, self.there = list(range(blocks)), list(range(blocks))
        Random(1).shuffle(self.here)
        Random(2).shuffle(self.there)
        self._at = 0

    def take(self, count: int) -> tuple[list[int], list[int]]:
        """The next `count` blocks of both ends."""
        if self._at + count > len(self.here):
            self._at = 0
        first, self._at = self._at, self._at + count
        return self.here[first : self._at], self.there[first : self._at]


def _measure(
    arm: Arm, partner: Talk | None, lists: _Lists, request: dict[str, Any]
) -> dict[str, Any]:
    """Seconds of each of some transfers. Checks that the last one has arrived."""
    seconds = []
    for number in range(request["count"] + 1):
        here, there = lists.take(request["bytes"] // arm.block)
        value = hashlib.sha512(f"{time.monotonic()} {number}".encode()).digest()
        arm.mark(here[-1], value)
        seconds.append(arm.move(request["mode"], here, there))
    if arm.found(there[-1], partner) != value:
        raise RuntimeError("what arrived is not what was sent")
    return {"seconds": seconds[1:]}  # the first one warms up


def addresses(pool: int, blocks: Sequence[int]) -> Iterator[int]:
    """Returns the addresses of the blocks."""
    return (pool + block * BLOCK for block in blocks)
