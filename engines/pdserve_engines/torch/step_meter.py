"""Measures how much memory of a GPU a step takes, by computing one.

`StepMeter` is the port; tests have one with an imagined device. It knows nothing of models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Bytes

__all__ = ["CudaStepMeter", "StepMeter", "step_meter"]


class StepMeter(Protocol):
    """Measures memory of one device, of which this process computes nothing else meanwhile."""

    def most(self, run: Callable[[], None]) -> Bytes:
        """Call `run`; returns the most bytes that the device held for it beside what was there,
        fragments included. They are free again on return. Raises what `run` raises."""
        ...


class CudaStepMeter:
    """Implements `StepMeter` by torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def most(self, run: Callable[[], None]) -> Bytes:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        try:
            run()
            torch.cuda.synchronize(self._device)
            return torch.cuda.max_memory_reserved(self._device) - before
        finally:
            torch.cuda.empty_cache()


def step_meter(device: torch.device) -> StepMeter | None:
    """The meter of `device`; None for a host, whose steps are small beside its memory."""
    return CudaStepMeter(device) if device.type == "cuda" else None
