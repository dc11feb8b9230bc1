"""Reads the images of requests in a thread of its own, one request at a time, in their order.

So no step of the engine waits for a picture to be decoded. The thread begins with the first request
that has images. What waits is bounded: the files by their bytes, and pictures that have been read,
which take much more, by the number of requests that are `ahead` of the engine: the thread reads no
further before one of these has begun or is gone. Knows no vLLM: the caller gives the function that
reads.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

from pdserve.errors import Overloaded, PdserveError, StepFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.request import GenerateRequest
    from pdserve_engines.vllm.image_reader import ReadPrompt

__all__ = ["ImageQueue"]

_LOG = logging.getLogger("pdserve.engines.vllm")
MOST_BYTES: Bytes = 1 << 30
"""Most bytes of files that wait to be read."""
AHEAD = 32
"""Most requests whose images have been read and that the engine has not begun."""
_END: Seconds = 5.0
"""Seconds that `close` waits for the picture that is being read."""


class ImageQueue:
    """Requests whose images are read. The core's thread calls all methods; it bounds how many
    requests there are."""

    def __init__(
        self,
        read: Callable[[GenerateRequest], ReadPrompt],
        on_read: Callable[[], None],
        *,
        most: Bytes = MOST_BYTES,
        ahead: int = AHEAD,
    ) -> None:
        """`read` runs in the thread. `on_read` is called there, when `take` has something."""
        self._most = most
        self._bytes: Bytes = 0
        """Of the files in `_wanted`."""
        self._room = threading.Semaphore(ahead)
        self._ahead: set[int] = set()
        """Requests that were taken and have not begun."""
        self._read = read
        self._on_read = on_read
        self._wanted: dict[int, tuple[GenerateRequest, Seconds]] = {}
        """By handle, what has not been taken, and when it came."""
        self._waiting: deque[int] = deque()
        self._done: deque[tuple[int, ReadPrompt | PdserveError]] = deque()
        self._change = threading.Semaphore(0)
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def ready(self) -> bool:
        """Return whether `take` has something."""
        return bool(self._done)

    def __len__(self) -> int:
        """Requests that have not been taken."""
        return len(self._wanted)

    def live(self) -> int:
        """Choices of these requests."""
        return sum(len(request.live) for request, _ in self._wanted.values())

    def submit(self, handle: int, request: GenerateRequest, now: Seconds) -> None:
        """Have the images of a request read. Raises `Overloaded` if too many bytes wait."""
        size = sum(map(len, request.images))
        if self._wanted and self._bytes + size > self._most:
            raise Overloaded("too many images wait to be read by this worker", retry_after=1.0)
        self._bytes += size
        self._wanted[handle] = request, now
        self._waiting.append(handle)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="pdserve-vllm-images", daemon=True
            )
            self._thread.start()
        self._change.release()

    def drop(self, handle: int) -> bool:
        """Forget a request; returns whether it was here."""
        self.begun(handle)
        return self._forget(handle) is not None

    def begun(self, handle: int) -> None:
        """A request that was taken has begun, or is gone; others are ignored."""
        if handle in self._ahead:
            self._ahead.discard(handle)
            self._room.release()

    def _forget(self, handle: int) -> tuple[GenerateRequest, Seconds] | None:
        wanted = self._wanted.pop(handle, None)
        if wanted is not None:
            self._bytes -= sum(map(len, wanted[0].images))
        return wanted

    def take(self) -> list[tuple[int, Seconds, ReadPrompt | PdserveError]]:
        """What has been read since the last call, with the time of its submission, and without
        what was dropped."""
        found = []
        while self._done:
            handle, result = self._done.popleft()
            wanted = self._forget(handle)
            if wanted is None or isinstance(result, PdserveError):
                self._room.release()
            else:
                self._ahead.add(handle)
            if wanted is not None:
                found.append((handle, wanted[1], result))
        return found

    def close(self) -> None:
        """End the thread, after the picture that it reads. Idempotent."""
        self._closed = True
        self._wanted.clear()
        self._room.release()
        self._change.release()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_END)
            if thread.is_alive():
                _LOG.warning("an image is still being read after %g s: its thread is left", _END)

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        while True:
            self._change.acquire()
            self._room.acquire()
            if self._closed:
                return
            handle = self._waiting.popleft()
            wanted = self._wanted.get(handle)
            if wanted is None:  # dropped
                self._room.release()
                continue
            self._done.append((handle, self._outcome(wanted[0])))
            self._on_read()

    def _outcome(self, request: GenerateRequest) -> ReadPrompt | PdserveError:
        try:
            return self._read(request)
        except PdserveError as error:
            return error
        except Exception as error:  # a fault in a model's processor ends the one request
            _LOG.exception("reading the images of a request failed")
            return StepFailed(f"reading the images failed: {type(error).__name__}: {error}"[:300])
