"""docs/models.md says what serves popular models and which formats they speak: as the code does."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def script() -> Any:
    spec = importlib.util.spec_from_file_location("models_table", ROOT / ".ci/models_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_table_of_today():
    made = script()
    if not (made.TEMPLATES / ".complete").exists():
        if os.environ.get("PDSERVE_REQUIRE_TEMPLATES", "") not in ("", "0"):
            pytest.fail("the public chat templates are not there: bash .ci/templates.sh")
        pytest.skip("without public chat templates: bash .ci/templates.sh")
    page = (ROOT / "docs/models.md").read_text()
    assert made.written(page) == page, "run python .ci/models_table.py --write"


def test_at_least_fifty_models_are_listed_once():
    names = [model["name"] for model in script().models()]
    assert len(names) == len(set(names)) >= 50


def test_images_are_compared_for_the_architectures_that_the_table_says():
    families = pytest.importorskip("tests.engines.vllm.vision_families")
    tested = {f"{family.model}ForConditionalGeneration" for family in families.FAMILIES.values()}
    assert {*script().compared()} == tested | {"Idefics3ForConditionalGeneration"}
