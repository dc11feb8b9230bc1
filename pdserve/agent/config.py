"""Configuration of an agent: its slots, and the workers that may run in them.

A *slot* is room for one worker, with the devices that the worker sees. A *kind* says which flags a
worker gets and whose slots it takes. Every group of slots is a kind of its own name; a kind
`GROUP/NAME` shares the slots of GROUP.
"""

from __future__ import annotations

import difflib
import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["AgentConfig", "group_of", "parse_slots", "parse_workers", "show_slots"]

_GROUP: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_KIND: Final = re.compile(rf"{_GROUP.pattern}(/{_GROUP.pattern})?")
_COUNT: Final = re.compile(r"x(\d{1,4})")
_DEVICE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9:/._-]{0,99}")
_MOST_SLOTS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Configuration of one agent."""

    slots: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By group, for each slot the value of CUDA_VISIBLE_DEVICES; empty: its worker sees no GPU."""
    workers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By kind: flags of its workers, besides the agent's own worker options."""
    directory: str = ""
    """Where records and logs of workers are, which a later agent finds; empty: in the user's state
    directory, by the cluster's name."""

    def validate(self) -> None:
        """Checks what an agent needs; other roles have no use for it. Errors: `ConfigError` without
        slots, or for a kind without slots, with the nearest group."""
        if not self.slots:
            raise ConfigError(
                "an agent needs slots to start workers in: give --agent-slots, such as gpu=0,1 or "
                "cpu=x8"
            )
        for kind in self.workers:
            group = group_of(kind)
            if group not in self.slots:
                near = difflib.get_close_matches(group, self.slots, n=1)
                hint = f", did you mean {near[0]!r}?" if near else ": add it to agent-slots"
                raise ConfigError(f"agent-worker: there are no slots {group!r}{hint}")

    def kinds(self) -> dict[str, tuple[str, ...]]:
        """Every kind with its flags: the groups, then the kinds that share them."""
        return {group: self.workers.get(group, ()) for group in self.slots} | dict(self.workers)


def group_of(kind: str) -> str:
    """The group whose slots a kind takes."""
    return kind.partition("/")[0]


def parse_slots(text: str) -> dict[str, tuple[str, ...]]:
    """Reads `GROUP=SLOTS` per line or, on one line, separated by semicolons.

    SLOTS is `xN` for N slots without GPUs, or a device for each slot, separated by commas: `0,1`.
    Devices of one slot are joined by `+`: `0+1,2+3`. Errors: `ValueError`.
    """
    found: dict[str, tuple[str, ...]] = {}
    for part in _parts(text, ";"):
        group, equals, slots = (word.strip() for word in part.partition("="))
        if not equals or not _GROUP.fullmatch(group):
            raise ValueError(f"{part!r} is not of the form GROUP=SLOTS, such as gpu=0,1 or cpu=x8")
        if group in found:
            raise ValueError(f"slots {group!r} are there twice")
        found[group] = _slots(group, slots)
    return found


def _slots(group: str, text: str) -> tuple[str, ...]:
    if count := _COUNT.fullmatch(text):
        if not 1 <= int(count[1]) <= _MOST_SLOTS:
            raise ValueError(f"{group}={text}: 1 to {_MOST_SLOTS} slots are possible")
        return ("",) * int(count[1])
    devices = [slot.strip().split("+") for slot in text.split(",")]
    for device in (one for slot in devices for one in slot):
        if not _DEVICE.fullmatch(device):
            raise ValueError(
                f"{group}={text}: {device!r} is no device; write devices such as 0,1, or x8 for "
                "eight slots without GPUs"
            )
    return tuple(",".join(slot) for slot in devices)


def show_slots(slots: Mapping[str, tuple[str, ...]]) -> str:
    """Writes slots as `parse_slots` reads them."""
    return ";".join(f"{group}={_shown(devices)}" for group, devices in slots.items())


def _shown(devices: tuple[str, ...]) -> str:
    if not any(devices):
        return f"x{len(devices)}"
    return ",".join(one.replace(",", "+") for one in devices)


def parse_workers(text: str) -> dict[str, tuple[str, ...]]:
    """Reads `KIND=FLAGS` per line; the flags are words as in a shell. Errors: `ValueError`."""
    found: dict[str, tuple[str, ...]] = {}
    for part in _parts(text, "\n"):
        kind, equals, flags = part.partition("=")
        kind = kind.strip()
        if not equals or not _KIND.fullmatch(kind):
            raise ValueError(
                f"{part!r} is not of the form KIND=FLAGS, such as 'gpu=--model=/models/a'; KIND is "
                "a group of agent-slots, or GROUP/NAME"
            )
        if kind in found:
            raise ValueError(f"kind {kind!r} is there twice")
        try:
            found[kind] = tuple(shlex.split(flags))
        except ValueError as error:
            raise ValueError(f"{kind}: the flags cannot be read: {error}") from None
    return found


def show_workers(workers: Mapping[str, tuple[str, ...]]) -> str:
    """Writes flags as `parse_workers` reads them."""
    return "\n".join(f"{kind}={shlex.join(flags)}" for kind, flags in workers.items())


def _parts(text: str, separator: str) -> Iterable[str]:
    parts = text.split("\n") if "\n" in text else text.split(separator)
    return [part.strip() for part in parts if part.strip()]
