"""Names changes, so that an order which is repeated does nothing twice. Pure.

    3f2a91c0-a-7c0d4e5f60718293
    model    mode  hash of term, number and index

Model and mode stand in the name because an actuator's list knows neither: a planner that restarts
reads from it what each instance was started for. The names fit units of systemd, comments of Slurm
and labels of Kubernetes.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ChangeName", "change_id", "model_tag", "read_change_id"]

_LETTERS: Final[Mapping[str, str]] = {"aggregated": "a", "prefill": "p", "decode": "d", "both": "b"}
_MODES: Final = {letter: mode for mode, letter in _LETTERS.items()}
_NO_MODE: Final = "x"
_PARTS: Final = 3


class ChangeName(NamedTuple):
    """What the id of a change says."""

    tag: str
    """`model_tag` of its model."""
    mode: str
    """The mode that was asked for; empty: none."""


def model_tag(model: str) -> str:
    """The part of an id that stands for a model: 8 characters."""
    return blake2b(model.encode(), digest_size=4).hexdigest()


def change_id(model: str, mode: str, term: int, number: int, index: int) -> str:
    """The id of one change. The same arguments give the same id, on every planner."""
    order = blake2b(f"{model}/{term}/{number}/{index}".encode(), digest_size=8).hexdigest()
    return f"{model_tag(model)}-{_LETTERS.get(mode, _NO_MODE)}-{order}"


def read_change_id(change: str) -> ChangeName | None:
    """What an id says; None: it is no planner's, for example an operator's own name."""
    parts = change.split("-")
    if len(parts) != _PARTS or parts[1] not in {*_MODES, _NO_MODE} or not _is_hex(parts[0]):
        return None
    return ChangeName(parts[0], _MODES.get(parts[1], ""))


def _is_hex(text: str) -> bool:
    return len(text) == len(model_tag("")) and all(char in "0123456789abcdef" for char in text)
