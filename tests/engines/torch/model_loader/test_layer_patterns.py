"""Which layers have a window, and which no rotary embedding, in the spellings of newer families."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.layer_patterns import parse_nope_layers, parse_windows

SLIDING_FIRST = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("family", "raw", "window", "full"),
    [
        ("phi3", {"sliding_window": None}, None, ()),
        ("phi3", {"sliding_window": 64}, 64, ()),
        ("olmo2", {"sliding_window": 64}, None, ()),
        ("gemma2", {}, 4096, (1, 3)),
        ("gemma2", {"sliding_window": 64, "layer_types": SLIDING_FIRST}, 64, (1, 2)),
        ("olmo3", {"sliding_window": 64}, 64, (3,)),
        ("cohere2", {"sliding_window": 64, "sliding_window_pattern": 2}, 64, (1, 3)),
        ("exaone4", {"sliding_window": 64}, 64, (3,)),
        ("exaone4", {"sliding_window": None, "sliding_window_pattern": None}, None, ()),
        ("smollm3", {"sliding_window": 64}, None, ()),
        ("smollm3", {"use_sliding_window": True, "sliding_window": None}, None, ()),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 64}, 64, (0, 1, 2)),
        (
            "smollm3",
            {"use_sliding_window": True, "sliding_window": 64, "layer_types": SLIDING_FIRST},
            64,
            (1, 2),
        ),
    ],
)
def test_windows(
    family: Any, raw: dict[str, Any], window: int | None, full: tuple[int, ...]
) -> None:
    assert parse_windows(raw, family, 4) == (window, full)


@pytest.mark.parametrize("family", ["gemma2", "olmo3", "cohere2"])
def test_a_pattern_of_windows_needs_a_window(family: Any) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="sliding_window must be a positive integer"):
        parse_windows({"sliding_window": None}, family, 4)


@pytest.mark.parametrize(
    ("family", "raw", "nope"),
    [
        ("llama", {"no_rope_layers": [0, 0, 0, 0]}, ()),
        ("smollm3", {}, (3,)),
        ("smollm3", {"no_rope_layer_interval": 2}, (1, 3)),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 0, 1]}, (0, 3)),
        ("cohere2", {}, (2,)),
        ("exaone4", {}, (2,)),
    ],
)
def test_layers_without_a_rotary_embedding(
    family: Any, raw: dict[str, Any], nope: tuple[int, ...]
) -> None:
    assert parse_nope_layers(raw, family, 4, full_layers=(2,)) == nope


@pytest.mark.parametrize("listed", [[1, 0], "1101"])
def test_a_list_that_misses_layers_is_refused(listed: Any) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="no_rope_layers must list 4 layers"):
        parse_nope_layers({"no_rope_layers": listed}, "smollm3", 4, ())
