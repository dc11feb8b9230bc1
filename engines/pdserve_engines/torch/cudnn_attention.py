"""Keeps torch from computing attention with cuDNN while an engine is loaded on a GPU.

cuDNN plans its kernels anew for every shape, which takes tens of milliseconds on Hopper, and every
decode step has a new key length. Torch prefers cuDNN there. Its switch belongs to the process: it
is off from the first engine's `hold` to the last one's `release`, then as it was before. It knows
nothing of models or streams.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["CudnnAttentionOff"]


class CudnnAttentionOff:
    """One engine's wish that cuDNN attention be off. Any thread may call it."""

    _lock = threading.Lock()
    _holders = 0
    """Engines of this process that hold the switch off."""
    _before = True
    """The switch before the first of them."""

    def __init__(self) -> None:
        self._holds = False

    def hold(self) -> None:
        """Turn cuDNN attention off until `release`. Idempotent."""
        shared = CudnnAttentionOff
        with shared._lock:
            if self._holds:
                return
            self._holds = True
            if shared._holders == 0:
                shared._before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
                torch.backends.cuda.enable_cudnn_sdp(False)
            shared._holders += 1

    def release(self) -> None:
        """End the wish. Idempotent."""
        shared = CudnnAttentionOff
        with shared._lock:
            if not self._holds:
                return
            self._holds = False
            shared._holders -= 1
            if shared._holders == 0:
                torch.backends.cuda.enable_cudnn_sdp(shared._before)
