"""Records survive their agent, and a directory has one agent at a time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from pdserve.agent.records import RecordStore, WorkerRecord
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

RECORD = WorkerRecord(
    change="a.1", kind="gpu", mode="decode", slot=1, node="h-gpu-1", boot="b", kill_at=3.5
)


def test_a_record_is_replaced_as_a_whole(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "state")
    store.open()
    store.save(RECORD)
    store.save(replace(RECORD, pid=7))
    store.close()
    assert RecordStore(tmp_path / "state").load() == ([replace(RECORD, pid=7)], [])
    assert sorted(os.listdir(tmp_path / "state")) == ["a.1.json", "lock"]


def test_a_record_of_a_later_release_is_read(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    store.save(RECORD)
    path = tmp_path / "a.1.json"
    path.write_text(path.read_text().replace("{", '{"more": 1,', 1))
    assert store.load() == ([RECORD], [])


def test_forgetting_takes_logs_and_exit_status_along(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    store.save(RECORD)
    for path in (*store.logs("a.1"), store.exit_file("a.1")):
        path.write_text("x")
    store.forget("a.1")
    store.forget("a.1")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("left", "status"), [("7\n", 7), ("", None), ("x", None)])
def test_an_exit_status_is_read_if_there_is_one(
    tmp_path: Path, left: str, status: int | None
) -> None:
    store = RecordStore(tmp_path)
    assert store.exit_status("a.1") is None
    store.exit_file("a.1").write_text(left)
    assert store.exit_status("a.1") == status


def test_a_second_agent_is_told_of_the_first(tmp_path: Path) -> None:
    first, second = RecordStore(tmp_path), RecordStore(tmp_path)
    first.open()
    with pytest.raises(ConfigError, match=f"another agent, process {os.getpid()}"):
        second.open()
    first.close()
    first.close()
    second.open()
    second.close()


def test_the_name_is_kept(tmp_path: Path) -> None:
    name = RecordStore(tmp_path / "a/b").name("agent-host")
    assert name.startswith("agent-host-")
    assert RecordStore(tmp_path / "a/b").name("agent-other") == name
    assert RecordStore(tmp_path / "c").name("agent-host") != name


def test_a_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for use in (RecordStore.open, lambda store: store.name("x")):
        with pytest.raises(ConfigError, match=r"agent-dir: .*file"):
            use(RecordStore(tmp_path / "file"))
