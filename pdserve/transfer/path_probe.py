"""Measures a new path: how fast the bytes of a few probes come from the peer. Pure.

The first probe is small: its time is the path's latency. Each further one is larger, as long as it
is expected to end within `PROBE_TIME` of the beginning; the last one gives the rate. All of them
together are less than `PROBE_BYTES`. The end that made the path orders them, and only while no
transfer waits for the path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdserve.ids import Bytes, Seconds

__all__ = ["PROBE_BYTES", "PROBE_TIME", "PathRate", "RateProbe"]

PROBE_BYTES: Final[Bytes] = 4 << 20
"""Most bytes of all probes of one path."""
PROBE_TIME: Final[Seconds] = 0.05
"""Most seconds for all probes of one path."""
_SIZES: Final[tuple[Bytes, ...]] = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20)
"""Bytes of each probe. The growth opens a TCP window before the probe that counts."""


@dataclass(frozen=True, slots=True)
class PathRate:
    """What the probes of a path have found."""

    rate: float = 0.0
    """Bytes per second; 0: not measured."""
    why_not: str = ""
    """Why there is no rate; empty: there is one."""


class RateProbe:
    """The probes of one path so far."""

    def __init__(self) -> None:
        self._sent = 0
        self._spent: Seconds = 0.0
        self._latency: Seconds = 0.0
        self.rate = 0.0
        """Bytes per second by the last probe, without the latency; 0: not known yet."""

    def next_size(self) -> Bytes:
        """Bytes of the next probe; 0: there is none, since it would take too long."""
        if self._sent == len(_SIZES):
            return 0
        size = _SIZES[self._sent]
        if self.rate and self._spent + self._latency + size / self.rate > PROBE_TIME:
            return 0
        return size

    def add(self, size: Bytes, seconds: Seconds) -> None:
        """Records a probe of `size` bytes that came after `seconds`. The latency counts for at most
        half of it, as it varies."""
        if self._sent:
            moving = max(seconds - self._latency, seconds / 2)
            self.rate = size / moving if moving > 0 else 0.0
        else:
            self._latency = seconds
        self._sent += 1
        self._spent += seconds
