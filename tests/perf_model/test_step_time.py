"""What steps cost: the formulas, the presets' plausibility, files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.errors import ConfigError
from pdserve.perf_model.step_time import (
    PRESETS,
    MockerPolynomials,
    Roofline,
    preset_of,
    read_timing,
    write_timing,
)

if TYPE_CHECKING:
    from pathlib import Path

MODEL = Roofline(base=1.0, sequence=0.5, weights=10.0, token=0.25, pair=0.125, kv=0.0625)
ROOM = 1 << 20


def test_decodes_share_the_weights_and_pay_for_their_own_context():
    assert MODEL.step((), 2, 16, ROOM) == 1.0 + 2 * 0.5 + 10.0 + 16 * 0.0625


def test_a_large_batch_is_bound_by_its_products():
    assert MODEL.step((), 80, 0, ROOM) == 1.0 + 40.0 + 20.0


def test_a_prompt_pays_for_the_square_of_its_own_length_only():
    one = MODEL.step([(0, 8)], 0, 0, ROOM)
    assert one == 1.0 + 0.5 + 10.0 + 32 * 0.125
    two = MODEL.step([(0, 8), (0, 8)], 0, 0, ROOM)
    assert two - one == 0.5 + 32 * 0.125
    assert MODEL.step([(8, 8)], 0, 0, ROOM) - one == 64 * 0.125


def test_chunks_cost_what_the_whole_prompt_costs_but_for_reading_the_weights():
    bound = Roofline(0.0, 0.0, 0.0, MODEL.token, MODEL.pair, MODEL.kv)
    whole = bound.step([(0, 64)], 0, 0, ROOM)
    chunks = sum(bound.step([(start, 16)], 0, 0, ROOM) for start in range(0, 64, 16))
    assert chunks == pytest.approx(whole)


def test_the_mocker_is_what_dynamo_publishes():
    """Its rounded form: 4.21e-7 t^2 + 0.01518 t + 16.5 and -25.74 u^2 + 54.01 u + 5.74."""
    model = MockerPolynomials()
    for t in (1, 1000, 8192):
        expected = 4.21e-7 * t * t + 0.01518 * t + 16.5
        assert model.step([(0, t)], 0, 0, 100) * 1000 == pytest.approx(expected, rel=1e-3)
    for u in (0.0, 0.25, 1.0):
        expected = -25.74 * u * u + 54.01 * u + 5.74
        assert model.step((), 3, int(100 * u), 100) * 1000 == pytest.approx(expected)
    both = model.step([(0, 10), (5, 20)], 3, 25, 100)
    apart = model.step([(0, 30)], 0, 0, 100) + model.step((), 1, 25, 100)
    assert both == pytest.approx(apart)


@pytest.mark.parametrize(
    ("name", "decode", "many", "prompt"),
    [
        ("h100-8b", (0.005, 0.008), (0.010, 0.016), (0.20, 0.28)),
        ("h200-8b", (0.004, 0.006), (0.008, 0.013), (0.20, 0.28)),
        ("h100-70b-tp4", (0.013, 0.020), (0.017, 0.026), (0.55, 0.75)),
        ("h200-70b", (0.010, 0.016), (0.017, 0.026), (0.60, 0.85)),
        ("dynamo-mocker", (0.0057, 0.0059), (0.010, 0.014), (0.14, 0.18)),
    ],
)
def test_presets_are_of_the_order_of_published_figures(name, decode, many, prompt):
    """A decode alone, 64 of 2,000 tokens each, a prompt of 8,192 tokens in one step."""
    preset = preset_of(name)
    step = preset.timing.step
    assert decode[0] < step((), 1, 100, preset.kv_tokens) < decode[1]
    assert many[0] < step((), 64, 64 * 2000, preset.kv_tokens) < many[1]
    assert prompt[0] < step([(0, 8192)], 0, 0, preset.kv_tokens) < prompt[1]
    assert preset.weight_bytes < preset.kv_tokens * preset.shape.token_bytes * 10


def test_an_unknown_preset_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match="h100-8b") as caught:
        preset_of("h100")
    assert all(name in caught.value.message for name in PRESETS)


def test_a_model_survives_its_file(tmp_path: Path):
    path = tmp_path / "timing.json"
    write_timing(path, MODEL, {"machine": "this one"})
    assert read_timing(path) == MODEL


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"roofline": {"base": 1}}', '{"roofline": {"base": "x"}}', "{"],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, content: str):
    path = tmp_path / "timing.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"timing\.json"):
        read_timing(path)


def test_a_file_with_negative_times_is_refused(tmp_path: Path):
    path = tmp_path / "timing.json"
    write_timing(path, Roofline(1, 1, 1, 1, 1, -1), {})
    with pytest.raises(ConfigError, match="negative"):
        read_timing(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_timing(tmp_path / "nothing.json")
