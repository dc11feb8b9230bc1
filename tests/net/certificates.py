"""Certificates for tests, made once per process by the `openssl` command."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path

import pytest

from pdserve.net.transport.tls import Tls

_CONFIG = """
[req]
distinguished_name = name
[name]
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign
[leaf]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
subjectAltName = DNS:node, IP:127.0.0.1
"""


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@functools.cache
def folder() -> Path:
    """A directory with the authority of the tests; it goes away with the process."""
    if subprocess.run(["which", "openssl"], capture_output=True, check=False).returncode:
        pytest.skip("the openssl command is not installed")
    temporary = tempfile.TemporaryDirectory(prefix="pdserve-certificates-")
    _kept.append(temporary)
    path = Path(temporary.name)
    (path / "config").write_text(_CONFIG)
    for authority in ("ca", "other-ca"):
        _openssl(path, *_request(authority, "authority"), "-x509", "-days", "2")
    return path


_kept: list[tempfile.TemporaryDirectory[str]] = []


def _request(name: str, extensions: str) -> tuple[str, ...]:
    curve = ("-pkeyopt", "ec_paramgen_curve:P-256")
    key = ("-newkey", "ec", *curve, "-nodes", "-keyout", f"{name}.key")
    about = ("-config", "config", "-subj", f"/CN={name}", "-extensions", extensions)
    return ("req", "-new", *key, *about, "-out", f"{name}.pem")


@functools.cache
def certificate(name: str, authority: str) -> tuple[Path, Path]:
    """Certificate and key of `name`, signed by an authority."""
    path = folder()
    stem = f"{name}-{authority}"
    _openssl(path, *_request(stem, "leaf"))
    _openssl(
        path,
        *("x509", "-req", "-in", f"{stem}.pem", "-out", f"{stem}.crt", "-days", "2"),
        *("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial"),
        *("-extfile", "config", "-extensions", "leaf"),
    )
    return path / f"{stem}.crt", path / f"{stem}.key"


@functools.cache
def tls_of(name: str, authority: str = "ca", *, trusts: str | None = "ca") -> Tls:
    """What a node of that name uses; `trusts=None`: no authority."""
    cert, key = certificate(name, authority)
    return Tls.load(cert, key, None if trusts is None else folder() / f"{trusts}.pem")
