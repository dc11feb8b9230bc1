"""Keeps files open between uses, a bounded number of them, for several threads.

A file that is in use is not closed; one that was forgotten meanwhile is closed after its last use.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    # The interpreter needs a bound that it can evaluate; type checkers see this one.
    Key = TypeVar("Key", bound=Hashable)
else:
    Key = TypeVar("Key")

__all__ = ["OpenFiles"]


@dataclass(slots=True)
class _OpenFile:
    fd: int
    users: int = 0


class OpenFiles(Generic[Key]):
    """Descriptors by key, the one that was not used for longest first."""

    def __init__(self, close: Callable[[int], None], *, most: int) -> None:
        """`most`: descriptors that are kept open while nobody uses them."""
        self._close = close
        self._most = most
        self._lock = threading.Lock()
        self._files: dict[Key, _OpenFile] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._files

    @contextmanager
    def use(self, key: Key, open: Callable[[], int]) -> Iterator[int]:
        """The key's descriptor; `open` makes it if there is none. It may be called by two threads
        at the same time."""
        file = self._take(key)
        if file is None:
            file = self._add(key, open())
        try:
            yield file.fd
        finally:
            self._give_back(key, file)

    def put(self, key: Key, fd: int) -> None:
        """Keep a descriptor that was just made."""
        self._give_back(key, self._add(key, fd))

    def forget(self, key: Key) -> None:
        """Close the key's descriptor, after its last use."""
        with self._lock:
            file = self._files.pop(key, None)
            unused = file is not None and not file.users
        if file is not None and unused:
            self._close(file.fd)

    def close(self) -> None:
        """Close all descriptors that are not in use, and the others after their last use."""
        for key in list(self._files):
            self.forget(key)

    def _take(self, key: Key) -> _OpenFile | None:
        with self._lock:
            file = self._files.pop(key, None)
            if file is not None:
                file.users += 1
                self._files[key] = file
            return file

    def _add(self, key: Key, fd: int) -> _OpenFile:
        """Enter a new descriptor; another thread's is used instead if that was faster."""
        with self._lock:
            there = self._files.get(key)
            file = _OpenFile(fd) if there is None else there
            self._files[key] = file
            file.users += 1
        if there is not None:
            self._close(fd)
        return file

    def _give_back(self, key: Key, file: _OpenFile) -> None:
        with self._lock:
            file.users -= 1
            if file.users:
                return
            kept = self._files.get(key) is file
            closing = self._surplus() if kept else [file.fd]
        for fd in closing:
            self._close(fd)

    def _surplus(self) -> list[int]:
        """Take out what is too much and not in use."""
        unused = [key for key, file in self._files.items() if not file.users]
        return [self._files.pop(key).fd for key in unused[: max(0, len(self._files) - self._most)]]
