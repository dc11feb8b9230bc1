"""A set of keys with values as a log: what most topics are, so that none writes it again.

`SetLog` is the publisher's side, `SetView` a reader's. Both change by `Delta`s and keep a digest:
the XOR of a hash of each (key, value) that is present. It is touched only where something really
changes, so a delta that is applied twice changes nothing. Keys and values are opaque bytes.

Changes of a `SetLog` are staged and become one event with `flush`, whatever came and went between
staying out of it. `connect` gives it its log; both are owned by whoever publishes."""

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
"""The longest key and value together."""
_STAGED_KEYS: Final = 4096
_STAGED_BYTES: Final[Bytes] = 48 * 1024
"""A delta, and a piece of a snapshot, has no more than this and one entry: taking it in does not
hold up an event loop for long."""
_ENTRY_COST: Final[Bytes] = 10
"""What an entry takes beyond its bytes, at most."""

_blake2b = blake2b
_int = int.from_bytes


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """Forget everything if `clear`, then the keys in `drops`, then take over `puts`."""

    clear: bool
    puts: dict[bytes, bytes]
    drops: list[bytes] = []


_decode_delta: Callable[[bytes], Delta] = decoder(Delta)
_decode_chunk: Callable[[bytes], dict[bytes, bytes]] = decoder(dict[bytes, bytes])


def mix(key: bytes, value: bytes) -> int:
    """64 bits of one entry. The key's length goes first: no two entries give the same bytes."""
    data = len(key).to_bytes(4, "little") + key + value
    return _int(_blake2b(data, digest_size=8).digest(), "little")


class _Set:
    """Entries and their digest."""

    __slots__ = ("digest", "items")

    def __init__(self) -> None:
        self.items: dict[bytes, bytes] = {}
        self.digest = 0

    def change(self, delta: Delta) -> Delta | None:
        """Apply; returns what really changed, None if nothing did."""
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
        """Entries of which none is there yet."""
        digest = self.digest
        for key, value in entries.items():
            digest ^= mix(key, value)
        self.digest = digest
        self.items.update(entries)


def difference(old: dict[bytes, bytes], new: dict[bytes, bytes]) -> Delta | None:
    """What makes `new` of `old`; None if they are the same."""
    puts = {key: value for key, value in new.items() if old.get(key) != value}
    drops = [key for key in old if key not in new]
    return Delta(False, puts, drops) if puts or drops else None


class SetLog:
    """See `LogSource`; reads like what was last flushed."""

    def __init__(self) -> None:
        self._set = _Set()
        self._puts: dict[bytes, bytes] = {}
        self._drops: dict[bytes, None] = {}
        self._clear = False
        self._size: Bytes = 0
        self._append: Callable[[bytes], None] | None = None
        self._on_staged: Callable[[], object] | None = None

    def connect(self, append: Callable[[bytes], None], on_staged: Callable[[], object]) -> None:
        """`append` takes the events; `on_staged` hears that there is something to flush."""
        self._append, self._on_staged = append, on_staged

    # ------------------------------------------------------------------ changing

    def put(self, key: bytes, value: bytes = b"") -> None:
        """Raises `PayloadTooLarge` if key and value together are over `ENTRY_BYTES`."""
        size = len(key) + len(value)
        if size > ENTRY_BYTES:
            raise PayloadTooLarge(f"an entry of {size} bytes; the limit is {ENTRY_BYTES}")
        self._drops.pop(key, None)
        self._puts[key] = value
        self._staged(size)

    def drop(self, key: bytes) -> None:
        """Nothing happens if it is not there."""
        self._puts.pop(key, None)
        self._drops[key] = None
        self._staged(len(key))

    def clear(self) -> None:
        """Drop all keys."""
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
        """Publish what changed since the last time, as one event, if anything did."""
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
        """A live view of what was flushed."""
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
    """See `LogTarget`. A copy of a publisher's set."""

    def __init__(
        self,
        on_change: Callable[[Mapping[bytes, bytes], Collection[bytes]], None] | None = None,
    ) -> None:
        """`on_change(puts, drops)` hears after each change what really changed: of an event, or
        between the state before a snapshot and after it."""
        self._set = _Set()
        self._shadow = _Set()
        self._on_change = on_change

    @property
    def items(self) -> Mapping[bytes, bytes]:
        """A live view."""
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
