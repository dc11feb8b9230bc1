"""What is missing to run the engine, and how a package that cannot be used is refused."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.clock import ManualClock
from pdserve.engine_core.engine_loader import load_core
from pdserve.errors import ConfigError
from pdserve.messages.engine import EngineSpec
from pdserve_engines import tensorrt_llm
from pdserve_engines.tensorrt_llm import package
from tests.engines.tensorrt_llm.fake_llm import FakeLlm, FakeLlm14, fake_modules


def test_without_the_package_the_remedy_is_named():
    if importlib.util.find_spec("tensorrt_llm") is not None:
        pytest.skip("it is installed here")
    core = load_core("tensorrt_llm", ManualClock())
    with pytest.raises(ConfigError, match=r"pdserve\[trtllm\]"):
        core.load(EngineSpec(engine="tensorrt_llm", model="/m"), lambda progress: None)
    assert core.close() == 0
    lacks = tensorrt_llm.missing()
    assert any("package tensorrt_llm" in text for text in lacks)


def test_each_thing_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setattr(package, "_PYTHONS", ((3, 1),))
    monkeypatch.setattr("sys.platform", "darwin")
    named = " ".join(package.missing())
    for word in ("Linux", "tensorrt_llm", "Python 3.1", "NVIDIA GPU", "MPI"):
        assert word in named
    monkeypatch.undo()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("ctypes.util.find_library", lambda name: "libmpi.so")
    monkeypatch.setattr(Path, "exists", lambda path: True)
    assert package.missing() == []


def test_an_import_that_fails_says_why_and_what_is_missing(monkeypatch):
    def broken(name: str):
        raise RuntimeError("no CUDA device")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ConfigError, match=r"RuntimeError: no CUDA device\. Missing here"):
        package.load_package()


def test_a_release_that_lacks_a_name_is_refused_by_it():
    with pytest.raises(ConfigError, match="DisaggregatedParams"):
        package.read_package(
            lambda name: SimpleNamespace(
                LLM=FakeLlm, SamplingParams=object, GuidedDecodingParams=object, TorchLlmArgs=object
            )
        )


def test_the_names_of_both_kinds_of_releases_are_read():
    old = package.read_package(fake_modules(FakeLlm))
    new = package.read_package(fake_modules(FakeLlm14))
    assert (old.version, new.version) == ("1.2.1", "1.4.0rc1")
    assert "priority" in new.generate_parameters - old.generate_parameters
    assert "prompt_ignore_length" in new.sampling_fields - old.sampling_fields
    assert old.arguments["kv_cache_config"]["tokens_per_block"] is None
    policies = old.arguments["scheduler_config"]["waiting_queue_policy"]
    assert policies == {"fcfs", "priority"}


def test_a_decorator_that_hides_parameters_does_not_hide_what_all_releases_have():
    class Decorated(FakeLlm):
        def generate_async(self, *args: Any, **options: Any) -> Any:
            return super().generate_async(*args, **options)

    read = package.read_package(fake_modules(Decorated))
    assert "cache_salt" in read.generate_parameters
    assert "priority" not in read.generate_parameters
