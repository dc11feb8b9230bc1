"""Declares what an engine can do, for docs and for `pdserve doctor`, before it is loaded.

A loaded engine says what it can do with its model (`EngineCapabilities`). Each of pdserve's engine
packages also has a constant `SUPPORT` that says what it can do at best; tests compare the two.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineSupport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSupport:
    """What an engine can do at best. A text says under which condition; empty means no."""

    features: tuple[str, ...] = ()
    """Entries of `ModelCard.features` that it may have, but for what it promises for
    tokens (`EXACT_PREFIX`, `CLOSE_PREFIX`)."""
    exact: str = ""
    """Where a migrated request continues exactly as it would have gone on."""
    logprobs: str = "yes"
    prompt_logprobs: str = ""
    kv_events: str = ""
    """How routers learn what is in its prefix cache."""
    disaggregation: str = ""
    """How KV moves from a prefill worker to a decode worker."""
    devices: str = ""
    """Where one worker computes."""
