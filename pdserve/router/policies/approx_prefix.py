"""Chooses the worker that was sent the same prefix before, unless loads have drifted apart.

    crowded     max - min > balance_abs  and  max > balance_rel * min     (requests per worker)
                -> the fewest requests
    matched     blocks of the longest match / blocks of the prompt > cache_threshold
                -> that worker; the least busy of those that match as far
    otherwise   -> the worker that least has been sent to (`miss=smallest_tree`), or the fewest
                requests (`miss=least_loaded`)

The cache-aware policy of SGLang's router (sgl-router, now SMG), which knows no events: it remembers
what it has sent where. It has two sets of defaults, which behave differently; `preset` chooses:

    preset         cache_threshold   balance_abs   balance_rel    used by
    command_line   0.3               64            1.5            its command line
    library        0.5               32            1.1            its library
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from pdserve.blocks.hashing import SHORT_HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from pdserve.messages.routing import RouteRequest
    from pdserve.router.policies.base import RoutingState, WorkerView

__all__ = ["ApproxPrefix"]

_PRESETS: Final = {"command_line": (0.3, 64.0, 1.5), "library": (0.5, 32.0, 1.1)}
_OF_PRESET: Final = -1.0


@dataclass(frozen=True, slots=True)
class ApproxPrefix:
    """SGLang's cache-aware policy from remembered routes; the module docstring has the rule."""

    preset: str = "command_line"
    """Name of the set of defaults: `command_line` or `library`."""
    cache_threshold: float = _OF_PRESET
    """Share of a prompt's blocks that must match, from 0 to 1; -1: the preset's."""
    balance_abs: float = _OF_PRESET
    """Largest difference in requests between the busiest and the idlest worker; -1: the preset's.
    """
    balance_rel: float = _OF_PRESET
    """Largest ratio of requests between the busiest and the idlest worker; -1: the preset's."""
    miss: str = "smallest_tree"
    """Worker for a prompt that matches nowhere: `smallest_tree` or `least_loaded`."""

    needs_routed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.preset not in _PRESETS:
            raise ValueError(f"preset must be one of {', '.join(_PRESETS)}")
        if self.miss not in ("smallest_tree", "least_loaded"):
            raise ValueError("miss must be smallest_tree or least_loaded")

    @property
    def thresholds(self) -> tuple[float, float, float]:
        """The (cache_threshold, balance_abs, balance_rel) in force."""
        given = (self.cache_threshold, self.balance_abs, self.balance_rel)
        preset = _PRESETS[self.preset]
        cache, absolute, relative = (
            own if own >= 0 else usual for own, usual in zip(given, preset, strict=True)
        )
        return cache, absolute, relative

    def __call__(self, request: RouteRequest, state: RoutingState, random: Random) -> WorkerView:
        """Chooses a worker. O(workers)."""
        threshold, absolute, relative = self.thresholds
        counts = [worker.sequences for worker in state.workers]
        most, least = max(counts), min(counts)
        if most - least > absolute and most > relative * least:
            return _least(state.workers, random)
        depths = [state.routed.get(worker.node, 0) for worker in state.workers]
        deepest = max(depths)
        blocks = len(request.names) // SHORT_HASH_BYTES
        if deepest and deepest > threshold * blocks:
            found = [w for w, depth in zip(state.workers, depths, strict=True) if depth == deepest]
            return _least(found, random)
        if self.miss == "least_loaded":
            return _least(state.workers, random)
        size = state.routed_blocks
        smallest = min(size.get(worker.node, 0) for worker in state.workers)
        return _least([w for w in state.workers if size.get(w.node, 0) == smallest], random)


def _least(workers: Sequence[WorkerView], random: Random) -> WorkerView:
    """The worker with the fewest requests; ties at random."""
    least = min(worker.sequences for worker in workers)
    return random.choice([worker for worker in workers if worker.sequences == least])
