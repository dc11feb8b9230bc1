"""Names to engines, and what a person reads when that fails."""

from __future__ import annotations

import importlib.util
import sys
import types
from importlib.metadata import EntryPoint

import pytest

from pdserve.clock import ManualClock
from pdserve.engine_core import engine_loader
from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.engine_loader import (
    import_early,
    installed_engines,
    load_core,
    missing_parts,
)
from pdserve.engine_core.staged_kv.core import StagedCore
from pdserve.errors import ConfigError
from pdserve.messages.engine import EngineSpec, TransferSpec
from pdserve.testing.fake_mover import FakeMover, FakeNet
from pdserve.testing.scripted import ENGINE
from pdserve_engines.instant import InstantCore


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType("made_up_engine")
    monkeypatch.setitem(sys.modules, "made_up_engine", made)
    return made


def test_an_executor_is_driven_by_pdserves_scheduler():
    assert isinstance(load_core(ENGINE, ManualClock()), EngineCore)


def test_a_core_is_taken_as_it_is():
    assert isinstance(load_core("instant", ManualClock()), InstantCore)


def test_an_engine_without_kv_refuses_to_move_any():
    with pytest.raises(
        ConfigError, match=r"engine 'instant' cannot transfer KV.*--mode=aggregated"
    ):
        load_core("instant", ManualClock(), FakeMover(FakeNet()))


def test_an_engine_without_kv_goes_without_where_that_is_optional():
    core = load_core("instant", ManualClock(), FakeMover(FakeNet()), optional=True)
    assert isinstance(core, InstantCore)


def test_a_core_that_stages_kv_gets_the_connector():
    core = load_core("tests.support.staged_engine:create", ManualClock(), FakeMover(FakeNet()))
    assert isinstance(core, StagedCore)
    assert core.wants_kv(EngineSpec(engine="", model="", transfer=TransferSpec()))
    assert not core.wants_kv(EngineSpec(engine="", model=""))


def test_the_engines_of_this_installation_are_listed():
    assert {"instant", "torch"} <= set(installed_engines())


def test_an_unknown_name_suggests_the_nearest_and_lists_all():
    with pytest.raises(ConfigError, match=r"no engine 'instnat'; did you mean 'instant'") as caught:
        load_core("instnat", ManualClock())
    assert "torch" in caught.value.message


def test_a_missing_library_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, module: types.ModuleType
):
    def no_torch(name: str) -> object:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("importlib.import_module", no_torch)
    with pytest.raises(ConfigError, match=r"needs 'torch'.*pip install 'pdserve\[torch\]'"):
        load_core("torch", ManualClock())


def test_a_missing_library_without_extra_is_named_itself(monkeypatch: pytest.MonkeyPatch):
    def no_luck(name: str) -> object:
        raise ModuleNotFoundError("No module named 'luck'", name="luck")

    monkeypatch.setattr("importlib.import_module", no_luck)
    with pytest.raises(ConfigError, match=r"needs .luck., .*install .luck."):
        load_core("some.engine:create", ManualClock())


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("no.such.module:create", "no module 'no'"),
        ("pdserve.testing.nothing:create", "no module 'pdserve.testing.nothing'"),
        ("pdserve.testing.scripted:nothing", "has no 'nothing'"),
        ("pdserve.testing.scripted:ENGINE", "cannot be called"),
    ],
)
def test_a_wrong_path_says_which_part_is_wrong(engine: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load_core(engine, ManualClock())


def test_a_factory_must_make_an_executor_or_a_core(module: types.ModuleType):
    module.create = lambda: "neither"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="made a str"):
        load_core("made_up_engine:create", ManualClock())


def test_entry_points_of_other_packages_count(
    monkeypatch: pytest.MonkeyPatch, module: types.ModuleType
):
    module.create = lambda: InstantCore(ManualClock())  # type: ignore[attr-defined]
    point = EntryPoint("mine", "made_up_engine:create", engine_loader.ENTRY_POINT_GROUP)
    monkeypatch.setattr(
        engine_loader,
        "entry_points",
        lambda group: [point] if group == engine_loader.ENTRY_POINT_GROUP else [],
    )
    assert installed_engines() == ["mine"]
    assert isinstance(load_core("mine", ManualClock()), InstantCore)


def test_errors_of_an_early_import_wait_for_the_load(module: types.ModuleType):
    import_early("no_such_module_here:create")
    with pytest.raises(ConfigError, match="no module 'no_such_module_here'"):
        load_core("no_such_module_here:create", ManualClock())


def _register(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    point = EntryPoint(name=name, value=value, group=engine_loader.ENTRY_POINT_GROUP)
    monkeypatch.setattr(engine_loader, "entry_points", lambda group: [point])


def test_an_engine_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch, module: types.ModuleType):
    _register(monkeypatch, "made", "made_up_engine:create")
    assert missing_parts("made") == []
    monkeypatch.setattr(module, "missing", lambda: ["a GPU"], raising=False)
    assert missing_parts("made") == ["a GPU"]


def test_an_engine_that_cannot_be_imported_lacks_what_its_error_says(
    monkeypatch: pytest.MonkeyPatch,
):
    _register(monkeypatch, "made", "no_such_module_here:create")
    assert missing_parts("made") == ["No module named 'no_such_module_here'"]


def test_libraries_of_the_torch_engine_are_not_imported_to_look_for_them(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"imports {name}"))
    assert missing_parts("torch") == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert missing_parts("torch") == [
        "the package torch: pip install 'pdserve[torch]'",
        "the package numpy: pip install 'pdserve[torch]'",
    ]
