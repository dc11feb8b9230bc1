"""Keys and screens of `pdserve top`."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from pdserve.cli.console.layout import Table, text_width
from pdserve.cli.console.overview import Overview
from pdserve.cli.console.viewer import View, Viewer

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADS = ("WORKER", "READY", "OUT/S", "ITL")
WORKERS = [
    ("worker-b", "yes", "9.5", "10.0 ms"),
    ("worker-a", "no", "1,200", "1.5 s"),
    ("worker-c", "yes", "-", "-"),
]


def viewer(*more: Table, rows: Sequence[tuple[str, ...]] | None = None) -> Viewer:
    found = Viewer()
    tables = [Table(HEADS, WORKERS if rows is None else rows, ("ITL",)), *more]
    found.view = View(Overview("cluster x", 10.0), tables)
    found.screen(80, 24)
    return found


def pressed(top: Viewer, *keys: str, size: tuple[int, int] = (80, 24)) -> list[str]:
    for key in keys:
        assert top.press(key)
        top.screen(*size)
    return [line.text for line in top.screen(*size)]


def selected(top: Viewer, size: tuple[int, int] = (80, 24)) -> str:
    (line,) = (line for line in top.screen(*size) if line.style == "selected")
    return line.text.split()[0]


def names(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines if line.startswith("worker-")]


@pytest.mark.parametrize("size", [(80, 24), (60, 15), (120, 40), (20, 5), (10, 2), (1, 1)])
def test_a_screen_has_just_its_size(size: tuple[int, int]) -> None:
    rows = [(f"worker-{number}", "yes", "1.0", "2.0 ms") for number in range(100)]
    top = viewer(rows=rows)
    top.view.notes = ["a long note " * 20]
    top.trouble = "gone " * 50
    for key in ("down", "end", "?", "?", "/", "w", "\r", "s"):
        top.press(key)
        lines = top.screen(*size)
        assert len(lines) == size[1]
        assert max(text_width(line.text) for line in lines) <= size[0]


def test_q_ends_and_other_keys_do_not() -> None:
    top = viewer()
    assert not top.press("q")
    assert all(top.press(key) for key in "xyz\x00é")


def test_every_row_can_be_reached_and_is_seen() -> None:
    rows = [(f"worker-{number}", "yes", "1.0", "-") for number in range(50)]
    other = Table(("MODEL", "WORKERS"), [(f"model-{number}", "1") for number in range(5)])
    for size in ((80, 24), (60, 15), (60, 8)):
        top = viewer(other, rows=rows)
        for number in range(50):
            pressed(top, "down", size=size)
            assert selected(top, size) == f"worker-{number}"
        assert pressed(top, "end", size=size)
        assert selected(top, size) == "model-4"
        pressed(top, "up", "home", size=size)
        assert selected(top, size) == "worker-0"
        pressed(top, "up", size=size)
        assert pressed(top, size=size)[0].startswith("cluster x")
        pressed(top, "pagedown", size=size)
        here = int(selected(top, size).partition("-")[2])
        pressed(top, "pagedown", "pageup", size=size)
        assert int(selected(top, size).partition("-")[2]) == here > 0


def test_the_selection_is_a_row_and_not_a_place() -> None:
    top = viewer()
    pressed(top, "down", "down")
    assert selected(top) == "worker-a"
    top.view = View(top.view.overview, [Table(HEADS, [WORKERS[1], WORKERS[0]])])
    assert selected(top) == "worker-a"
    top.view = View(top.view.overview, [Table(HEADS, [WORKERS[0]])])
    assert not [line for line in top.screen(80, 24) if line.style == "selected"]
    top.view = View(top.view.overview, [Table(HEADS, WORKERS)])
    assert selected(top) == "worker-a"


@pytest.mark.parametrize(
    ("keys", "order"),
    [
        ("s", "abc"),
        ("1", "abc"),
        ("11", "cba"),
        ("3", "abc"),
        ("33", "cba"),
        ("4", "abc"),
        ("ssss", "abc"),
        ("sssss", "bac"),
        ("9", "bac"),
    ],
)
def test_a_table_is_ordered_by_a_column(keys: str, order: str) -> None:
    lines = pressed(viewer(), *keys)
    assert names(lines) == [f"worker-{letter}" for letter in order]


def test_the_heading_says_how_it_is_ordered() -> None:
    assert any("OUT/Sv" in line for line in pressed(viewer(), "3"))
    assert any("OUT/S^" in line for line in pressed(viewer(), "3", "3"))


def test_sizes_ages_and_words_have_their_own_order() -> None:
    rows = [("a", "2h05m"), ("b", "9s"), ("c", "4d03h"), ("d", "x"), ("e", "")]
    top = viewer(rows=[])
    top.view.tables = [Table(("NODE", "AGE"), rows)]
    found = [line.split()[0] for line in pressed(top, "down", "2") if line[:1] in "abcde" and line]
    assert [name for name in found if len(name) == 1] == ["e", "b", "a", "c", "d"]


def test_a_filter_keeps_rows_with_a_text() -> None:
    top = viewer(Table(("MODEL", "ENGINE"), [("tiny", "torch")]))
    lines = pressed(top, "/", *"R-A")
    assert lines[-1].startswith("/R-A_")
    assert names(lines) == ["worker-a"]
    assert not any("MODEL" in line for line in lines)
    assert "'R-A'" in pressed(top, "\r")[-1]
    assert names(pressed(top, "\x1b")) == ["worker-b", "worker-a", "worker-c"]
    assert names(pressed(top, "/", *"yesq", "\x7f", "\r")) == ["worker-b", "worker-c"]
    assert names(pressed(top, "/", "x", "\x1b")) == ["worker-b", "worker-a", "worker-c"]


def test_help_comes_and_goes() -> None:
    top = viewer()
    assert any("rates over 10 s" in line for line in pressed(top, "?"))
    assert names(pressed(top, "j"))


def test_the_window_of_rates_is_chosen() -> None:
    top = viewer()
    pressed(top, "w")
    assert top.minute
    pressed(top, "w")
    assert not top.minute


def test_a_look_that_failed_is_said_above_the_last_one() -> None:
    top = viewer()
    top.trouble = "no node answers"
    lines = top.screen(80, 24)
    assert any("(no node answers; this is the last answer)" in line.text for line in lines)
    assert names([line.text for line in lines])


def test_errors_and_notes_cannot_steer_the_terminal() -> None:
    top = viewer()
    top.trouble = "turned away: \x1b]0;x\x07"
    top.view.notes = ["n\x1b[2J gets no requests: \u202ex\x9b"]
    text = "".join(line.text for line in top.screen(80, 24))
    assert "n[2J gets no requests: x" in text
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(text)


def test_any_keys_at_any_size_leave_it_whole(seed: int, long: bool) -> None:
    random_ = random.Random(seed)
    keys = [
        "up",
        "down",
        "pageup",
        "pagedown",
        "home",
        "end",
        "\x1b",
        "\r",
        "\x7f",
        *"/sw?123x9gGjk ",
    ]
    top = viewer()
    for _ in range(5000 if long else 300):
        if random_.random() < 0.1:
            count = random_.randrange(40)
            rows = [(f"worker-{random_.randrange(60)}", "yes", "1", "-") for _ in range(count)]
            top.view = View(
                Overview("x"),
                [Table(HEADS, rows), Table(("M", "N"), [row[:2] for row in rows[:3]])],
            )
        size = random_.randrange(1, 130), random_.randrange(1, 45)
        top.press(random_.choice(keys))
        lines = top.screen(*size)
        assert len(lines) == size[1]
        assert all(text_width(line.text) <= size[0] for line in lines)
