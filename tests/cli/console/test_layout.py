"""Tables in a width."""

from __future__ import annotations

import pytest

from pdserve.cli.console.layout import Table, cut, laid_out, lines_of, text_width

TABLE = Table(
    ("NODE", "ROLE", "HOST", "EMPTY", "NOTE"),
    [("router-1", "router", "a-host", "", "all is well"), ("w", "worker", "b", "", "-")],
    ("HOST", "ROLE"),
    "NOTE",
)


def test_columns_are_aligned_and_empty_ones_left_out() -> None:
    assert lines_of(TABLE, 100) == [
        "NODE      ROLE    HOST    NOTE",
        "router-1  router  a-host  all is well",
        "w         worker  b       -",
    ]
    assert lines_of(Table(("A",), []), 100) == []


def test_a_long_text_goes_below_before_a_column_is_left_out() -> None:
    assert lines_of(TABLE, 30) == [
        "NODE      ROLE    HOST",
        "router-1  router  a-host",
        "    all is well",
        "w         worker  b",
    ]


@pytest.mark.parametrize(
    ("width", "columns"), [(21, ("NODE", "ROLE", "HOST")), (20, ("NODE", "ROLE")), (9, ("NODE",))]
)
def test_the_least_important_columns_are_left_out(width: int, columns: tuple[str, ...]) -> None:
    wide = Table(
        TABLE.heads, [("router", "router", "ahost", "", "x" * 99)], ("HOST", "ROLE"), "NOTE"
    )
    assert laid_out(wide, width).columns == columns


@pytest.mark.parametrize("width", [1, 2, 5, 10, 20, 40, 79, 80])
def test_no_line_is_longer_than_the_width(width: int) -> None:
    rows = [(f"decode-vm-{'x' * number}", "名前" * number, "y" * 40) for number in range(20)]
    for line in lines_of(Table(("NAME", "模型", "LAST"), rows), width):
        assert text_width(line) <= width


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("short", 5, "short"),
        ("decode-host-1234", 10, "decod…1234"),
        ("a sentence of words", 10, "a sentenc…"),
        ("abc", 1, "…"),
        ("abc", 0, ""),
    ],
)
def test_names_are_cut_in_the_middle(text: str, width: int, shown: str) -> None:
    assert cut(text, width) == shown


def test_control_characters_are_left_out() -> None:
    assert lines_of(Table(("A",), [("x\x1b[2J\ny",)]), 20) == ["A", "x[2J y"]
