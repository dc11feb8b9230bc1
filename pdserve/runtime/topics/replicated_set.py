"""Replicates a set of keys with values as a log; most topics use it.

`SetLog` is the publisher's side, `SetView` a reader's. Both change by `Delta`s and keep a digest:
the XOR of a hash of each (key, value). A delta applied twice changes nothing. Keys and values are
opaque bytes.

Changes of a `SetLog` are staged; `flush` makes one event of the net change. `connect` gives it its
log; the publisher owns both.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.errors import PayloadTooLarge
from pdserve.wire.codec import decoder, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from pdserve.ids import Bytes

__all__ = ["Delta", "SetLog", "SetView", "mix"]

ENTRY_BYTES: Final[Bytes] = 64 * 1024
"""Most bytes of a key and its value together."""
_STAGED_KEYS: Final = 4096
_STAGED_BYTES: Final[Bytes] = 48 * 1024
"""Most bytes of a delta or a snapshot piece, besides one entry, so that applying it does not block
the event loop for long.
"""
_ENTRY_COST: Final[Bytes] = 10
"""Upper bound of an entry's encoding beyond its bytes."""

_blake2b = blake2b
_int = int.from_bytes


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """Drops everything if `clear`, then the keys in `drops`, then adds `puts`."""

    clear: bool
    puts: dict[bytes, bytes]
    drops: list[bytes] = []


_decode_delta: Callable[[bytes], Delta] = decoder(Delta)
_decode_chunk: Callable[[bytes], dict[bytes, bytes]] = decoder(dict[bytes, bytes])


def mix(key: bytes, value: bytes) -> int:
    """Hashes one entry to 64 bits. The key's length goes first, so that no two entries give the
    same bytes.
    """
    data = len(key).to_bytes(4, "little") + key + value
    return _int(_blake2b(data, digest_size=8).digest(), "little")


class _Set:
    """Entries and their digest."""

    __slots__ = ("digest", "items")

    def __init__(self) -> None:
        self.items: dict[bytes, bytes] = {}
        self.digest = 0

    def change(self, delta: Delta) -> Delta | None:
        """Applies a delta; returns the real change, None if there is none."""
        if delta.clear:
            old, self.items, self.digest = self.items, {}, 0
            self.add(delta.puts)
            return difference(old, self.items)
        items, digest = self.items, self.digest
        puts: dict[bytes, bytes] = {}
        drops: list[bytes] = []
        for key in delta.drops:
            old_value = items.pop(key, None)
            if old_value is not None:
                digest ^= mix(key, old_value)
                drops.append(key)
        for key, value in delta.puts.items():
            old_value = items.get(key)
            if old_value == value:
                continue
            if old_value is not None:
                digest ^= mix(key, old_value)
            digest ^= mix(key, value)
            items[key] = puts[key] = value
        self.digest = digest
        return Delta(False, puts, drops) if puts or drops else None

    def add(self, entries: dict[bytes, bytes]) -> None:
        """Adds entries of which none exists yet."""
        digest = self.digest
        for key, value in entries.items():
            digest ^= mix(key, value)
        self.digest = digest
        self.items.update(entries)


def difference(old: dict[bytes, bytes], new: dict[bytes, bytes]) -> Delta | None:
    """The delta from `old` to `new`; None if they are equal."""
    puts = {key: value for key, value in new.items() if old.get(key) != value}
    drops = [key for key in old if key not in new]
    return Delta(False, puts, drops) if puts or drops else None


class SetLog:
    """The publisher's side (a `LogSource`); reads show the last flushed state."""

    def __init__(self) -> None:
        self._set = _Set()
        self._puts: dict[bytes, bytes] = {}
        self._drops: dict[bytes, None] = {}
        self._clear = False
        self._size: Bytes = 0
        self._append: Callable[[bytes], None] | None = None
        self._on_staged: Callable[[], object] | None = None

    def connect(self, append: Callable[[bytes], None], on_staged: Callable[[], object]) -> None:
        """Connects the log: `append` takes the events; `on_staged` is called when there is
        something to flush.
        """
        self._append, self._on_staged = append, on_staged

    # ------------------------------------------------------------------ changing

    def put(self, key: bytes, value: bytes = b"") -> None:
        """Stages an entry. Raises `PayloadTooLarge` if key and value together exceed
        `ENTRY_BYTES`.
        """
        size = len(key) + len(value)
        if size > ENTRY_BYTES:
            raise PayloadTooLarge(f"an entry of {size} bytes; the limit is {ENTRY_BYTES}")
        self._drops.pop(key, None)
        self._puts[key] = value
        self._staged(size)

    def drop(self, key: bytes) -> None:
        """Stages the removal of a key; a missing key is ignored."""
        self._puts.pop(key, None)
        self._drops[key] = None
        self._staged(len(key))

    def clear(self) -> None:
        """Stages the removal of all keys."""
        self._puts.clear()
        self._drops.clear()
        self._clear = True
        self._staged(0)

    def _staged(self, size: Bytes) -> None:
        first = not self._size
        self._size += size + _ENTRY_COST
        if self._size > _STAGED_BYTES or len(self._puts) + len(self._drops) >= _STAGED_KEYS:
            self.flush()
        elif first and self._on_staged is not None:
            self._on_staged()

    def flush(self) -> None:
        """Publishes the staged changes as one event, if there are any."""
        if not self._size:
            return
        staged = Delta(self._clear, self._puts, list(self._drops))
        self._puts, self._drops, self._clear, self._size = {}, {}, False, 0
        cleared = staged.clear and bool(self._set.items)
        changed = self._set.change(staged)
        if changed is not None and self._append is not None:
            # After a clear the new entries say it shorter than the list of what went.
            self._append(encode(staged if cleared else changed))

    # ------------------------------------------------------------------ reading

    @property
    def items(self) -> Mapping[bytes, bytes]:
        """A live view of the flushed entries."""
        return self._set.items

    def digest(self) -> int:
        return self._set.digest

    def snapshot(self) -> Iterator[bytes]:
        return _chunks(dict(self._set.items))


def _chunks(items: dict[bytes, bytes]) -> Iterator[bytes]:
    part: dict[bytes, bytes] = {}
    size = 0
    for key, value in items.items():
        part[key] = value
        size += len(key) + len(value) + _ENTRY_COST
        if size > _STAGED_BYTES:
            yield encode(part)
            part, size = {}, 0
    if part:
        yield encode(part)


class SetView:
    """A reader's copy of a publisher's set (a `LogTarget`)."""

    def __init__(
        self,
        on_change: Callable[[Mapping[bytes, bytes], Collection[bytes]], None] | None = None,
    ) -> None:
        """Args: `on_change(puts, drops)` is called after each change with the real difference: of
        an event, or between the states before and after a snapshot.
        """
        self._set = _Set()
        self._shadow = _Set()
        self._on_change = on_change

    @property
    def items(self) -> Mapping[bytes, bytes]:
        """A live view of the entries."""
        return self._set.items

    def digest(self) -> int:
        return self._set.digest

    def apply(self, event: bytes) -> None:
        self._tell(self._set.change(_decode_delta(event)))

    def reset(self) -> None:
        self._shadow = _Set()

    def load(self, chunk: bytes) -> None:
        self._shadow.add(_decode_chunk(chunk))

    def commit(self) -> None:
        old, self._set, self._shadow = self._set.items, self._shadow, _Set()
        if self._on_change is not None:
            self._tell(difference(old, self._set.items))

    def _tell(self, changed: Delta | None) -> None:
        if changed is not None and self._on_change is not None:
            self._on_change(changed.puts, changed.drops)
