"""Classes of errors are found by their names, and nothing else is."""

from __future__ import annotations

import pytest

from pdserve.errors import EngineDied, NoActor, PdserveError, error_class


@pytest.mark.parametrize("kind", [PdserveError, EngineDied, NoActor])
def test_a_class_is_found_by_its_name(kind: type[PdserveError]) -> None:
    assert error_class(kind.__name__) is kind


@pytest.mark.parametrize(
    "name", ["", "Invented", "Exception", "ClassVar", "NamedTuple", "error_class", "__name__"]
)
def test_other_names_have_no_class(name: str) -> None:
    assert error_class(name) is None
