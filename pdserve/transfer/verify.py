"""Decides how much of the received KV is compared with what was sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from pdserve.ids import Bytes

__all__ = ["SAMPLE", "Verify", "covers", "sampled_range", "stricter"]

Verify = Literal["all", "sample", "off"]
SAMPLE: Final = 16
"""With `sample`, one of this many blocks or bytes is compared, and at least one of every part."""

_STRICT: Final[tuple[Verify, ...]] = ("off", "sample", "all")


def stricter(one: Verify, other: Verify | Literal[""]) -> Verify:
    """The setting that two ends with these settings use. The other end may not have said any."""
    return max(one, other or "off", key=_STRICT.index)


def sampled_range(verify: Verify, size: Bytes, turn: int) -> tuple[Bytes, Bytes]:
    """The range of a payload that its checksum covers. `turn` counts the sender's payloads, so that
    each sample is from another place."""
    if verify == "all":
        return 0, size
    if verify == "off":
        return 0, 0
    width = -(-size // SAMPLE)
    start = min(turn % SAMPLE * width, size - width)
    return start, start + width


def covers(verify: Verify, size: Bytes, checked: tuple[Bytes, Bytes]) -> bool:
    """Return whether such a checksum is as much as was agreed, and lies in the payload."""
    start, stop = checked
    wanted = {"all": size, "sample": -(-size // SAMPLE), "off": 0}[verify]
    return 0 <= start <= stop <= size and stop - start >= wanted
