"""Computes the forward pass on the CPU with pdserve's own kernels: one C++ call per step.

Alternative to `torch_model.TorchModel`; `native/include/pdserve/cpu/` documents the kernels. A
row's bits do not depend on the rest of the batch, so scheduling cannot change an output.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from pdserve import accel
from pdserve_engines.torch.models.rope import rope_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve_engines.torch.kv_pool import KvPool
    from pdserve_engines.torch.model_loader.config import ExpertsConfig, ModelConfig
    from pdserve_engines.torch.model_loader.rope_config import RopeConfig
    from pdserve_engines.torch.model_loader.weights import Param
    from pdserve_engines.torch.models.base import LayersDoneFn
    from pdserve_engines.torch.models.forward_batch import ForwardBatch
    from pdserve_engines.torch.settings import TorchSettings

_MAX_HEAD_DIM = 512

_BEST_SET: Final = ("auto", "native", "invariant")
"""Values of the option `kernels` that leave the instruction set to the extension."""
_KNOWN: Final = frozenset(
    {
        "full_layers",
        "local_rope",
        "experts",
        "gelu",
        "float_norms",
        "out_norms",
        "embed_scale",
        "query_scalar",
        "sinks",
        "in_norms",
        "layer_norms",
        "whole_qk_norm",
        "parallel",
        "residual_scale",
        "logit_scale",
        "attention_cap",
        "logit_cap",
        "nope_layers",
        "fused_qkv",
        "fused_gate_up",
        "multimodal",
        "tied_unless_stored",
        "headless",
        "classifier",
    }
)
"""Optional fields of `ModelConfig` that the native kernels take into account. A model that sets
another one is left to torch."""
_KNOWN_ROPE: Final = frozenset(
    {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_positions",
        "yarn",
        "dims",
        "interleaved",
        "longrope",
        "context",
        "query_beta",
    }
)
"""The same for `RopeConfig`. The table, and the order of the rows of q and k, hold all of them."""
_KNOWN_EXPERTS: Final = frozenset({"bias", "swiglu", "storage"})
"""The same for `ExpertsConfig`."""


def unsupported_reason(config: ModelConfig, device: torch.device) -> str | None:
    """Why the native kernels cannot compute this model here; None if they can."""
    if device.type != "cpu":
        return f"the device is {device}"
    if not accel.NATIVE:
        return accel.REASON
    sizes = [config.hidden_size, config.intermediate_size]
    if config.experts is not None:
        sizes.append(config.experts.intermediate_size)
    if any(size % 2 for size in sizes) or config.head_dim > _MAX_HEAD_DIM:
        return "the model's sizes are odd or its heads too large"
    unknown = unknown_fields(config, _KNOWN)
    for rope in _ropes(config):
        unknown += unknown_fields(rope, _KNOWN_ROPE)
    unknown += unknown_fields(config.experts, _KNOWN_EXPERTS)
    if unknown:
        return f"they know no {unknown[0]}, which {config.family} has"
    return None


def unknown_fields(
    config: ModelConfig | RopeConfig | ExpertsConfig | None, known: frozenset[str]
) -> list[str]:
    """Names of the optional fields that are set and not known."""
    return [
        field.name
        for field in (fields(config) if config is not None else ())
        if field.default is not MISSING
        and field.name not in known
        and getattr(config, field.name) != field.default
    ]


class CpuModel:
    """Implements `base.ForwardModel`. The weights are packed in C++; there is no second copy."""

    def __init__(
        self, config: ModelConfig, settings: TorchSettings, owner: CpuModel | None = None
    ) -> None:
        """Use the weights of `owner`, or start with none placed."""
        self._config = config
        self._dtype = settings.dtype
        self._plain = settings.dtype == torch.float32 and settings.kv_cache_dtype == "auto"
        """Whether all numbers are float32, those of KV too."""
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
                kernels="" if settings.kernels in _BEST_SET else settings.kernels,
                **_layer_settings(config, settings.max_model_len),
                **_scales(config.for_context(settings.max_model_len), settings.dtype),
            )
        for which, rope in enumerate(_ropes(config)):
            self._native.set_rope(_table(rope, config, settings.max_model_len), which)

    @property
    def kernels(self) -> str:
        return f"native {self._native.kernels}, {self._threads} threads"

    @property
    def exact(self) -> str:
        # Narrower numbers are not promised to other workers.
        return f"native {self._native.kernels}" if self._plain else ""

    @property
    def torch_threads(self) -> int:
        # The kernels have threads of their own, and torch's threads would only slow them down.
        return 1

    @property
    def weight_bytes(self) -> int:
        return self._native.weight_bytes

    def place(self, param: Param, parts: Iterable[torch.Tensor]) -> None:
        group, _, name = param.key.rpartition(".")
        layer = int(group.removeprefix("layers.")) if group else 0
        gate, joined, up = name.partition("gate_up")
        # Gate and up are matrices of their own; with experts they take turns.
        names = [f"{gate}gate{up}", f"{gate}up{up}"] if joined else [name]
        rows = [0, 0]
        for index, part in enumerate(parts):
            turn = index % len(names)
            self._place(names[turn], layer, rows[turn], self._made(name, part))
            rows[turn] += len(part)

    def sibling(self, settings: TorchSettings) -> CpuModel:
        return CpuModel(self._config, settings, self)

    def bind(self, pool: KvPool) -> None:
        assert pool.memory is not None, "native kernels compute in host memory"
        scales: list[float] = []
        if pool.is_fp8:
            scales = [one for layer in range(self._config.num_layers) for one in pool.scales(layer)]
        self._native.bind(pool.memory.view(), pool.num_blocks, pool.layout.block_size, scales)

    def forward(self, batch: ForwardBatch, after: LayersDoneFn | None = None) -> torch.Tensor:
        hidden = np.empty((len(batch.rows), self._config.hidden_size), np.float32)
        self._native.forward(*batch.known.arrays, hidden, after)
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

    def _made(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The part as the kernels use it."""
        if self._config.float_norms and name.endswith("norm"):
            return part.float() + 1
        return part

    def _place(self, name: str, layer: int, row: int, part: torch.Tensor) -> None:
        dtype = torch.float32 if part.dim() == 1 else self._dtype
        data = part.to(dtype).contiguous().view(torch.uint8)
        self._native.place(name, layer, row, len(part), data.numpy())


def _ropes(config: ModelConfig) -> list[RopeConfig | None]:
    """The model's rotary embeddings; a layer names its own by the place in this list."""
    return list(dict.fromkeys(config.rope_of(layer) for layer in range(config.num_layers)))


def _table(rope: RopeConfig | None, config: ModelConfig, positions: int) -> object:
    """The rotary embedding's table; None turns nothing."""
    if rope is not None:
        return rope_table(rope, config.head_dim, positions).numpy()
    table = np.zeros((positions, 2, config.head_dim // 2), np.float32)
    table[:, 0] = 1
    return table


def _layer_settings(config: ModelConfig, max_model_len: int) -> dict[str, Any]:
    """What differs between layers, and the experts."""
    layers, ropes = range(config.num_layers), _ropes(config)
    windows = [config.window(layer) for layer in layers]
    experts = config.experts
    found: dict[str, Any] = {
        "windows": [0 if not size or size >= max_model_len else size for size in windows],
        "ropes": [ropes.index(config.rope_of(layer)) for layer in layers],
    }
    if experts is not None:
        found |= {
            "sparse": [layer not in experts.dense_layers for layer in layers],
            "experts": experts.count,
            "experts_per_token": experts.per_token,
            "experts_inner": experts.intermediate_size,
            "experts_normalized": experts.normalized,
        }
        if experts.swiglu is not None:
            swiglu = experts.swiglu
            found |= {"activation": "swiglu", "alpha": swiglu.alpha, "limit": swiglu.limit}
    return found


def _scales(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Factors and bounds, the activation, and which norms there are."""
    scalar = config.head_dim if config.query_scalar is None else config.query_scalar
    return {
        **({"activation": "gelu"} if config.gelu else {}),
        "in_norms": config.in_norms,
        "out_norms": config.out_norms,
        "layer_norms": config.layer_norms,
        "whole_qk_norm": config.whole_qk_norm,
        "parallel": config.parallel,
        "residual_scale": config.residual_scale,
        "logit_scale": config.logit_scale,
        "query_beta": config.rope.query_beta,
        "query_span": max(1, config.rope.original_max_positions),
        "softcap": config.attention_cap or 0.0,
        "logits_softcap": config.logit_cap or 0.0,
        # Models were trained with the scale rounded to the weights' dtype.
        "embed_scale": float(torch.tensor(config.embed_scale, dtype=dtype)),
        "query_scale": scalar**-0.5,
    }
