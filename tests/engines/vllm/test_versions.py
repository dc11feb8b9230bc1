"""Which releases of vLLM are named untested."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from pdserve_engines.torch.model_loader.architectures import vllm_architectures
from pdserve_engines.vllm.versions import KNOWN, untested

CONTRACT = Path(__file__).parents[2] / "contracts" / "vllm.toml"


@pytest.mark.parametrize("version", ["0.31.0", "0.32.1", "0.32.0+cpu", "0.33.0rc1", "0.33"])
def test_known_releases_are_not_named(version: str) -> None:
    assert untested(version) == ""


@pytest.mark.parametrize("version", ["0.30.9", "0.34.0", "1.32.0", "0.4.2"])
def test_other_releases_are_named_with_the_known_ones(version: str) -> None:
    said = untested(version)
    assert version in said
    assert "0.31 to 0.33" in said


@pytest.mark.parametrize("version", ["", "dev", "main-abc"])
def test_what_is_no_version_is_untested(version: str) -> None:
    assert untested(version)


def test_the_contract_is_of_a_known_release() -> None:
    version = tomllib.loads(CONTRACT.read_text("utf-8"))["version"]
    assert untested(version) == ""
    assert KNOWN[0] <= KNOWN[1]


@pytest.mark.vllm
def test_the_architectures_that_other_engines_name_are_those_of_its_registry() -> None:
    registry = pytest.importorskip("vllm.model_executor.models.registry")
    kinds = ("TEXT_GENERATION", "EMBEDDING", "MULTIMODAL", "TRANSFORMERS_SUPPORTED")
    listed = {name for kind in kinds for name in getattr(registry, f"_{kind}_MODELS")}
    assert vllm_architectures() == listed
