"""Files that cannot be written are named before the work; columns line up; terminals are safe."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.cli.outputs import check_writable, columns, printable, write
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_folder_that_is_missing_is_named(tmp_path: Path):
    check_writable([tmp_path / "a.json"])
    with pytest.raises(ConfigError, match="there is no folder"):
        check_writable([tmp_path / "a.json", tmp_path / "nowhere" / "b.png"])
    with pytest.raises(ConfigError, match="it is a folder"):
        check_writable([tmp_path])


def test_what_cannot_be_written_says_why(tmp_path: Path):
    write(tmp_path / "a.json", "{}\n")
    assert (tmp_path / "a.json").read_text() == "{}\n"
    with pytest.raises(ConfigError, match=r"cannot be written: Is a directory"):
        write(tmp_path, "")


def test_columns():
    assert columns([("", "mean"), ("first token", "1.25")]) == [
        "             mean",
        "first token  1.25",
    ]


def test_a_models_words_cannot_steer_the_terminal():
    assert printable("a\x1b[2Jb\r\n\tc\x07\x9b1m") == "a[2Jb\n\tc1m"
    assert printable("a\u202eb\u2067c\u2069\ud800d") == "abcd"
    assert printable("e\u0301 \u200d \u200f") == "e\u0301 \u200d \u200f", "languages need these"
