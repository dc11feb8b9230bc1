"""Fixtures that fail a test which leaves something behind.

After every test: no new thread, child process, open socket, memfd or /dev/shm file; after every
async test also no unfinished task, no unclosed transport, and no exception that reached the loop
because nobody awaited it. Pool tests ask for `watch_blocks` and get the same promise for KV blocks.

Larger-scoped fixtures are set up before the first snapshot, so what they own is not counted.
Pipes and eventfds are not counted: the event loop's library keeps some for the process's life.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from tests.support import loops

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Set

GRACE_S = 10.0
"""How long a thread, process or socket may take to go away by itself: closing is often handed to
somebody else, who waits for the processor on a loaded machine. Only a test that leaks waits it out;
how soon something must be freed is for the test of that promise to say."""

LOOP_TURNS = 10
"""Turns of the event loop a finished test's tasks get: enough for callbacks of callbacks to end,
far too few for a task that waits for time or for a peer."""

COUNTED_FDS = ("socket:", "/memfd:", "/dev/shm/")


@dataclass(frozen=True)
class Resources:
    """What the process holds at one moment, each item in words a failure message can use."""

    threads: Set[str]
    children: Set[int]
    fds: Set[str]

    @classmethod
    def now(cls) -> Resources:
        """Take a snapshot of this process."""
        return cls(
            frozenset(f"{t.name} ({t.ident})" for t in threading.enumerate()),
            frozenset(_children()),
            frozenset(_open_fds()),
        )

    def since(self, before: Resources) -> list[str]:
        """One line for every item that `before` did not have."""
        return [
            *(f"thread {name}" for name in sorted(self.threads - before.threads)),
            *(f"child process {pid}: {_command(pid)}" for pid in self.children - before.children),
            *(f"open {target}" for target in sorted(self.fds - before.fds)),
        ]


def _children() -> Iterator[int]:
    """Direct children, zombies included: those were never waited for."""
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
            yield from map(int, file.read().split())


def _open_fds() -> Iterator[str]:
    """Targets of the counted descriptors; the kernel's inode numbers make them distinct."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith(COUNTED_FDS):
                yield f"fd {fd} -> {target}"


def _command(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().replace(b"\0", b" ").decode(errors="replace").strip() or "(zombie)"
    return "(gone)"


def _reap(pids: Set[int]) -> None:
    """End leaked children, so that one failure does not slow down or confuse the tests after it."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _bury() -> None:
    """Let what was leaked complain here, unheard: the next test is not to blame for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(autouse=True)
def no_leaked_resources() -> Iterator[None]:
    """Fail the test that leaves a thread, child process, socket, memfd or shared-memory file."""
    before = Resources.now()
    loops.unclosed.clear()
    yield
    deadline = time.monotonic() + GRACE_S
    after = Resources.now()
    while after.since(before) and time.monotonic() < deadline:
        time.sleep(0.01)
        after = Resources.now()
    leaked = after.since(before) + loops.unclosed
    _reap(after.children - before.children)
    if leaked:
        _bury()
        pytest.fail("left behind:\n  " + "\n  ".join(leaked), pytrace=False)


@pytest.fixture(autouse=True)
def no_leaked_tasks(no_leaked_resources: None, request: pytest.FixtureRequest) -> None:
    """Check the tasks of async tests, without giving a loop to tests that have none."""
    if request.node.get_closest_marker("asyncio"):
        request.getfixturevalue("tasks_end_with_the_test")


@pytest.fixture
async def tasks_end_with_the_test() -> AsyncIterator[None]:
    """Fail the test that leaves a task running or an exception unhandled in its event loop.

    Torn down after the test's own async fixtures and before the loop is closed, which would
    cancel leftovers without a word.
    """
    loop = asyncio.get_running_loop()
    unhandled: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    before = asyncio.all_tasks()
    yield
    leaked = await _unfinished(before)
    problems = [f"task {task!r}" for task in leaked]
    for task in leaked:
        task.cancel()
    if leaked:
        await asyncio.wait(leaked, timeout=GRACE_S)
    problems += [f"{c['message']}: {c.get('exception')!r}" for c in unhandled]
    if problems:
        pytest.fail("left in the event loop:\n  " + "\n  ".join(problems), pytrace=False)


async def _unfinished(before: Set[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
    """Tasks younger than `before` that are still there after a few turns of the loop."""
    mine = {asyncio.current_task()}
    for _ in range(LOOP_TURNS):
        if not asyncio.all_tasks() - before - mine:
            break
        await asyncio.sleep(0)
    return sorted(asyncio.all_tasks() - before - mine, key=lambda task: task.get_name())


class _Counts(Protocol):
    @property
    def used(self) -> int: ...
    @property
    def quarantined(self) -> int: ...


class Pool(Protocol):
    """What `watch_blocks` needs of a block pool."""

    def check(self) -> None:
        """Raise when the pool's own books do not balance."""

    def counts(self) -> _Counts:
        """Blocks by state."""


@pytest.fixture
def watch_blocks() -> Iterator[Callable[[Pool], None]]:
    """Call it with a pool: at the end the pool must be sound, with nothing used or quarantined."""
    pools: list[Pool] = []
    yield pools.append
    for pool in pools:
        pool.check()
        counts = pool.counts()
        if counts.used or counts.quarantined:
            pytest.fail(f"blocks left behind: {counts}", pytrace=False)
