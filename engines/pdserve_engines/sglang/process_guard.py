"""Keeps SGLang's hands off what belongs to the process that it runs in.

Its engine installs signal handlers and log handlers of its own, and its `shutdown` kills every
child of the process, whoever started it. This file restores the handlers and knows the children.
"""

from __future__ import annotations

import logging
import signal
import threading
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["child_processes", "kept_handlers"]

_SIGNALS = (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT, signal.SIGCHLD)


@contextmanager
def kept_handlers() -> Iterator[None]:
    """Restore signal handlers and the root logger's handlers and level at the end.

    Signal handlers belong to the main thread: elsewhere SGLang installs none.
    """
    main = threading.current_thread() is threading.main_thread()
    signals = {number: signal.getsignal(number) for number in _SIGNALS} if main else {}
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        for number, handler in signals.items():
            if signal.getsignal(number) is not handler and handler is not None:
                signal.signal(number, handler)
        root.handlers[:] = handlers
        root.setLevel(level)


def child_processes() -> frozenset[int]:
    """Process ids of this process's children, without Python's own helper for shared memory."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            found.update(map(int, path.read_text().split()))
        except OSError:  # the thread has ended
            continue
    helper = getattr(resource_tracker._resource_tracker, "_pid", None)
    return frozenset(found - {helper})
