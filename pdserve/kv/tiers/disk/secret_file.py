"""Keeps the hash secrets under which a disk tier was written, beside its subdirectories.

Names of blocks depend on the cluster's hash secret. It must outlive the processes as the blocks do,
or none of them is found again. Each secret has a file of its own, which only its owner can read:

    secret-1f2e3d4c5b6a7988    JSON: the secret, its birth, when it was kept last

The birth says how the secret came to the node (`runtime.hash_secret`); nodes agree on the earliest.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from pdserve.blocks.hashing import hash_secret_id
from pdserve.kv.tiers.disk.directory import read_description, replace_file, subdirectories

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.ids import Seconds

__all__ = ["StoredSecret", "keep_secret", "stored_secrets"]

_log = logging.getLogger(__name__)

_FORMAT: Final = 1
_NAME: Final = re.compile(r"secret-[0-9a-f]{16}")
_LONGEST: Final = 4096
_UNUSED_FOR: Final[Seconds] = 86_400.0
"""Time after which a secret is removed if no subdirectory was written under it."""


class StoredSecret(NamedTuple):
    """A secret that was kept."""

    secret: bytes
    birth: int
    path: Path


class _SecretFile(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    secret: str
    """Hexadecimal."""
    birth: int
    kept: float
    """Unix time."""


def keep_secret(root: Path, secret: bytes, birth: int, wall: Seconds) -> None:
    """Keep a secret that is in use now; `wall`: Unix time. Errors: OSError."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = _SecretFile(format=_FORMAT, secret=secret.hex(), birth=birth, kept=wall)
    replace_file(root / f"secret-{hash_secret_id(secret).hex()}", msgspec.json.encode(content))
    _remove_unused(root, wall)


def stored_secrets(root: Path, content: str = "") -> list[StoredSecret]:
    """The secrets that were kept, the one in use last first; with `content`, only those under which
    a subdirectory of that model was written. Files that are no secrets, or that others can read,
    are left out."""
    known = _used(root, content) if content else None
    found = []
    for path, file in _files(root):
        secret = bytes.fromhex(file.secret)
        if known is None or hash_secret_id(secret) in known:
            found.append((file.kept, StoredSecret(secret, file.birth, path)))
    return [stored for _, stored in sorted(found, key=lambda pair: -pair[0])]


def _files(root: Path) -> list[tuple[Path, _SecretFile]]:
    try:
        paths = sorted(path for path in root.iterdir() if _NAME.fullmatch(path.name))
    except OSError:
        return []
    return [(path, file) for path in paths if (file := _read(path)) is not None]


def _read(path: Path) -> _SecretFile | None:
    """A secret's file; None if it is none, or not safe."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(fd, "rb") as opened:
            status = os.fstat(fd)
            content = opened.read(_LONGEST)
        file = msgspec.json.decode(content, type=_SecretFile)
        secret = bytes.fromhex(file.secret)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
        _log.warning("others can read the hash secret in %s: it is not used", path)
        return None
    right = path.name == f"secret-{hash_secret_id(secret).hex()}" if secret else False
    return file if right and file.format == _FORMAT else None


def _used(root: Path, content: str = "") -> set[bytes]:
    """Ids of the secrets under which subdirectories were written, of one model or of all."""
    found = set()
    for path in subdirectories(root):
        description = read_description(path)
        fingerprint = None if description is None else description.of
        if fingerprint is not None and content in ("", fingerprint.content):
            found.add(fingerprint.secret_id)
    return found


def _remove_unused(root: Path, wall: Seconds) -> None:
    used = _used(root)
    for path, file in _files(root):
        secret = hash_secret_id(bytes.fromhex(file.secret))
        if secret not in used and wall - file.kept > _UNUSED_FOR:
            with suppress(OSError):
                path.unlink()
