"""Hash secrets that outlive the processes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdserve.blocks.hashing import hash_secret_id
from pdserve.kv.tiers.disk.directory import take_directory
from pdserve.kv.tiers.disk.secret_file import keep_secret, stored_secrets
from tests.support.disk_tiers import FINGERPRINT

if TYPE_CHECKING:
    from pathlib import Path

FIRST, SECOND = b"1" * 32, b"2" * 32
DAY = 86_400.0


def secrets(root: Path, content: str = "") -> list[tuple[bytes, int]]:
    return [(stored.secret, stored.birth) for stored in stored_secrets(root, content)]


def write_under(root: Path, secret: bytes, content: str = "model") -> None:
    """Make a subdirectory that was written under a secret."""
    of = replace(FINGERPRINT, content=content, secret_id=hash_secret_id(secret))
    take_directory(root, "a", of, 1.0).unlock()


def test_the_one_in_use_last_comes_first(tmp_path: Path):
    keep_secret(tmp_path, FIRST, 500, 10.0)
    keep_secret(tmp_path, SECOND, 400, 20.0)
    assert secrets(tmp_path) == [(SECOND, 400), (FIRST, 500)]
    keep_secret(tmp_path, FIRST, 1, 30.0)
    assert secrets(tmp_path) == [(FIRST, 1), (SECOND, 400)]


def test_only_its_owner_can_read_it(tmp_path: Path):
    keep_secret(tmp_path / "new", FIRST, 500, 10.0)
    (stored,) = stored_secrets(tmp_path / "new")
    assert stored.path.stat().st_mode & 0o777 == 0o600
    assert stored.path.parent.stat().st_mode & 0o777 == 0o700
    assert FIRST.hex() not in stored.path.name
    stored.path.chmod(0o640)
    assert stored_secrets(tmp_path / "new") == []


def test_a_model_s_secrets_are_those_of_its_subdirectories(tmp_path: Path):
    keep_secret(tmp_path, FIRST, 500, 10.0)
    keep_secret(tmp_path, SECOND, 400, 20.0)
    write_under(tmp_path, FIRST)
    write_under(tmp_path, SECOND, "another model")
    assert secrets(tmp_path, "model") == [(FIRST, 500)]
    assert secrets(tmp_path, "another model") == [(SECOND, 400)]
    assert secrets(tmp_path, "a third") == []


def test_a_secret_that_nothing_was_written_under_goes_after_a_day(tmp_path: Path):
    keep_secret(tmp_path, FIRST, 500, 0.0)
    keep_secret(tmp_path, SECOND, 500, 0.0)
    write_under(tmp_path, SECOND)
    third = b"3" * 32
    keep_secret(tmp_path, third, 500, DAY)
    assert len(secrets(tmp_path)) == 3
    keep_secret(tmp_path, third, 500, DAY + 1)
    assert {secret for secret, _ in secrets(tmp_path)} == {SECOND, third}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 100,
        b"{}",
        b'{"format":1,"secret":"zz","birth":2,"kept":1}',
        b'{"format":1,"secret":"","birth":2,"kept":1}',
        b'{"format":2,"secret":"' + FIRST.hex().encode() + b'","birth":2,"kept":1}',
        b'{"format":1,"secret":"' + SECOND.hex().encode() + b'","birth":2,"kept":1}',
    ],
)
def test_other_contents_are_no_secret(tmp_path: Path, content: bytes):
    keep_secret(tmp_path, FIRST, 500, 0.0)
    (stored,) = stored_secrets(tmp_path)
    stored.path.write_bytes(content)
    assert stored_secrets(tmp_path) == []


def test_there_need_be_no_directory(tmp_path: Path):
    assert stored_secrets(tmp_path / "absent") == []
