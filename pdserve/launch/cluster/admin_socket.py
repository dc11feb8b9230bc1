"""Places and finds the admin sockets of the servers of one user on one machine.

Each server that has no cluster listens at a Unix socket of its own, named by its HTTP port and its
PID, in a folder that only its user can enter: below XDG_RUNTIME_DIR, else `/tmp/pdserve-UID`. A
socket appears under its name only when it listens, so one that refuses connections belongs to a
server that has ended, and is removed. It knows nothing of what is said over a socket.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pdserve.ids import Seconds

__all__ = ["AdminSocket", "default_path", "find", "folders", "listen", "remove", "successor"]

_FALLBACK: Final = "/tmp"
"""Not TMPDIR: it may differ between the server and the command that looks for it."""
_NAME: Final = re.compile(r"([0-9]{1,5})-([0-9]{1,10})\.sock")
_LONGEST: Final = 100
"""Bytes of a path. Linux takes 107; a temporary name is a little longer than the final one."""
_BACKLOG: Final = 16
_PATIENCE: Final[Seconds] = 0.5
"""A socket that takes longer to answer belongs to a server that is busy or stopped."""
_MOST: Final = 256
"""Most sockets of one folder that are looked at."""


@dataclass(frozen=True, slots=True, order=True)
class AdminSocket:
    """The socket of a running server."""

    port: int
    """Its HTTP port."""
    pid: int
    path: Path


def folders(environ: Mapping[str, str]) -> list[Path]:
    """Folders of sockets, the preferred one first. One whose path is too long has no sockets."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    longest = os.path.join(runtime, "pdserve", "65535-4194304.sock")
    fits = os.path.isabs(runtime) and len(os.fsencode(longest)) <= _LONGEST
    named = [Path(runtime) / "pdserve"] if fits else []
    return [*named, Path(_FALLBACK) / f"pdserve-{os.geteuid()}"]


def default_path(port: int, environ: Mapping[str, str]) -> Path:
    """The path for this process's socket, in a folder that now exists. Errors: `ConfigError`."""
    first, *others = folders(environ)
    # A service, or `su`, may name a runtime directory that does not exist.
    folder = others[0] if others and not _is_private(first.parent) else first
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}") from None
    if not _is_private(folder):
        raise ConfigError(f"{folder} is not a folder of this user's that nobody else can enter")
    return folder / f"{port}-{os.getpid()}.sock"


def _is_private(folder: Path) -> bool:
    """True for a real folder of this user's, closed to others. A symbolic link is none: whoever
    made it could change it."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    closed = stat.S_IMODE(status.st_mode) & 0o077 == 0
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and closed


def find(environ: Mapping[str, str], *, everywhere: bool = False) -> list[AdminSocket]:
    """The sockets of this user's running servers, by port: those of the first folder that has any,
    or of all folders. Sockets of ended servers are removed."""
    found: list[AdminSocket] = []
    for folder in dict.fromkeys(folders(environ)):
        if everywhere or not found:
            found += [one for one in _sockets(folder) if _answers(one.path)]
    return sorted(found)


def successor(path: Path, environ: Mapping[str, str]) -> Path:
    """The socket of the server that has taken the place of the one at `path`: the only one with its
    port. `path` itself if there is none."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return path
    found = [one for one in find(environ, everywhere=True) if one.port == int(match[1])]
    return found[0].path if len(found) == 1 else path


def _sockets(folder: Path) -> Iterator[AdminSocket]:
    if not _is_private(folder):
        return
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(folder))[:_MOST]:
            match = _NAME.fullmatch(name)
            if match is not None:
                yield AdminSocket(int(match[1]), int(match[2]), folder / name)


def _answers(path: Path) -> bool:
    """True if a server listens at the socket; removes a socket at which none does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
        visitor.settimeout(_PATIENCE)
        try:
            visitor.connect(str(path))
        except ConnectionRefusedError:
            with contextlib.suppress(OSError):
                path.unlink()
            return False
        except (BlockingIOError, TimeoutError):
            # The queue of connections is full: a server is there, and stopped or very busy.
            return True
        except OSError:
            return False
    return True


def listen(path: Path) -> socket.socket:
    """A socket that listens at `path`, for its owner only. Errors: `ConfigError`, also if another
    server listens there or the path is something else than a socket."""
    if len(os.fsencode(path)) > _LONGEST:
        raise ConfigError(f"{path} is too long for a socket: {_LONGEST} bytes at most")
    _check_free(path)
    temporary = path.with_name(f".{secrets.token_hex(3)}")
    try:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    try:
        listening.setblocking(False)
        listening.bind(str(temporary))
        os.chmod(temporary, 0o600)
        listening.listen(_BACKLOG)
        os.rename(temporary, path)
    except OSError as error:
        listening.close()
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ConfigError(f"{path}: {error.strerror}") from None
    return listening


def _check_free(path: Path) -> None:
    try:
        status = path.lstat()
    except OSError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigError(f"{path} exists and is no socket")
    if _answers(path):
        raise ConfigError(f"another server listens at {path}")


def remove(path: Path, inode: int) -> None:
    """Removes a socket if it is still the one with this inode."""
    with contextlib.suppress(OSError):
        if path.lstat().st_ino == inode:
            path.unlink()
