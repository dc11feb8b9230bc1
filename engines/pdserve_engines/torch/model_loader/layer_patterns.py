"""Reads in which layers attention differs: which have a sliding window, and which turn no head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.config_keys import Json, flag, positive

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve_engines.torch.model_loader.architectures import ModelFamily

_MOST_WINDOW: Final = 1 << 31
_IN_EVERY_LAYER: Final = ("mistral", "mixtral", "phi3")
_IN_A_PATTERN: Final[Mapping[str, int]] = {
    "gemma2": 2,
    "gemma3": 6,
    "olmo3": 4,
    "cohere2": 4,
    "exaone4": 4,
    "gpt_oss": 2,
}
"""Families in which every so many layers one has no window."""
_IF_SAID: Final = ("qwen2", "qwen3", "qwen3_moe", "smollm3")
"""Families with a switch, which is off by default."""


def parse_windows(
    raw: Json, family: ModelFamily, layers: int
) -> tuple[int | None, tuple[int, ...]]:
    """The window, None if no layer uses one, and the layers that do not."""
    window = raw.get("sliding_window", 4096)
    windowed = _windowed_layers(raw, family, layers)
    optional = family == "exaone4" or family not in _IN_A_PATTERN
    if not any(windowed) or (window is None and optional):
        return None, ()
    full = tuple(index for index, has in enumerate(windowed) if not has)
    return positive({"sliding_window": window}, "sliding_window", most=_MOST_WINDOW), full


def parse_nope_layers(
    raw: Json, family: ModelFamily, layers: int, full_layers: tuple[int, ...]
) -> tuple[int, ...]:
    """The layers without a rotary embedding."""
    if family in ("cohere2", "exaone4"):
        return full_layers
    if family != "smollm3":
        return ()
    rotary = raw.get("no_rope_layers")
    if rotary is None:
        every = positive(raw, "no_rope_layer_interval", 4)
        return tuple(index for index in range(layers) if (index + 1) % every == 0)
    if not isinstance(rotary, list) or len(rotary) < layers:
        raise UnsupportedCheckpoint(f"config.json: no_rope_layers must list {layers} layers")
    # Despite the key's name, one means that the layer has the embedding.
    return tuple(index for index in range(layers) if not rotary[index])


def _windowed_layers(raw: Json, family: ModelFamily, layers: int) -> list[bool]:
    if family in _IN_EVERY_LAYER:
        return [True] * layers
    pattern = _IN_A_PATTERN.get(family)
    if pattern is None and not (family in _IF_SAID and flag(raw, "use_sliding_window")):
        return [False] * layers
    if family == "qwen3_moe":
        return [True] * layers
    if raw.get("layer_types") is not None:
        return _layer_types(raw["layer_types"], layers)
    if pattern is not None:
        pattern = positive(raw, "sliding_window_pattern", pattern)
        return [(index + 1) % pattern != 0 for index in range(layers)]
    if family == "smollm3":
        nope = parse_nope_layers(raw, family, layers, ())
        return [index in nope for index in range(layers)]
    # Zero: every layer has the window.
    first = 0 if raw.get("max_window_layers") == 0 else positive(raw, "max_window_layers", 28)
    return [index >= first for index in range(layers)]


def _layer_types(types: Any, layers: int) -> list[bool]:
    names = {"full_attention": False, "sliding_attention": True}
    if not isinstance(types, list) or len(types) != layers:
        raise UnsupportedCheckpoint(f"config.json: layer_types must name {layers} layers")
    for name in types:
        if name not in names:
            raise UnsupportedCheckpoint(f"config.json: layer_types: {name!r} is not supported")
    return [names[name] for name in types]
