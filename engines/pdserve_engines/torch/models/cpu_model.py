"""Computes the forward pass on the CPU with pdserve's own kernels: one C++ call per step.

Alternative to `torch_model.TorchModel`; `native/include/pdserve/cpu/` documents the kernels. A
row's bits do not depend on the rest of the batch, so scheduling cannot change an output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pdserve import accel
from pdserve_engines.torch.models.rope import rope_table

if TYPE_CHECKING:
    from pdserve_engines.torch.kv_pool import KvPool
    from pdserve_engines.torch.model_loader.config import ModelConfig
    from pdserve_engines.torch.model_loader.weights import Param
    from pdserve_engines.torch.models.base import LayersDoneFn
    from pdserve_engines.torch.models.forward_batch import ForwardBatch
    from pdserve_engines.torch.settings import TorchSettings

_MAX_HEAD_DIM = 512


def unsupported_reason(config: ModelConfig, device: torch.device, max_model_len: int) -> str | None:
    """Why the native kernels cannot compute this model here; None if they can."""
    if device.type != "cpu":
        return f"the device is {device}"
    if not accel.NATIVE:
        return accel.REASON
    if config.hidden_size % 2 or config.intermediate_size % 2 or config.head_dim > _MAX_HEAD_DIM:
        return "the model's sizes are odd or its heads too large"
    if config.experts is not None:
        return "the model has experts"
    if config.float_norms or config.out_norms or config.gelu or config.query_scalar is not None:
        return f"they know no layers like those of {config.family}"
    if config.sliding_window is not None and config.sliding_window < max_model_len:
        return f"sequences can outgrow the sliding window of {config.sliding_window} tokens"
    return None


class CpuModel:
    """Implements `base.ForwardModel`. The weights are packed in C++; there is no second copy."""

    def __init__(
        self, config: ModelConfig, settings: TorchSettings, owner: CpuModel | None = None
    ) -> None:
        """Use the weights of `owner`, or start with none placed."""
        self._config = config
        self._dtype = settings.dtype
        self._threads = settings.threads
        self._native: accel.native.CpuModel
        if owner is not None:
            self._native = owner._native.sibling(settings.threads)
        else:
            self._native = accel.native.CpuModel(
                bfloat16=settings.dtype == torch.bfloat16,
                layers=config.num_layers,
                hidden=config.hidden_size,
                inner=config.intermediate_size,
                heads=config.num_heads,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                vocab=config.vocab_size,
                epsilon=config.rms_eps,
                tied=config.tied,
                threads=settings.threads,
                kernels="" if settings.kernels in ("auto", "native") else settings.kernels,
            )
        table = rope_table(config.rope, config.head_dim, settings.max_model_len)
        self._native.set_rope(table.numpy())

    @property
    def kernels(self) -> str:
        return f"native {self._native.kernels}, {self._threads} threads"

    @property
    def exact(self) -> str:
        return f"native {self._native.kernels}" if self._dtype == torch.float32 else ""

    @property
    def torch_threads(self) -> int:
        # The kernels have threads of their own, and torch's threads would only slow them down.
        return 1

    @property
    def weight_bytes(self) -> int:
        return self._native.weight_bytes

    def place(self, param: Param, parts: list[torch.Tensor]) -> None:
        group, _, name = param.key.rpartition(".")
        layer = int(group.removeprefix("layers.")) if group else 0
        if name.startswith("gate_up"):
            suffix = name.removeprefix("gate_up")
            for target, part in zip(("gate", "up"), parts, strict=True):
                self._place(target + suffix, layer, 0, part)
            return
        row = 0
        for part in parts:
            self._place(name, layer, row, part)
            row += len(part)

    def sibling(self, settings: TorchSettings) -> CpuModel:
        return CpuModel(self._config, settings, self)

    def bind(self, pool: KvPool) -> None:
        assert pool.memory is not None, "native kernels compute in host memory"
        self._native.bind(pool.memory.view(), pool.num_blocks, pool.layout.block_size)

    def forward(self, batch: ForwardBatch, after: LayersDoneFn | None = None) -> torch.Tensor:
        hidden = np.empty((len(batch.rows), self._config.hidden_size), np.float32)
        self._native.forward(*batch.arrays, hidden, after)
        return torch.from_numpy(hidden)

    def greedy(self, batch: ForwardBatch, after: LayersDoneFn | None = None) -> list[int]:
        # This path makes no tensor: a step's weights evict torch's code from the CPU caches, and
        # loading it again would take a tenth of a small model's step.
        return self._native.greedy(*batch.arrays, after)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out = np.empty((len(hidden), self._config.vocab_size), np.float32)
        self._native.logits(hidden.contiguous().numpy(), out)
        return torch.from_numpy(out)

    def close(self) -> None:
        self._native.close()

    def _place(self, name: str, layer: int, row: int, part: torch.Tensor) -> None:
        dtype = torch.float32 if part.dim() == 1 else self._dtype
        data = part.to(dtype).contiguous().view(torch.uint8)
        self._native.place(name, layer, row, len(part), data.numpy())
