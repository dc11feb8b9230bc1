"""Copies results from the device without waiting for what was launched after them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

__all__ = ["Download"]


class Download:
    """Tensors of one device on their way to the host. The copies are queued when this is made."""

    def __init__(self, tensors: Seq[torch.Tensor]) -> None:
        """At least one tensor."""
        self._ended: torch.cuda.Event | None = None
        self._host = list(tensors)
        if tensors[0].device.type == "cuda":
            self._host = [_begin(tensor) for tensor in tensors]
            self._ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
            # Without a stream it would be that of the thread's current device, which may be
            # another: then the event says nothing about these copies.
            self._ended.record(torch.cuda.current_stream(tensors[0].device))

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the host, once the device has come so far. What is queued behind the
        copies is not waited for."""
        if self._ended is not None:
            self._ended.synchronize()
        return self._host


def _begin(tensor: torch.Tensor) -> torch.Tensor:
    """Queue a copy to pinned memory, which may not be read before it has ended."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host
