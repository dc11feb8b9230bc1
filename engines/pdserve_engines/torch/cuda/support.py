"""Says whether the kernels can compute a model, without importing Triton."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Final

from pdserve_engines.torch.models.cpu_model import unknown_fields

if TYPE_CHECKING:
    from pdserve_engines.torch.model_loader.config import ModelConfig

__all__ = ["MAX_GROUP", "MAX_HEAD_DIM", "unsupported_reason"]

MAX_HEAD_DIM: Final = 256
MAX_GROUP: Final = 32
"""Query heads of a KV head. The rows of a larger group need more registers than threads have."""

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
        "in_norms",
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
"""Optional fields of `ModelConfig` that the kernels take into account."""


def unsupported_reason(config: ModelConfig) -> str | None:
    """Why the kernels cannot compute this model; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if config.head_dim > MAX_HEAD_DIM:
        return f"its heads have more than {MAX_HEAD_DIM} dimensions"
    if config.groups > MAX_GROUP:
        return f"more than {MAX_GROUP} of its query heads share a KV head"
    unknown = unknown_fields(config, _KNOWN)
    return f"they know no {unknown[0]}, which {config.family} has" if unknown else None
