"""Copies a step's index arrays to the device without waiting for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import numpy as np

__all__ = ["upload"]


def upload(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor of `device`; on the CPU it shares the array's memory.

    A copy from pageable memory would wait for everything that is queued on the stream. Torch keeps
    the pinned memory until the copy has ended.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu" or not array.size:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
