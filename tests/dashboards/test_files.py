"""Files are overwritten only if nobody has edited them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from pdserve.dashboards.files import MARK, sealed, untouched, write_all
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

TEXT = sealed(f"# {MARK}\nvalue: 1\n")


def test_a_sealed_text_is_untouched_until_it_changes() -> None:
    assert untouched(TEXT)
    assert not untouched(TEXT + "\n")
    assert not untouched(TEXT.replace("value: 1", "value: 2"))
    assert not untouched("value: 1\n")


def test_a_text_without_the_mark_cannot_be_sealed() -> None:
    with pytest.raises(ValueError, match="needs the mark"):
        sealed("value: 1")


def test_own_files_are_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "rules.yml"
    write_all({path: TEXT})
    newer = sealed(f"# {MARK}\nvalue: 2\n")
    write_all({path: newer})
    assert path.read_text() == newer
    assert [one.name for one in path.parent.iterdir()] == ["rules.yml"]


@pytest.mark.parametrize("content", [b"", b"mine: 1\n", b"\xff\xfe", TEXT.encode() + b"# mine\n"])
def test_other_files_stay_and_nothing_is_written(tmp_path: Path, content: bytes) -> None:
    foreign, own = tmp_path / "foreign.yml", tmp_path / "own.yml"
    foreign.write_bytes(content)
    with pytest.raises(ConfigError, match=r"foreign\.yml was edited or is not from .*--out"):
        write_all({own: TEXT, foreign: TEXT})
    assert foreign.read_bytes() == content
    assert not own.exists()


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written: "):
        write_all({tmp_path / "file" / "rules.yml": TEXT})


def test_a_link_that_was_put_in_the_way_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".rules.yml.new").symlink_to(victim)
    write_all({tmp_path / "rules.yml": sealed(f"# {MARK}")})
    assert victim.read_text() == "precious"
    assert untouched((tmp_path / "rules.yml").read_text())


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rules.yml")
    with pytest.raises(ConfigError, match="it is no file"):
        write_all({tmp_path / "rules.yml": sealed(f"# {MARK}")})
