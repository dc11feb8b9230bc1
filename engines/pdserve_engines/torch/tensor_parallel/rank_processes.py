"""Starts the processes of the other ranks, watches them and ends them. Rank 0 owns it.

The ranks are children of the engine process and die with it. If one of them ends or stands still,
all are ended: the operations that they compute together cannot be left by one alone.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from itertools import zip_longest
from typing import TYPE_CHECKING, Final, TypeVar

from pdserve.errors import ConfigError, EngineDied
from pdserve.limits.sizes import approximate_size
from pdserve.observe.heartbeat import HeartbeatPage
from pdserve_engines.torch.tensor_parallel.collectives import join_group
from pdserve_engines.torch.tensor_parallel.plan_ring import PlanRing
from pdserve_engines.torch.tensor_parallel.rank_link import (
    AllocatePool,
    JoinRanks,
    LoadRank,
    PoolAllocated,
    RankFailed,
    RankLinkClosed,
    RankLoaded,
    link_pair,
)
from pdserve_engines.torch.tensor_parallel.rank_plan import encode_plan
from pdserve_engines.torch.tensor_parallel.rank_watch import RankWatch, look_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.engine import EngineSpec
    from pdserve.transfer.cuda.driver import CudaIpcExport
    from pdserve_engines.torch.tensor_parallel.collectives import RankGroup
    from pdserve_engines.torch.tensor_parallel.placement import RankPlacement
    from pdserve_engines.torch.tensor_parallel.rank_plan import RankPlan

__all__ = ["RankPool", "RankProcesses"]

_log = logging.getLogger(__name__)

_REAP: Seconds = 5.0
"""Seconds for a killed rank to end."""
_MODULE: Final = "pdserve_engines.torch.tensor_parallel.rank"
_LOAD: Seconds = 1800.0
"""Longest load of a rank. The node ends the engine after `--start-timeout`, if that is shorter."""
_ALLOCATE: Seconds = 60.0
_STOP: Seconds = 2.0
"""Longest orderly end of a rank, before it is killed."""
_LAST_WORDS: Seconds = 0.5
"""How long a rank that ended has to be seen as ended, and to say why."""

M = TypeVar("M")


class _Rank:
    """One child."""

    def __init__(self, number: int, patience: Seconds) -> None:
        self.number = number
        self.watch = RankWatch(patience)
        self.page = HeartbeatPage.create()
        self.link, theirs = link_pair()
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    _MODULE,
                    f"--fd={theirs.fileno()}",
                    f"--parent={os.getpid()}",
                ],
                pass_fds=[theirs.fileno()],
            )

    def __str__(self) -> str:
        return f"rank {self.number} (process {self.process.pid})"

    def close(self) -> None:
        """Kill the process if it still runs, and free all. Idempotent."""
        self.link.close()
        if self.process.poll() is None:
            self.process.kill()
        try:
            self.process.wait(_REAP)
        except subprocess.TimeoutExpired:  # the kernel holds it, as in a read of a dead disk
            _log.warning("%s does not end %g s after it was killed", self, _REAP)
        self.page.close()


class RankPool:
    """The KV memory of another rank, mapped into this process."""

    def __init__(self, fd: int) -> None:
        """Own the descriptor `fd`."""
        self.fd = fd
        self.memory = mmap.mmap(fd, os.fstat(fd).st_size)

    def close(self) -> None:
        """Unmap the memory, once nothing views it any more. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        with suppress(BufferError):
            self.memory.close()


class RankProcesses:
    """The ranks 1 to `spec.tensor_parallel` - 1. Used by one thread; `close` from any."""

    def __init__(self, spec: EngineSpec, plan_bytes: Bytes, patience: Seconds) -> None:
        """Start the processes, which begin to load at once. `plan_bytes`: most bytes of a plan;
        `patience`: longest wait for a rank within a step. Raises `EngineDied`, and `ConfigError` if
        there is no memory for plans."""
        self._patience = patience
        self._count = spec.tensor_parallel
        self._ranks: list[_Rank] = []
        self._closed = False
        try:
            self._ring = PlanRing(plan_bytes, self._count - 1)
        except OSError as error:
            raise ConfigError(
                f"no memory for the plans of ranks ({approximate_size(plan_bytes)} each): {error}; "
                "lower --max-model-len or --max-sequences"
            ) from error
        self._store = os.memfd_create("pdserve-ranks", os.MFD_CLOEXEC)
        try:
            for number in range(1, self._count):
                self._start(spec, number)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | RankLinkClosed):
                raise EngineDied(f"a rank cannot be started: {error}") from error
            raise

    def _start(self, spec: EngineSpec, number: int) -> None:
        rank = _Rank(number, self._patience)
        self._ranks.append(rank)
        assert rank.page.fd is not None
        fds = (self._ring.fd, self._store, self._ring.bells[number - 1], rank.page.fd)
        rank.link.send(LoadRank(spec, number, self._patience), fds)
        rank.page.close_fd()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, in order."""
        return tuple(rank.process.pid for rank in self._ranks)

    def wait_loaded(self) -> list[RankLoaded]:
        """Wait until all ranks have loaded; returns what they say of it. Raises `EngineDied`, with
        the reason of a rank that cannot load."""
        return [found for found, _ in self._answers(RankLoaded, _LOAD)]

    def join(self, placement: RankPlacement) -> RankGroup:
        """Connect all ranks; returns rank 0's end. Raises `EngineDied`."""
        try:
            for rank in self._ranks:
                rank.link.send(JoinRanks())
            return join_group(placement, self._store, 0, self._patience)
        except (RankLinkClosed, RuntimeError) as error:
            raise self.lost(error) from error

    def allocate(
        self, num_blocks: int, memories: Sequence[CudaIpcExport] = ()
    ) -> list[RankPool | None]:
        """Let each rank allocate its pool, or map its one of `memories`. Returns the pools in host
        memory, which the caller closes; None for memory that cannot be shared. Raises
        `EngineDied`."""
        try:
            for rank, memory in zip_longest(self._ranks, memories):
                rank.link.send(AllocatePool(num_blocks, memory))
        except RankLinkClosed as error:
            raise self.lost(error) from error
        return [
            RankPool(fds[0]) if fds else None for _, fds in self._answers(PoolAllocated, _ALLOCATE)
        ]

    @property
    def look_interval(self) -> Seconds:
        """Seconds between two calls of `check`."""
        return look_interval(self._patience)

    def check(self) -> None:
        """Look at all ranks between two steps, after `allocate`. Raises `EngineDied` if one has
        ended, or has given no sign of life for the whole patience."""
        if self._closed:
            raise EngineDied("the ranks have ended")
        now = time.monotonic()
        still = [rank for rank in self._ranks if rank.watch.look(rank.page.look().ticks, now)]
        if still or self._reason():
            raise self.lost(EngineDied("it has no work"))

    def tell(self, plan: RankPlan) -> None:
        """Pass a plan to all ranks. Raises `EngineDied`, and `EngineError` for a plan that is too
        large, which no rank has got then."""
        if self._closed:
            raise EngineDied("the ranks have ended")
        try:
            self._ring.write(encode_plan(plan), self._patience, self._check_alive)
        except EngineDied as error:
            raise self.lost(error) from error

    def lost(self, error: BaseException) -> EngineDied:
        """End all ranks after a failure; returns the error that says which rank is at fault."""
        until = time.monotonic() + _LAST_WORDS
        while not (reason := self._reason()) and time.monotonic() < until:
            time.sleep(0.01)
        return self.end(reason or f"{self._slowest()}: {error}")

    def end(self, reason: str) -> EngineDied:
        """Kill all ranks for this reason; returns the error that says so. It comes before the node
        counts the engine as stalled, so a rank that stands still is not asked to end in order."""
        _log.error("tensor parallel: %s", reason)
        for rank in self._ranks:
            rank.process.kill()
        self.close()
        return EngineDied(f"tensor parallel: {reason}")

    def close(self) -> None:
        """End the processes and free all. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for rank in self._ranks:
            rank.link.close()
        until = time.monotonic() + _STOP
        for rank in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, until - time.monotonic()))
            rank.close()
        self._ring.close()
        os.close(self._store)

    def _answers(self, kind: type[M], patience: Seconds) -> list[tuple[M, list[int]]]:
        """The answers of all ranks, in order. A rank that ends is noticed at once, also while a
        slower one is waited for."""
        until = time.monotonic() + patience
        waiting = {rank.link.fileno(): rank for rank in self._ranks}
        found: dict[int, tuple[M, list[int]]] = {}
        try:
            while waiting:
                rest = until - time.monotonic()
                ready = select.select(list(waiting), [], [], max(0.0, rest))[0]
                if not ready:
                    raise TimeoutError(f"{next(iter(waiting.values()))} gives no answer")
                for rank in map(waiting.pop, ready):
                    found[rank.number] = _answer(rank, kind)
        except (EngineDied, RankLinkClosed, TimeoutError) as error:
            for fd in (fd for _, fds in found.values() for fd in fds):
                os.close(fd)
            said = isinstance(error, EngineDied)
            raise (self.end(str(error)) if said else self.lost(error)) from error
        return [found[rank.number] for rank in self._ranks]

    def _check_alive(self) -> None:
        if reason := self._reason():
            raise EngineDied(reason)

    def _reason(self) -> str:
        """Why a rank has ended; empty if all live."""
        for rank in self._ranks:
            if words := _last_words(rank):
                return f"{rank} failed: {words}"
        for rank in self._ranks:
            status = rank.process.poll()
            if status is not None:
                how = f"signal {-status}" if status < 0 else f"status {status}"
                return f"{rank} ended with {how}"
        return ""

    def _slowest(self) -> str:
        """What the rank does that has made the least progress."""
        seen = [(rank.page.look(), rank) for rank in self._ranks]
        reading, rank = min(seen, key=lambda pair: pair[0].ticks)
        return f"no progress for {self._patience:g} s; {rank} is in {reading.what}"


def _answer(rank: _Rank, kind: type[M]) -> tuple[M, list[int]]:
    """The message of a rank that has sent one, or has closed its link. Raises `EngineDied` with the
    rank's own reason, and `RankLinkClosed`."""
    answer = rank.link.receive(0.0)
    assert answer is not None, f"{rank} has sent nothing"
    message, fds = answer
    if isinstance(message, RankFailed):
        raise EngineDied(f"{rank} failed: {message.reason}")
    assert isinstance(message, kind), f"{rank} answered {type(message).__name__}"
    return message, fds


def _last_words(rank: _Rank) -> str:
    """What a rank said when it failed; empty: nothing."""
    with suppress(RankLinkClosed):
        found = rank.link.receive(0.0)
        if found is not None and isinstance(found[0], RankFailed):
            return found[0].reason
    return ""
