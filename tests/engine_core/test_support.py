"""What engines declare is what they have when they are loaded, and what docs/engines.md says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import pdserve
from pdserve.clock import ManualClock
from pdserve.engine_core.engine_loader import load_core
from pdserve.messages.card import CLOSE_PREFIX, EXACT_PREFIX
from pdserve.messages.engine import EngineSpec
from pdserve.testing.inline_engine import InlineEngine
from tests.engines.sglang.fake_sglang import create as fake_sglang

if TYPE_CHECKING:
    from pdserve.engine_core.support import EngineSupport
    from pdserve.messages.engine import EngineCapabilities

ROOT = Path(pdserve.__file__).parents[1]
BUNDLED = ROOT / "pdserve" / "bundled"


def table() -> Any:
    found = importlib.util.spec_from_file_location("engine_table", ROOT / ".ci/engine_table.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def check(declared: EngineSupport, loaded: EngineCapabilities, absent: set[str]) -> None:
    """`absent`: features that need another model or setting."""
    features = {one for one in loaded.features if not one.startswith((EXACT_PREFIX, CLOSE_PREFIX))}
    assert features == set(declared.features) - absent
    assert loaded.prompt_logprobs == bool(declared.prompt_logprobs)
    assert loaded.kv_events == bool(declared.kv_events)


def test_the_page_has_todays_table() -> None:
    made = table()
    page = made.PAGE.read_text()
    assert made.BEGIN in page
    assert made.END in page
    assert made.written(page) == page, "run python .ci/engine_table.py --write"


@pytest.mark.parametrize(
    ("engine", "absent"),
    [("torch", {"classify"}), ("sim", {"lora"}), ("instant", set())],
)
def test_an_engine_has_what_it_declares(engine: str, absent: set[str]) -> None:
    spec = EngineSpec(engine=engine, model=str(BUNDLED), device="cpu", kv_memory=8 << 20)
    with InlineEngine(load_core(engine, ManualClock()), spec) as loaded:
        check(table().support()[engine], loaded.capabilities, absent)


def test_sglangs_adapter_has_what_it_declares() -> None:
    spec = EngineSpec(engine="sglang", model=str(BUNDLED))
    with InlineEngine(fake_sglang(), spec) as loaded:
        check(table().support()["sglang"], loaded.capabilities, {"lora"})
