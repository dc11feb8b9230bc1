"""A thread that owns an asyncio loop, for engines whose interface is asynchronous.

A core is called from one thread and has no loop. `LoopThread` gives an engine a loop of its own:
coroutines are handed in from any thread, their exceptions reach a callback, and `stop` has a limit
and names what has not ended. It knows no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from pdserve.ids import Seconds

_log = logging.getLogger(__name__)

T = TypeVar("T")

_BLOCKED: Seconds = 1.0
"""Extra seconds that `stop` grants to a thread that may be blocked in a call."""


async def pause(seconds: Seconds) -> None:
    """Let a coroutine of the loop wait, so that its file needs no asyncio."""
    await asyncio.sleep(seconds)


class LoopTask(Generic[T]):
    """A coroutine that was handed to a loop; all methods may be called from any thread."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self._loop = loop
        self._future: Future[T] = Future()
        self._task: asyncio.Task[T] | None = None

    @property
    def done(self) -> bool:
        """True once the coroutine has returned, failed or been cancelled."""
        return self._future.done()

    def cancel(self) -> None:
        """Cancel the coroutine; returns at once. Does nothing if it or the loop has ended."""
        if self._future.done():
            return
        try:
            self._loop.call_soon_threadsafe(self._cancel)
        except RuntimeError:  # the loop is closed, and with it the task
            self._future.cancel()

    def result(self, timeout: Seconds) -> T:
        """Wait for the end and return the result.

        Not for the loop's own thread. Raises what the coroutine raised, `TimeoutError`, or
        `concurrent.futures.CancelledError`.
        """
        try:
            return self._future.result(timeout)
        except FutureTimeout as error:
            if self._future.done():
                raise  # the coroutine itself has raised it
            raise TimeoutError(f"{self.name} has not ended after {timeout:g} s") from error

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class LoopThread:
    """A daemon thread with an asyncio loop. It begins with `start` and ends with `stop`, once each.

    `on_error(name, error)` is called in the loop's thread for every exception that no caller
    takes: of submitted coroutines, of functions given to `call_soon`, of tasks that the engine has
    made itself, and of the loop.
    """

    def __init__(self, name: str, on_error: Callable[[str, BaseException], None]) -> None:
        self.name = name
        self._on_error = on_error
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()
        self._open = False
        """Guarded by the lock: true from `start` to `stop`. What was scheduled while it was true
        stands in the loop's queue before the end."""
        self._limit: Seconds = 0.0
        self._end = asyncio.Event()
        self._submitted: set[LoopTask[Any]] = set()
        """Submitted coroutines that have not ended; each removes itself. Only the loop's thread
        writes it."""
        self._left: list[str] = []

    @property
    def alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread; what is submitted from now on runs."""
        with self._lock:
            self._open = True
            self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T], name: str) -> LoopTask[T]:
        """Run a coroutine on the loop. Raises `RuntimeError` if the loop is not running."""
        return self._submit(coroutine, name, report=True)

    def run(self, coroutine: Coroutine[Any, Any, T], name: str, timeout: Seconds) -> T:
        """Run a coroutine on the loop and wait for it; not for the loop's own thread.

        Raises what it raises, and `TimeoutError` after it was cancelled.
        """
        task = self._submit(coroutine, name, report=False)
        try:
            return task.result(timeout)
        except TimeoutError:
            task.cancel()
            raise

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function in the loop's thread, soon and in order. After `stop`: nothing."""
        with self._lock:
            if self._open:
                self._loop.call_soon_threadsafe(self._call, function, args)

    def stop(self, timeout: Seconds) -> list[str]:
        """Cancel everything, wait at most `timeout` seconds, and end the thread.

        Returns the names of tasks that did not end; if the thread itself is blocked, its name is
        among them and the thread is left behind. A second call returns the same.
        """
        with self._lock:
            was_open, self._open = self._open, False
            if was_open:
                self._limit = timeout
                self._loop.call_soon_threadsafe(self._end.set)
        if not was_open:
            if not self._thread.is_alive() and not self._loop.is_closed():
                self._loop.close()  # never started
            return self._left
        self._thread.join(timeout + _BLOCKED)
        if self._thread.is_alive():
            self._left = [self.name, *sorted(task.name for task in list(self._submitted))]
        if self._left:
            _log.warning("%s: not ended after %g s: %s", self.name, timeout, ", ".join(self._left))
        return self._left

    # ------------------------------------------------------------------ inside

    def _submit(self, coroutine: Coroutine[Any, Any, T], name: str, *, report: bool) -> LoopTask[T]:
        task: LoopTask[T] = LoopTask(name, self._loop)
        with self._lock:
            if self._open:
                self._loop.call_soon_threadsafe(self._begin, task, coroutine, report)
                return task
        coroutine.close()
        raise RuntimeError(f"the loop of {self.name} is not running")

    def _begin(self, handle: LoopTask[T], coroutine: Coroutine[Any, Any, T], report: bool) -> None:
        handle._task = self._loop.create_task(coroutine, name=handle.name)
        self._submitted.add(handle)
        handle._task.add_done_callback(lambda task: self._ended(handle, task, report))

    def _ended(self, handle: LoopTask[T], task: asyncio.Task[T], report: bool) -> None:
        self._submitted.discard(handle)
        if task.cancelled():
            handle._future.cancel()
        elif error := task.exception():
            handle._future.set_exception(error)
            if report:
                self._report(handle.name, error)
        else:
            handle._future.set_result(task.result())

    def _call(self, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        try:
            function(*args)
        except Exception as error:
            self._report(getattr(function, "__qualname__", repr(function)), error)

    def _report(self, name: str, error: BaseException) -> None:
        try:
            self._on_error(name, error)
        except Exception:  # the callback is broken: say so, and go on
            _log.exception("%s: the callback for errors failed at %s", self.name, name)

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report what the loop finds, such as the failure of a task that the engine has made."""
        error = context.get("exception")
        name = str(context.get("task") or context.get("future") or context["message"])
        self._report(name, error or RuntimeError(str(context["message"])))

    def _run(self) -> None:
        loop = self._loop
        loop.set_exception_handler(self._unhandled)
        try:
            loop.run_until_complete(self._main())
        except BaseException as error:  # SystemExit of a task, above all
            self._report(self.name, error)
        finally:
            with self._lock:
                self._open = False
            # What is pending now will be collected, and has been named.
            loop.set_exception_handler(lambda loop, context: None)
            loop.close()
            self._release()

    async def _main(self) -> None:
        await self._end.wait()
        deadline = self._loop.time() + self._limit
        own = asyncio.current_task()
        while tasks := asyncio.all_tasks() - {own}:
            for task in tasks:
                task.cancel()
            _, left = await asyncio.wait(tasks, timeout=max(deadline - self._loop.time(), 0.0))
            if left:
                self._left = sorted(task.get_name() for task in left)
                return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._loop.shutdown_asyncgens(), deadline - self._loop.time())

    def _release(self) -> None:
        """End the waiting for coroutines that cannot go on any more."""
        for handle in list(self._submitted):
            handle._future.cancel()
            self._submitted.discard(handle)


__all__ = ["CancelledError", "LoopTask", "LoopThread", "pause"]
