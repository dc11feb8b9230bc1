"""A format is found by name, as an entry point or as `module:attribute`; errors name the remedy."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.text import format_loader
from pdserve.text.reasoning_parsers import ALIASES as REASONING_ALIASES
from pdserve.text.reasoning_parsers import REASONING_PARSERS, reasoning_format
from pdserve.text.tool_parsers import TOOL_PARSERS, tool_format
from pdserve.worker.config import WorkerConfig


class Whole:
    """A format with the parts that the tests ask for."""

    start = "<a>"
    end = "</a>"


class Picky:
    start = end = ""

    def __init__(self, needed: int) -> None:
        self.needed = needed


def load(name: str) -> object:
    built_in = {"known": f"{__name__}:Whole"}
    return format_loader.load_format("x-parser", name, built_in, "pdserve.x", ("start", "end"))


def test_a_name_or_a_place_gives_an_instance() -> None:
    assert isinstance(load("known"), Whole)
    assert isinstance(load(f"{__name__}:Whole"), Whole)


def test_an_entry_point_of_another_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("theirs", f"{__name__}:Whole", "pdserve.x")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point])
    assert isinstance(load("theirs"), Whole)
    with pytest.raises(ConfigError, match="did you mean 'theirs'"):
        load("their")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("knwon", "is unknown; did you mean 'known'.*or module:attribute"),
        ("no_such_module_here:X", "cannot be imported"),
        (":X", "'' names no module"),
        (".text:X", "'.text' names no module"),
        (f"{__name__}:Nothing", "has no 'Nothing'"),
        (f"{__name__}:Picky", "must be made without arguments"),
        ("json:dumps", "lacks start, end"),
    ],
)
def test_what_cannot_be_loaded_is_told(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(name)


def test_all_formats_that_are_sent_can_be_loaded() -> None:
    for name in TOOL_PARSERS:
        tool_format(name)
    for name in REASONING_PARSERS:
        reasoning_format(name)


def test_the_page_names_every_format() -> None:
    page = (Path(__file__).parents[2] / "docs/tools.md").read_text()
    names = {*TOOL_PARSERS, *REASONING_PARSERS} - set(REASONING_ALIASES)
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_a_worker_is_not_started_with_a_format_that_is_not_there() -> None:
    with pytest.raises(
        ConfigError, match="tool-parser 'hermess' is unknown; did you mean 'hermes'"
    ):
        WorkerConfig(tool_parser="hermess").validate()
    with pytest.raises(ConfigError, match="reasoning-parser 'thinks' is unknown"):
        WorkerConfig(reasoning_parser="thinks").validate()
