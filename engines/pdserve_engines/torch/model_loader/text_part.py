"""Takes the text part out of the `config.json` of a multimodal model; the rest is not served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.errors import UnsupportedCheckpoint

if TYPE_CHECKING:
    from pdserve_engines.torch.model_loader.config_keys import Json

_SHARED: Final = (
    "quantization_config",
    "compression_config",
    "eos_token_id",
    "dtype",
    "torch_dtype",
)
"""Keys that count for the text part where the whole model has them."""


def text_part(raw: Json) -> Json:
    """The text part's keys; all keys if the model has no other part."""
    text = raw.get("text_config")
    if text is None:
        return raw
    if not isinstance(text, dict):
        raise UnsupportedCheckpoint("config.json: text_config is not a JSON object")
    shared = {key: raw[key] for key in _SHARED if key in raw}
    return text | shared | {"architectures": raw.get("architectures")}
