"""Copies results from the device without waiting for what was launched after them."""

from __future__ import annotations

import torch

__all__ = ["Download"]


class Download:
    """One tensor on its way to the host. The copy is queued when this is made."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._ended: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
            # Without a stream it would be that of the thread's current device, which may be
            # another: then the event says nothing about this copy.
            self._ended.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> torch.Tensor:
        """The tensor on the host, once the device has come so far. What is queued behind the copy
        is not waited for."""
        if self._ended is not None:
            self._ended.synchronize()
        return self._host
