"""Makes a step wait for layers of its sequences' KV that are still being copied to the device.

A step computes layer by layer. Before it reads a layer, all blocks of its sequences must have that
layer; `StepGate` waits for that, until a time, and remembers what was late. It does not know
whether a copy failed: the core learns that after the step (`EarlyStarts`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.clock import Clock
    from pdserve.ids import Seconds
    from pdserve.kv.tiers.lower_tiers import LowerTiers

__all__ = ["StepGate"]


class StepGate:
    """The waits of one step; `StepPlan.gate`."""

    def __init__(
        self,
        lower: LowerTiers,
        fetches: Sequence[tuple[int, int]],
        until: Seconds,
        clock: Clock,
    ) -> None:
        """`fetches`: number and layer groups of each fetch that the step needs."""
        assert lower.layers is not None
        self._lower = lower
        self._layers = lower.layers.layers
        self._until = until
        self._clock = clock
        self.late: set[int] = set()
        """Numbers of the fetches that the step did not wait for. Their layers may have come since,
        but what the step computed for them is wrong."""
        self._groups: dict[int, list[tuple[int, int]]] = {}
        """First layer of each group -> the groups that begin there, as (fetch, group)."""
        for number, groups in fetches:
            for group in range(1, groups):
                layer = lower.layers.first_layer(group, groups)
                self._groups.setdefault(layer, []).append((number, group))

    @property
    def at(self) -> frozenset[int]:
        """The layers before which the gate has to be called."""
        return frozenset(self._groups)

    def __call__(self, layer: int) -> None:
        """Wait for the groups that begin with a layer."""
        for number, group in self._groups.get(layer, ()):
            left = max(0.0, self._until - self._clock.now())
            if not self._lower.wait_copied(number, group, left):
                self.late.add(number)

    def seconds(self, begin: Seconds, alone: Seconds) -> Seconds:
        """How long a step takes in simulated time that begins now and takes `alone` seconds when it
        waits for nothing."""
        at, done = begin, 0
        for layer in sorted(self._groups):
            at += alone * (layer - done) / self._layers
            at, done = max(at, self._due(layer, begin)), layer
        return at + alone * (self._layers - done) / self._layers - begin

    def _due(self, layer: int, begin: Seconds) -> Seconds:
        """When the groups that begin with a layer have come or are given up."""
        times = [self._lower.copied_at(*each) for each in self._groups[layer]]
        return max((min(time, self._until) for time in times if time is not None), default=begin)
