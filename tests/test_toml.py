"""Tables of files become records; errors name what was meant."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.errors import ConfigError
from pdserve.toml import nearest, read_table, read_toml


class Settings(msgspec.Struct, kw_only=True):
    directory: str
    slots: int = 1
    flags: tuple[str, ...] = ()


def read(text: str) -> Settings:
    return read_table(read_toml(text.encode(), "a.toml"), Settings, "a.toml: [actuator]")


def test_a_table_is_a_record() -> None:
    found = read('directory = "/a"\nflags = ["--time=1", "-v"]')
    assert (found.directory, found.slots, found.flags) == ("/a", 1, ("--time=1", "-v"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"a\.toml: \[actuator\]: Object missing required field `directory`"),
        ('directory = "a"\nslot = 2', "'slot' is unknown; did you mean 'slots'?"),
        ('directory = "a"\nzzz = 2', "'zzz' is unknown; known: directory, slots, flags"),
        ('directory = "a"\nslots = "2"', r"Expected `int`, got `str` - at `\$.slots`"),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(text)


def test_only_a_table_is_a_table() -> None:
    with pytest.raises(ConfigError, match="must be a table"):
        read_table(3, Settings, "a.toml")


def test_the_nearest_name_or_all() -> None:
    assert nearest("gpv", ["gpu", "cpu"]) == "did you mean 'gpu'?"
    assert nearest("x", ["gpu", "cpu"]) == "known: gpu, cpu"
