"""Keys in pieces, and frames that draw only what has changed."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from pdserve.cli.console.terminal import KeyReader, Painter, Terminal
from pdserve.cli.console.viewer import ScreenLine
from tests.support.screen import Screen


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        (b"", []),
        (b"jj", ["j", "j"]),
        (b"\x1b[B\x1b[B\x1bOAq", ["down", "down", "up", "q"]),
        (b"\x1b[6~G\n", ["pagedown", "G", "\n"]),
        (b"\x1b[1;5Bk", ["\x1b[1;5B", "k"]),
        (b"\x1b[H\x1b[4~", ["home", "end"]),
        ("é名".encode(), ["é", "名"]),
        (b"\xff", ["\ufffd"]),
    ],
)
def test_a_read_brings_several_keys_or_a_part_of_one(typed: bytes, keys: list[str]) -> None:
    assert KeyReader().keys(typed) == keys
    reader = KeyReader()
    pieces = [key for byte in typed for key in reader.keys(bytes([byte]))]
    assert pieces == keys


def test_escape_is_a_key_if_nothing_follows() -> None:
    reader = KeyReader()
    assert reader.keys(b"a\x1b") == ["a"]
    assert reader.unfinished
    assert reader.keys(b"", last=True) == ["\x1b"]
    assert not reader.unfinished
    assert reader.keys(b"\x1b\x1b[A") == ["\x1b", "up"]


def screens(number: int) -> list[ScreenLine]:
    texts = ["title", "", f"number {number}", "名前", "bottom"]
    return [ScreenLine(text, "head" if text == "title" else "") for text in texts]


def test_only_changed_lines_are_drawn() -> None:
    painter = Painter.of({"TERM": "xterm"})
    first = painter.paint(screens(1), (20, 5))
    assert "title" in first
    assert painter.paint(screens(1), (20, 5)) == ""
    second = painter.paint(screens(2), (20, 5))
    assert second == "\x1b[3;1H\x1b[0m\x1b[2Knumber 2"
    assert "title" in painter.paint(screens(2), (30, 5)), "another size draws all"
    painter.forget()
    assert "title" in painter.paint(screens(2), (30, 5))


def test_what_is_drawn_is_what_is_seen(seed: int) -> None:
    random_ = random.Random(seed)
    painter, screen = Painter.of({"TERM": "xterm"}), Screen(30, 6)
    for _ in range(50):
        lines = [ScreenLine("x" * random_.randrange(30), "selected") for _ in range(6)]
        data = painter.paint(lines, (30, 6)).encode()
        while data:
            size = random_.randrange(1, 9)
            screen.feed(data[:size])
            data = data[size:]
        assert screen.text == [line.text for line in lines]


@pytest.mark.parametrize(
    ("environ", "coloured", "styled"),
    [
        ({"TERM": "xterm-256color"}, True, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False, True),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, True),
        ({"TERM": "vt100"}, False, True),
        ({"TERM": "dumb"}, False, False),
        ({}, False, False),
    ],
)
def test_colours_are_for_terminals_that_have_them(
    environ: dict[str, str], coloured: bool, styled: bool
) -> None:
    screen = Screen(20, 5)
    screen.feed(Painter.of(environ).paint(screens(1), (20, 5)).encode())
    used = screen.styles - {"0"}
    assert bool(used) == styled
    assert any("3" in style for style in used) == coloured


@pytest.mark.parametrize(("term", "shows"), [("dumb", False), ("xterm", True), (None, True)])
def test_a_dumb_terminal_gets_lines_only(
    monkeypatch: pytest.MonkeyPatch, term: str | None, shows: bool
) -> None:
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True))
    assert Terminal({} if term is None else {"TERM": term}).shows is shows
