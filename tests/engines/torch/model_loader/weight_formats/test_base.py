"""Which format `config.json` names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.config import parse_config
from pdserve_engines.torch.model_loader.weight_formats.base import (
    read_weight_format,
    weight_format,
)
from tests.engines.torch.model_loader.test_config import GEMMA3, LLAMA

if TYPE_CHECKING:
    from pathlib import Path

GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4}}


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ({}, None),
        ({"quantization_config": None}, None),
        ({"quantization_config": {"quant_method": "mxfp4"}}, None),
        (GPTQ, "GPTQ"),
        ({"quantization_config": {"quant_method": "fp8"}}, "FP8 (fp8)"),
    ],
)
def test_a_format_is_found_by_its_method(written: dict[str, Any], name: str | None) -> None:
    found = weight_format(written)
    assert name == (None if found is None else found.name)


def test_the_text_part_has_the_format_of_the_whole(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3 | {"text_config": {}} | GPTQ))
    found = read_weight_format(tmp_path)
    assert found is not None
    assert found.name == "GPTQ"


def test_settings_that_are_not_read_are_refused_with_the_configuration() -> None:
    assert parse_config(LLAMA | GPTQ).family == "llama"
    with pytest.raises(UnsupportedCheckpoint, match="bits 2"):
        parse_config(LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 2}})
