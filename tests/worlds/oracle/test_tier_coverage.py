"""Cells of tiers that worlds do not visit are visited by the tests that are named for them."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tests.worlds.oracle.coverage import Cells, count_visits
from tests.worlds.oracle.tier_coverage import TIER_SHOWN_BY

if TYPE_CHECKING:
    from pathlib import Path


def run_test(name: str, tmp_path: Path) -> None:
    """Run a test as `FILE::FUNCTION[ARGUMENT]` says."""
    file, _, function = name.partition("::")
    function, _, argument = function.rstrip("]").partition("[")
    module = importlib.import_module("tests." + file.removesuffix(".py").replace("/", "."))
    test = getattr(module, function)
    given: dict[str, Any] = {
        parameter: tmp_path if parameter == "tmp_path" else _value(argument)
        for parameter in inspect.signature(test).parameters
    }
    test(**given)


def _value(argument: str) -> int | str:
    return int(argument) if argument.isdecimal() else argument


@pytest.mark.parametrize("name", TIER_SHOWN_BY)
def test_the_test_that_is_named_visits_the_cells(name: str, tmp_path: Path) -> None:
    cells: Cells = Counter()
    with count_visits(cells):
        run_test(name, tmp_path)
    assert set(TIER_SHOWN_BY[name]) <= cells.keys()
