"""A worker that an agent has started leaves its exit status, unless it is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pdserve.launch import exit_codes, worker_main

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def test_a_wrong_flag_ends_it_with_a_status_and_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c1.exit"
    assert worker_main.main([str(file), "--role=worker", "--prot=80"]) == exit_codes.USAGE
    assert file.read_text() == f"{exit_codes.USAGE}\n"
    assert "--prot" in capsys.readouterr().err


@pytest.mark.parametrize("status", [exit_codes.OK, exit_codes.ENGINE_FAILED])
def test_the_flags_are_pdserves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    seen: list[Sequence[str]] = []

    def pdserve(flags: Sequence[str]) -> int:
        seen.append(flags)
        return status

    monkeypatch.setattr(worker_main, "pdserve", pdserve)
    file = tmp_path / "c1.exit"
    assert worker_main.main([str(file), "--role=worker", "--change=c1"]) == status
    assert seen == [["--role=worker", "--change=c1"]]
    assert file.read_text() == f"{status}\n"


def test_a_defect_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pdserve(flags: Sequence[str]) -> int:
        raise ValueError("broken on purpose")

    monkeypatch.setattr(worker_main, "pdserve", pdserve)
    file = tmp_path / "c1.exit"
    with pytest.raises(ValueError, match="on purpose"):
        worker_main.main([str(file)])
    assert file.read_text() == f"{exit_codes.FAILED}\n"


def test_a_file_that_cannot_be_written_changes_no_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_main, "pdserve", lambda flags: exit_codes.OK)
    assert worker_main.main([str(tmp_path / "nowhere/c1.exit")]) == exit_codes.OK


def test_one_that_is_killed_leaves_none(tmp_path: Path) -> None:
    file = tmp_path / "c1.exit"
    command = (sys.executable, "-m", "pdserve.launch.worker_main", str(file), "--role=router")
    listen = ("--listen=127.0.0.1:0", "--config=none")
    process = subprocess.Popen((*command, *listen), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process, process.stderr:
        assert process.stderr.readline(), "it says something as soon as it runs"
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert not file.exists()
