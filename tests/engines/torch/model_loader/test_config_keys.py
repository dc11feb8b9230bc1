"""Values that JSON allows and no model has, and files that are no JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.config_keys import (
    above_zero,
    number,
    positive,
    read_json,
    section,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("written", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_numbers_are_finite(written: str) -> None:
    raw = json.loads(f'{{"eps": {written}}}')
    with pytest.raises(UnsupportedCheckpoint, match="eps must be a finite number") as error:
        number(raw, "eps")
    assert len(error.value.message) < 120


def test_a_factor_is_above_zero() -> None:
    assert above_zero({"factor": 2}, "factor") == 2.0
    for value in (0, -1.0):
        with pytest.raises(UnsupportedCheckpoint, match="factor must be larger than zero"):
            above_zero({"factor": value}, "factor")


def test_numbers_of_things_have_a_bound() -> None:
    assert positive({"layers": 7}, "layers", most=7) == 7
    with pytest.raises(UnsupportedCheckpoint, match="layers must be at most 7, is 8"):
        positive({"layers": 8}, "layers", most=7)


def test_a_section_is_an_object() -> None:
    assert section({}, "rope") == section({"rope": None}, "rope") == {}
    assert section({"rope": {"a": 1}}, "rope") == {"a": 1}
    for value in ([1], "yarn", 3):
        with pytest.raises(UnsupportedCheckpoint, match="rope must be an object"):
            section({"rope": value}, "rope")


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 100_000 + "1" + "}" * 100_000])
def test_a_file_that_is_nested_without_end_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(UnsupportedCheckpoint, match=r"config\.json: nested too deeply"):
        read_json(file)
