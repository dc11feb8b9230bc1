"""Folders and sockets as a server and its commands use them."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import ConfigError
from pdserve.launch.cluster import admin_socket

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short path: a socket's is bounded, and pytest's own grows with its processes."""
    with tempfile.TemporaryDirectory(prefix="pdserve-") as folder:
        yield Path(folder)


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment whose folders are this test's own."""
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "fallback").mkdir()
    monkeypatch.setattr(admin_socket, "_FALLBACK", str(tmp_path / "fallback"))
    return {"XDG_RUNTIME_DIR": str(tmp_path / "run")}


@pytest.fixture
def listening(runtime: dict[str, str]) -> Iterator[socket.socket]:
    with admin_socket.listen(admin_socket.default_path(8000, runtime)) as one:
        yield one


def test_a_socket_is_for_its_user_alone(
    runtime: dict[str, str], listening: socket.socket, tmp_path: Path
) -> None:
    (found,) = admin_socket.find(runtime)
    assert found.path == tmp_path / "run/pdserve" / f"8000-{os.getpid()}.sock"
    assert (found.port, found.pid) == (8000, os.getpid())
    assert stat.S_IMODE(found.path.lstat().st_mode) == 0o600
    assert stat.S_IMODE(found.path.parent.lstat().st_mode) == 0o700
    assert os.listdir(found.path.parent) == [found.path.name]  # no temporary name is left


def test_servers_are_found_by_port_in_all_folders(
    runtime: dict[str, str], listening: socket.socket
) -> None:
    with (
        admin_socket.listen(admin_socket.default_path(80, {})),
        admin_socket.listen(admin_socket.default_path(9000, runtime)),
    ):
        assert [one.port for one in admin_socket.find(runtime)] == [8000, 9000]
        every = admin_socket.find(runtime, everywhere=True)
        assert [one.port for one in every] == [80, 8000, 9000]
        assert [one.port for one in admin_socket.find({})] == [80]


def test_a_server_that_was_started_again_is_found_by_its_port(
    runtime: dict[str, str], listening: socket.socket
) -> None:
    folder = admin_socket.default_path(1, runtime).parent
    (now,) = admin_socket.find(runtime)
    before = folder / "8000-1.sock"
    assert admin_socket.successor(before, runtime) == now.path
    assert admin_socket.successor(folder / "8001-1.sock", runtime) == folder / "8001-1.sock"
    assert admin_socket.successor(folder / "mine", runtime) == folder / "mine"
    with admin_socket.listen(folder / "8000-2.sock"):
        assert admin_socket.successor(before, runtime) == before, "there are two"


def test_a_socket_without_a_server_is_removed(runtime: dict[str, str]) -> None:
    path = admin_socket.default_path(8000, runtime)
    admin_socket.listen(path).close()
    assert path.exists()
    assert admin_socket.find(runtime) == []
    assert not path.exists()


def test_a_busy_server_counts_as_one(runtime: dict[str, str], listening: socket.socket) -> None:
    (found,) = admin_socket.find(runtime)
    waiting = []
    try:
        while True:  # until its queue is full, as with a process that is stopped
            one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            waiting.append(one)
            one.setblocking(False)
            one.connect(str(found.path))
    except BlockingIOError:
        assert [one.port for one in admin_socket.find(runtime)] == [8000]
        assert found.path.exists()
    finally:
        for one in waiting:
            one.close()


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o707])
def test_a_folder_that_others_can_enter_is_not_used(runtime: dict[str, str], mode: int) -> None:
    path = admin_socket.default_path(8000, runtime)
    with admin_socket.listen(path):
        path.parent.chmod(mode)
        assert admin_socket.find(runtime) == []
        with pytest.raises(ConfigError, match="nobody else can enter"):
            admin_socket.default_path(8000, runtime)


def test_a_link_in_place_of_the_folder_is_not_followed(
    runtime: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "run/pdserve").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="nobody else can enter"):
        admin_socket.default_path(8000, runtime)
    with admin_socket.listen(tmp_path / "elsewhere/8000-1.sock"):
        assert admin_socket.find(runtime) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_not_used(runtime: dict[str, str]) -> None:
    folder = admin_socket.default_path(8000, runtime).parent
    os.chown(folder, 12345, -1)
    with pytest.raises(ConfigError, match="nobody else can enter"):
        admin_socket.default_path(8000, runtime)


@pytest.mark.parametrize("named", ["", "relative", "/no/such/folder"])
def test_without_a_runtime_directory_it_is_below_tmp(
    runtime: dict[str, str], tmp_path: Path, named: str
) -> None:
    folder = tmp_path / "fallback" / f"pdserve-{os.geteuid()}"
    assert admin_socket.default_path(1, {"XDG_RUNTIME_DIR": named}).parent == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_runtime_directory_too_long_for_a_socket_is_not_used(
    runtime: dict[str, str], tmp_path: Path
) -> None:
    long = tmp_path / "run" / ("x" * 100)
    long.mkdir(mode=0o700)
    environ = {"XDG_RUNTIME_DIR": str(long)}
    with admin_socket.listen(admin_socket.default_path(8000, environ)):
        (found,) = admin_socket.find(environ)
    assert found.path.parent == tmp_path / "fallback" / f"pdserve-{os.geteuid()}"


def test_what_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="exists and is no socket"):
        admin_socket.listen(path)
    assert path.read_text() == "mine"


def test_a_path_in_use_is_refused_and_one_without_a_server_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with admin_socket.listen(path), pytest.raises(ConfigError, match="another server listens"):
        admin_socket.listen(path)
    admin_socket.listen(path).close()


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long for a socket"):
        admin_socket.listen(tmp_path / ("x" * 100))


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no/s: No such file"):
        admin_socket.listen(tmp_path / "no/s")


def test_only_the_own_socket_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with admin_socket.listen(path):
        own = path.lstat().st_ino
        admin_socket.remove(path, own + 1)
        assert path.exists()
        admin_socket.remove(path, own)
        assert not path.exists()
        admin_socket.remove(path, own)
