"""Reads the scales of a checkpoint's keys and values, which tools store for KV caches in FP8.

A stored key or value times its scale is the number that is meant. A scale is one number for all
heads of a layer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from pdserve.errors import UnsupportedCheckpoint

if TYPE_CHECKING:
    from pdserve_engines.torch.model_loader.safetensors_reader import Checkpoint

__all__ = ["KvScales", "take_kv_scales"]

KvScales = tuple[tuple[float, float], ...]
"""Of keys and of values, for each layer; empty: all are one."""

_NAMES: Final = (("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"))
"""Of compressed-tensors, and of ModelOpt."""


def take_kv_scales(checkpoint: Checkpoint, num_layers: int) -> KvScales:
    """The scales; takes their tensors out of `checkpoint.entries`, which then hold the model alone.

    Raises `UnsupportedCheckpoint` if some layers have none, or if one is no positive number.
    """
    for names in _NAMES:
        found = [
            [f"model.layers.{layer}.self_attn.{name}" for name in names]
            for layer in range(num_layers)
        ]
        wanted = [name for pair in found for name in pair]
        missing = [name for name in wanted if name not in checkpoint.entries]
        if len(missing) == len(wanted):
            continue
        if missing:
            raise UnsupportedCheckpoint(
                f"tensor {missing[0]} is missing: other layers have scales of keys and values"
            )
        scales = tuple((_scale(checkpoint, key), _scale(checkpoint, value)) for key, value in found)
        for name in wanted:
            del checkpoint.entries[name]
        return scales
    return ()


def _scale(checkpoint: Checkpoint, name: str) -> float:
    tensor = checkpoint.tensor(name)
    scale = float(tensor) if tensor.numel() == 1 else math.nan
    if not 0 < scale < math.inf:
        raise UnsupportedCheckpoint(
            f"tensor {name}: a scale of keys or values is one positive number for all heads"
        )
    return scale
