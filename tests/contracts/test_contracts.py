"""The checker finds each kind of difference, and the data files agree with what is at hand.

Every difference is planted in a small package, which is read as text and by importing it.
"""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.contracts.__main__ import main
from tests.contracts.compare import differences
from tests.contracts.contract import ENGINES, load, members, parse
from tests.contracts.installed import InstalledReader
from tests.contracts.references import ReferenceReader
from tests.contracts.source import SourceReader
from tests.contracts.wheels import find_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.contracts.compare import Reader
    from tests.contracts.contract import Contract

SOURCE = """
from __future__ import annotations
import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

ALL = 1 << 30
Backend = Literal["auto", "guidance"]

class Reason(enum.IntEnum):
    STOP = 0
    LENGTH = 1

@dataclass
class Base:
    name: str
    KIND: ClassVar[str] = "x"

@dataclass
class Params(Base):
    top_k: int = ALL
    size: int = -1
    stops: list[int] = field(default_factory=list)

class Connector(ABC):
    @abstractmethod
    def load(self, request, blocks: int, **kwargs): ...
    @abstractmethod
    def build(self): ...
    def take(self) -> None: ...

class Engine:
    def __init__(self, model: str, *, seed: int = 0, **kwargs) -> None:
        self.scheduler = None
    @property
    def page(self) -> int:
        return 1
    async def generate(self, ids, priority: int | None = None): ...
    @staticmethod
    def kind(config, quick=False): ...
"""

CONTRACT = {
    "package": "planted",
    "version": "1",
    "name": [
        {"at": "P.core:Params", "use": "sampling", "ordered": True,
         "fields": ["name", "top_k = 1 << 30", "size = -1", "stops = []"]},
        {"at": "P.core:Reason", "values": ["STOP = 0", "LENGTH = 1"]},
        {"at": "P.core:Backend", "choices": ["guidance"]},
        {"at": "P.core:Connector", "implemented": True,
         "methods": ["load(request, blocks, **kwargs)", "build()", "take()"]},
        {"at": "P:Engine", "parameters": ["model", "seed = 0", "**kwargs"],
         "methods": ["kind(config, quick=...)"], "attributes": ["scheduler", "page"]},
        {"at": "P:Engine.generate", "parameters": ["ids", "priority = None"]},
    ],
}  # fmt: skip

PLANTED = {
    "a field is gone": ("    size: int = -1\n", "", "gone: P.core:Params.size  (sampling)"),
    "a default of a field": ("1 << 30", "1 << 31", "default changed: P.core:Params.top_k was"),
    "a field became required": (
        "name: str\n", "name: str = 'x'\n", "default changed: P.core:Params.name was required, is",
    ),
    "a new required field": ("    name: str\n", "    name: str\n    model: str\n",
                             "new required parameter: P.core:Params.model"),
    "a field in between": ("    size: int = -1\n", "    more: int = 3\n    size: int = -1\n",
                           "moved: P.core:Params.size from place 2 to 3"),
    "a value": ("LENGTH = 1", "LENGTH = 2", "value changed: P.core:Reason.LENGTH was 1, is 2"),
    "a value is gone": ("    LENGTH = 1\n", "", "gone: P.core:Reason.LENGTH"),
    "a new value": ("LENGTH = 1\n", "LENGTH = 1\n    END = 2\n", "new value: P.core:Reason.END"),
    "a choice": ('"guidance"', '"llguidance"', "gone: P.core:Backend.guidance"),
    "a method is gone": ("def take", "def taken", "gone: P.core:Connector.take"),
    "a parameter of a method": ("blocks: int", "groups: int", "gone: P.core:Connector.load.blocks"),
    "a new parameter of ours": ("blocks: int,", "blocks: int, n: int = 0,",
                                "new parameter: P.core:Connector.load.n = 0"),
    "a new abstract method": ("    def take", "    @abstractmethod\n    def more(self): ...\n"
                              "    def take", "new abstract method: P.core:Connector.more"),
    "a parameter is gone": ("seed: int = 0", "seeds: int = 0", "gone: P:Engine.seed"),
    "a default": ("seed: int = 0", "seed: int = 1", "default changed: P:Engine.seed was 0, is 1"),
    "a new required parameter": ("self, ids,", "self, ids, rid,",
                                 "new required parameter: P:Engine.generate.rid"),
    "an optional one became required": ("quick=False", "quick",
                                        "default changed: P:Engine.kind.quick had one"),
    "an attribute": ("self.scheduler", "self.sched", "gone: P:Engine.scheduler"),
    "a property": ("def page", "def pages", "gone: P:Engine.page"),
    "a class": ("class Engine:", "class Engines:", "gone: P:Engine"),
}  # fmt: skip


class Planted:
    """The package under a name of its own, as a folder, a wheel or an import."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = f"planted_{path.name.replace('-', '_')}"
        self._opened: list[SourceReader] = []

    def contract(self) -> Contract:
        text = repr(CONTRACT).replace("'P.", f"'{self.name}.").replace("'P:", f"'{self.name}:")
        return parse(eval(text))

    def differences(self, kind: str, source: str) -> list[str]:
        found = differences(self.contract(), self.reader(kind, source))
        return [
            line.replace(f"{self.name}.", "P.").replace(f"{self.name}:", "P:") for line in found
        ]

    def reader(self, kind: str, source: str) -> Reader:
        package = self.path / "python" / self.name
        package.mkdir(parents=True)
        # The class is re-exported, in a branch, as large packages do it.
        again = "if True:\n    from .core import Engine as Engine\n"
        (package / "__init__.py").write_text(again if "class Engine:" in source else "")
        (package / "core.py").write_text(source)
        if kind == "installed":
            return InstalledReader()
        if kind == "wheel":
            wheel = self.path / "planted.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                for file in package.iterdir():
                    archive.write(file, f"{self.name}/{file.name}")
            reader = SourceReader(wheel)
        else:
            reader = SourceReader(self.path)
        self._opened.append(reader)
        return reader

    def close(self) -> None:
        for reader in self._opened:
            reader.close()


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Planted]:
    planted = Planted(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "python"))
    yield planted
    planted.close()
    for name in [name for name in sys.modules if name.partition(".")[0] == planted.name]:
        del sys.modules[name]


KINDS = ("folder", "wheel", "installed")


@pytest.mark.parametrize("kind", KINDS)
def test_the_release_of_the_data_file_has_no_differences(planted: Planted, kind: str):
    assert planted.differences(kind, SOURCE) == []


@pytest.mark.parametrize("kind", ["folder", "installed"])
@pytest.mark.parametrize("name", PLANTED)
def test_each_kind_of_difference_is_found(planted: Planted, name: str, kind: str):
    before, after, line = PLANTED[name]
    assert SOURCE.count(before) == 1
    found = planted.differences(kind, SOURCE.replace(before, after))
    assert any(each.startswith(line) for each in found), found


MANIFEST = """
methods:
  __init__:
    parameters:
      max_tokens: {annotation: int, default: 32}
      stop: {annotation: str, default: inspect._empty}
      logprobs: {annotation: 'Optional[int]', default: None}
      kwargs: {annotation: Any, default: inspect._empty}
  abort:
    parameters: {}
properties:
  finished: {annotation: bool, default: inspect._empty}
"""


def manifest_differences(path: Path, text: str) -> list[str]:
    for folder, content in (("references_committed", text), ("references", "methods: {}")):
        where = path / "tests" / "unittest" / "api_stability" / folder
        where.mkdir(parents=True)
        (where / "params.yaml").write_text(content)
    (path / "trt").mkdir()
    (path / "trt" / "other.py").write_text("class Other:\n    value: int = 1\n")
    source = "tests/unittest/api_stability/references/params.yaml@abc"
    entry = {
        "at": "trt.params:Params",
        "source": source,
        "parameters": ["max_tokens = 32", "stop", "logprobs = None"],
        "methods": ["abort()"],
        "attributes": ["finished", "stop"],
    }
    contract = parse(
        {
            "package": "trt",
            "version": "1",
            "name": [
                entry,
                {"at": "trt.params:Params.abort", "source": source, "parameters": []},
                {"at": "trt.other:Other", "fields": ["value = 1"]},
            ],
        }
    )
    reader = ReferenceReader(path, contract)
    try:
        return differences(contract, reader)
    finally:
        reader.close()


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("", "", ""),
        (
            "default: 32",
            "default: 64",
            "default changed: trt.params:Params.max_tokens was 32, is 64",
        ),
        ("stop:", "stops:", "gone: trt.params:Params.stop"),
        ("abort:", "cancel:", "gone: trt.params:Params.abort"),
        ("finished:", "done:", "gone: trt.params:Params.finished"),
        (
            "default: None}",
            "default: inspect._empty}",
            "default changed: trt.params:Params.logprobs",
        ),
    ],
)
def test_manifests_are_compared(tmp_path: Path, before: str, after: str, line: str):
    found = manifest_differences(tmp_path, MANIFEST.replace(before, after))
    assert any(each.startswith(line) for each in found) if line else found == []


# ---------------------------------------------------------------- the data files


@pytest.mark.parametrize("engine", ENGINES)
def test_data_files_are_well_formed(engine: str):
    contract = load(engine)
    assert contract.entries
    assert contract.version


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"at": "module"}, "module:Name"),
        ({"at": "m:N", "field": []}, "unknown keys"),
        ({"at": "m:N", "fields": ["a", "a = 1"]}, "a is listed twice"),
    ],
)
def test_a_wrong_entry_is_refused(change: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        parse({"package": "p", "version": "1", "name": [change]})


def test_defaults_are_written_in_one_way():
    assert members(["a = 1<<2", 'b = "x"', "c = ...", "d", "e = {}"]) == {
        "a": "4", "b": "'x'", "c": "...", "d": None, "e": "{}",
    }  # fmt: skip


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore:::")  # of vLLM's and torch's own imports
def test_the_installed_vllm_is_as_listed(capsys: pytest.CaptureFixture[str]):
    if not os.environ.get("PDSERVE_REQUIRE_VLLM"):
        pytest.importorskip("vllm")
    status = main(["diff", "vllm"])
    assert status == 0, capsys.readouterr().out


def test_the_text_of_vllm_is_as_listed(capsys: pytest.CaptureFixture[str]):
    folders = sorted(Path(".venv-vllm/lib").glob("python3*/site-packages/vllm"))
    if not folders:
        pytest.skip("no vLLM: make vllm")
    assert main(["diff", "vllm", str(folders[0].parent)]) == 0, capsys.readouterr().out


def test_the_wheel_of_sglang_is_as_listed(capsys: pytest.CaptureFixture[str]):
    wheel = find_wheel("sglang", load("sglang").version)
    assert main(["diff", "sglang", str(wheel)]) == 0, capsys.readouterr().out


# ---------------------------------------------------------------- the command


def test_the_command_says_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    reader = Planted(tmp_path)
    reader.reader("folder", SOURCE.replace("seed: int = 0", "seed: int = 7")).exists("x:y")
    monkeypatch.setattr("tests.contracts.__main__.load", lambda engine: reader.contract())
    assert main(["diff", "sglang", str(tmp_path)]) == 1
    assert "seed was 0, is 7" in capsys.readouterr().out
    assert main(["show", "sglang", str(tmp_path), f"{reader.name}.core:Params"]) == 0
    assert '  "top_k = 1073741824",' in capsys.readouterr().out
    assert main(["diff", "sglang", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
    reader.close()
