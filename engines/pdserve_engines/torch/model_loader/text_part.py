"""Takes the text part out of the `config.json` of a multimodal model; the rest is not served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.architectures import TEXT_PARTS, architectures

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve_engines.torch.model_loader.config_keys import Json

_SHARED: Final = (
    "quantization_config",
    "compression_config",
    "tie_word_embeddings",
    "eos_token_id",
    "dtype",
    "torch_dtype",
)
"""Keys that count for the text part where the whole model has them."""

_DEFAULTS: Final[Mapping[str, Json]] = {
    "Qwen2VLForConditionalGeneration": {"rope_theta": 1e6, "max_window_layers": 80},
    "Qwen2_5_VLForConditionalGeneration": {"rope_theta": 1e6, "max_window_layers": 80},
    "Qwen3VLForConditionalGeneration": {"rope_theta": 5e5, "head_dim": 128},
    "Qwen3VLMoeForConditionalGeneration": {"rope_theta": 5e5},
    "ministral3": {"sliding_window": None, "rms_norm_eps": 1e-5, "head_dim": 128},
}
"""Defaults that differ from those of the family, by architecture or model type."""


def text_part(raw: Json) -> Json:
    """The text part's keys; all keys if the model has no other part."""
    names = architectures(raw)
    # Older tools write the text part's keys beside the other parts.
    text = raw.get("text_config", raw)
    if not isinstance(text, dict):
        raise UnsupportedCheckpoint("config.json: text_config is not a JSON object")
    shared = {key: raw[key] for key in _SHARED if key in raw}
    part = text | shared | {"architectures": names}
    for name in (*names, str(part.get("model_type"))):
        part = dict(_DEFAULTS.get(name, {})) | part
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(part.get(key), dict) and not TEXT_PARTS.keys().isdisjoint(names):
            part[key] = _for_text(part[key])
    return part


def _for_text(rope: Json) -> Json:
    """A rotary embedding in several dimensions (mrope), as it is for text: all of a token's
    positions are the same, so the sections turn like one."""
    kept: dict[str, Any] = {key: rope[key] for key in rope if not key.startswith("mrope_")}
    return {key: "default" if value == "mrope" else value for key, value in kept.items()}
