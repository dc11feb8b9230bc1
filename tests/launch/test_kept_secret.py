"""The hash secret beside a disk tier: written in a thread, offered at the next start."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import TYPE_CHECKING

from pdserve.kv.tiers.disk.secret_file import stored_secrets
from pdserve.launch import kept_secret
from pdserve.launch.kept_secret import SecretKeeper

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def opened(root: Path) -> SecretKeeper:
    """A keeper whose tier is open."""
    keeper = SecretKeeper(root, time.time)
    keeper.opened()
    return keeper


def join_writer() -> None:
    for thread in threading.enumerate():
        if thread.name == "pdserve-secret":
            thread.join()


def test_what_was_kept_last_is_offered(tmp_path: Path) -> None:
    keeper = opened(tmp_path / "tier")
    assert keeper.kept() is None
    keeper.keep(b"1" * 32, 500)
    keeper.keep(b"2" * 32, 1)
    join_writer()
    assert SecretKeeper(tmp_path / "tier", time.time).kept() == (b"2" * 32, 1)
    keeper.keep(b"1" * 32, 500)
    join_writer()
    assert keeper.kept() == (b"1" * 32, 500)
    assert len(stored_secrets(tmp_path / "tier")) == 2


def test_nothing_is_written_before_the_tier_is_open(tmp_path: Path) -> None:
    """A start that fails leaves nothing behind."""
    keeper = SecretKeeper(tmp_path / "tier", time.time)
    keeper.keep(b"1" * 32, 500)
    join_writer()
    assert not (tmp_path / "tier").exists()
    keeper.opened()
    join_writer()
    assert keeper.kept() == (b"1" * 32, 500)


def test_a_slow_disk_delays_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one secret is being written, others are noted, and only the last of them is written."""
    hung, written = threading.Event(), []

    def slow(root: Path, secret: bytes, birth: int, wall: float) -> None:
        hung.wait(10.0)
        written.append(birth)

    monkeypatch.setattr(kept_secret, "keep_secret", slow)
    keeper = opened(tmp_path)
    for birth in range(2, 7):
        keeper.keep(b"1" * 32, birth)
    assert sum(thread.name == "pdserve-secret" for thread in threading.enumerate()) == 1
    hung.set()
    join_writer()
    assert written[-1] == 6
    assert len(written) <= 2


def test_a_disk_that_fails_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    opened(tmp_path / "file").keep(b"1" * 32, 2)
    join_writer()
    assert "cannot be kept" in caplog.text


def test_a_secret_that_is_there_already_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk is full when its worker comes back."""
    keeper = opened(tmp_path)
    keeper.keep(b"1" * 32, 2)
    join_writer()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(kept_secret, "keep_secret", full)
    keeper.keep(b"1" * 32, 2)
    join_writer()
    assert not caplog.records
    keeper.keep(b"2" * 32, 2)
    join_writer()
    assert "cannot be kept" in caplog.text
