"""Says what the adapter knows of each release of TensorRT-LLM. Imports no TensorRT-LLM.

What can be asked of the installed package itself (fields, parameters) is asked there; this table
holds only behaviour that no signature shows. tests/engines/tensorrt_llm/behaviours.toml names the
source of each entry.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["KNOWN", "Release", "release_of", "untested"]


@dataclass(frozen=True, slots=True)
class Release:
    """Behaviour of one minor release."""

    name: str
    penalties: bool
    """Its Torch sampler applies repetition, presence and frequency penalties; others ignore
    them."""


KNOWN = {
    (1, 2): Release("1.2", penalties=False),
    (1, 3): Release("1.3 pre-release", penalties=False),
    (1, 4): Release("1.4 pre-release", penalties=True),
}
"""Minor releases whose source the adapter was written from."""


def release_of(version: str) -> Release:
    """The behaviour of a version: that of the nearest known release, not newer if there is one."""
    number = _minor(version)
    if number is None:
        return KNOWN[max(KNOWN)]
    older = [known for known in KNOWN if known <= number]
    return KNOWN[max(older) if older else min(KNOWN)]


def untested(version: str) -> str:
    """Why this version may behave otherwise, with the remedy; empty: it is a known one."""
    number = _minor(version)
    if number in KNOWN:
        return ""
    known = ", ".join(release.name for release in KNOWN.values())
    return (
        f"TensorRT-LLM {version or 'of an unknown version'} is untested with this release of "
        f"pdserve, which knows {known}; it is taken for {release_of(version).name}. "
        "Install a known one if requests fail"
    )


def _minor(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))
