"""What the adapter reads from SGLang's objects, and how it ends them."""

from __future__ import annotations

import atexit
import logging
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ConfigError
from pdserve.messages.engine import EngineSpec, LoadProgress
from pdserve_engines.sglang import engine as module
from pdserve_engines.sglang.engine import SglangEngine, SglangPackage, load_engine
from tests.conformance.test_engines import write_model
from tests.engines.sglang.fake_sglang import FIELDS, FakeEngine

if TYPE_CHECKING:
    from pathlib import Path


def load(path: Path, progress: list[LoadProgress] | None = None, **changes: Any) -> SglangEngine:
    write_model(path)
    spec = EngineSpec(engine="sglang", model=str(path), prefix_cache=False, **changes)
    report = (progress if progress is not None else []).append
    package = SglangPackage(FakeEngine, FIELDS, "0.5.23")
    return load_engine(package, spec, "", report, frozenset)


def test_names_are_found_by_import(monkeypatch: pytest.MonkeyPatch):
    class Struct:
        __struct_fields__ = ("a", "b")

    found = {
        "sglang.srt.entrypoints.engine": SimpleNamespace(Engine="engine"),
        "sglang.srt.server_args": SimpleNamespace(ServerArgs=Struct),
        "sglang.version": SimpleNamespace(__version__="0.5.23"),
    }
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "")
    monkeypatch.delenv("SGLANG_RETURN_ORIGINAL_LOGPROB")
    monkeypatch.setattr("importlib.import_module", found.__getitem__)
    assert module.import_sglang() == SglangPackage("engine", ("a", "b"), "0.5.23")  # type: ignore[arg-type]
    assert os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "1"


def test_fields_of_an_older_release_are_those_of_a_dataclass():
    old = SimpleNamespace(__dataclass_fields__={"a": 1})
    assert module._field_names(old) == ("a",)
    assert module._resolved(SimpleNamespace(page_size=3)) == {"page_size": 3}


def test_equal_checkpoints_have_equal_names_for_blocks(tmp_path: Path):
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path in paths:
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"x" * (7 if path.name == "c" else 5))
    engines = [load(path) for path in (*paths, paths[0])]
    engines.append(load(paths[0], block_size=8))
    hashes = [each.capabilities.compat_hash for each in engines]
    for each in engines:
        each.close()
    assert hashes[0] == hashes[1] == hashes[3]
    assert len(set(hashes)) == 3


def test_loading_reports_its_stage(tmp_path: Path):
    stages: list[LoadProgress] = []
    load(tmp_path, stages).close()
    assert [stage.stage for stage in stages] == ["loading the model into SGLang"]


@pytest.mark.parametrize("kind", [ValueError, AssertionError, NotImplementedError])
def test_a_model_that_cannot_be_loaded_is_a_matter_of_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
):
    """SGLang checks its arguments by assertions, too."""

    def refuse(self: Any, **arguments: Any) -> None:
        raise kind("no such\n   architecture")

    monkeypatch.setattr(FakeEngine, "__init__", refuse)
    with pytest.raises(ConfigError, match="SGLang refuses this configuration: no such architectu"):
        load(tmp_path)


def test_nothing_is_left_to_run_at_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It would kill the children that the process has then."""
    removed: list[Any] = []
    monkeypatch.setattr(atexit, "unregister", removed.append)
    engine = load(tmp_path)
    engine.close()
    assert removed == [engine._engine.shutdown]
    monkeypatch.undo()
    atexit.unregister(engine._engine.shutdown)


def test_processes_that_do_not_end_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    engine = load(tmp_path)
    FakeEngine.shutdown(engine._engine)

    def stuck() -> None:
        raise RuntimeError("still alive: 4711")

    monkeypatch.setattr(engine._engine, "shutdown", stuck)
    with caplog.at_level(logging.WARNING):
        engine.close()
    assert "still alive: 4711" in caplog.text
