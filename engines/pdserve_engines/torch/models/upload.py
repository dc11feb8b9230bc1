"""Copies a step's index arrays to the device without waiting for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

__all__ = ["ALIGNED", "upload", "upload_into", "upload_packed"]

ALIGNED: Final = 4
"""Each array of a packed copy begins at a multiple of so many elements, 16 bytes. Kernels are
compiled anew for pointers that are aligned otherwise."""


def upload(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor of `device`; on the CPU it shares the array's memory.

    A copy from pageable memory would wait for everything that is queued on the stream. Torch keeps
    the pinned memory until the copy has ended.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu" or not array.size:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_into(array: np.ndarray[Any, Any], tensor: torch.Tensor) -> None:
    """Write the array to a tensor of its size, in its turn on the stream."""
    source = torch.from_numpy(array)
    if tensor.device.type != "cpu":
        source = source.pin_memory()
    tensor.copy_(source, non_blocking=True)


def upload_packed(
    arrays: Seq[np.ndarray[Any, np.dtype[np.int32]]], device: torch.device
) -> list[torch.Tensor]:
    """The arrays as tensors of `device` with their shapes, in one copy."""
    sizes = [-(-array.size // ALIGNED) * ALIGNED for array in arrays]
    ends = np.cumsum(sizes).tolist()
    packed = np.zeros(sum(sizes), np.int32)
    for array, size, end in zip(arrays, sizes, ends, strict=True):
        packed[end - size : end - size + array.size] = array.reshape(-1)
    whole = upload(packed, device)
    return [
        whole[end - size : end - size + array.size].view(array.shape)
        for array, size, end in zip(arrays, sizes, ends, strict=True)
    ]
