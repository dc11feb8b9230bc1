"""Reads cluster key files, creates the default one, and checks who may read them.

A key file holds one or two keys, one per line in hexadecimal; empty lines and `#` comments are
skipped. A node proves itself with the first key and accepts both. To replace a key, give every node
old and new, then new and old, then new alone.

Every node has a key, on loopback too: without `--cluster-key-file` it is in the user's own file,
created at first use. Beyond loopback a key file must be given, because nodes on other machines need
the same key. It knows nothing of handshakes.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdserve.errors import ConfigError
from pdserve.net.address import is_loopback, split
from pdserve.wire.handshake import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = [
    "KeyFile",
    "cluster_key_file",
    "default_key_path",
    "make_key_file",
    "read_hash_secret",
    "read_keys",
]

_LARGEST: Final = 4096
_MODE: Final = 0o600
_LONGEST_SECRET: Final = 64
"""Most bytes that BLAKE2b takes as a key."""
_DIGITS: Final = f"{2 * KEY_BYTES} to {2 * _LONGEST_SECRET} hexadecimal digits"


def default_key_path(environ: Mapping[str, str]) -> Path:
    """Path of the user's own key file."""
    home = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/")) / ".config"
    return Path(home) / "pdserve" / "cluster.key"


def cluster_key_file(
    given: Path | None, addresses: Iterable[str], environ: Mapping[str, str]
) -> KeyFile:
    """The key file to use: the given one, else the user's own, created if it does not exist.

    `addresses` are those the node listens on, advertises and joins. Raises `ConfigError` if one of
    them is beyond loopback and no file was given, or if the file is not usable.
    """
    if given is not None:
        return KeyFile(given)
    for address in addresses:
        if not is_loopback(split(address)[0]):
            raise ConfigError(
                f"{address} is beyond this machine: give every node the same key by "
                "--cluster-key-file; the default one is for loopback only"
            )
    path = default_key_path(environ)
    if not path.exists():
        make_key_file(path)
    return KeyFile(path)


def make_key_file(path: Path) -> None:
    """Writes a new key to `path`, readable by its owner alone; an existing file stays.

    If several processes do this at once, one wins and all read its key: the file appears complete
    or not at all. Raises `ConfigError`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{secrets.token_hex(KEY_BYTES)}\n")
            os.link(temporary, path)
        except FileExistsError:
            pass  # another process created it
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"no cluster key can be made at {path}: {error.strerror}; give a file that has one, "
            "with --cluster-key-file"
        ) from None


def read_keys(path: Path, what: str = "cluster key file", most: int = 2) -> tuple[bytes, ...]:
    """The keys in a file, one to `most`; the first is the one to prove with. Raises `ConfigError`
    with the remedy.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            _check_access(path, status, what)
            text = file.read(_LARGEST + 1)
    except OSError as error:
        raise ConfigError(f"the {what} {path} cannot be read: {error.strerror}") from None
    return _parse(path, text, what, most)


def read_hash_secret(path: Path) -> bytes:
    """The key in a file of the same format, for block hashes. Raises `ConfigError`."""
    keys = read_keys(path, "hash secret file", most=1)
    if len(keys[0]) > _LONGEST_SECRET:
        raise ConfigError(f"the hash secret file {path} must hold one line of {_DIGITS}")
    return keys[0]


def _check_access(path: Path, status: os.stat_result, what: str) -> None:
    """Raises unless the file is a regular file that only its owner can read."""
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"the {what} {path} is not a regular file")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(
            f"the {what} {path} has mode {mode:04o}: others can get at the key; "
            f"do `chmod 600 {path}`"
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"the {what} {path} belongs to another user")


def _parse(path: Path, text: bytes, what: str, most: int) -> tuple[bytes, ...]:
    lines = [line.partition(b"#")[0].strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    if len(text) > _LARGEST or not 1 <= len(lines) <= most:
        wanted = "one key or two, one per line" if most > 1 else f"one line of {_DIGITS}"
        raise ConfigError(f"the {what} {path} must hold {wanted}")
    keys = []
    for number, line in enumerate(lines, 1):
        try:
            key = bytes.fromhex(line.decode("ascii"))
        except ValueError:
            raise ConfigError(f"key {number} in {path} is not hexadecimal") from None
        if len(key) < KEY_BYTES:
            wanted = f"{KEY_BYTES} ({2 * KEY_BYTES} hexadecimal digits)"
            raise ConfigError(f"key {number} in {path} has {len(key)} bytes, not {wanted}")
        keys.append(key)
    return tuple(keys)


class KeyFile:
    """The keys of a file, read again on demand, so that a rotation needs no restart."""

    def __init__(self, path: Path) -> None:
        """Reads the file. Raises `ConfigError`."""
        self.path = path
        self._keys = read_keys(path)
        self._listeners: list[Callable[[], None]] = []

    def keys(self) -> tuple[bytes, ...]:
        """The keys that handshakes use from now on."""
        return self._keys

    def reload(self) -> bool:
        """Reads the file again; True if its keys changed. Raises `ConfigError` and keeps the old
        ones.
        """
        keys = read_keys(self.path)
        changed, self._keys = keys != self._keys, keys
        for listener in self._listeners if changed else ():
            listener()
        return changed

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls back when `reload` found other keys."""
        self._listeners.append(listener)
