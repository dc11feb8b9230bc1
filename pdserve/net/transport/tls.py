"""Makes TLS contexts for both directions, and the binding that the cluster key's proof covers.

The cluster key authenticates nodes with and without TLS; its proof covers the certificate of the
accepting side, so that even a self-signed one cannot be replaced on the way. `--tls-ca` also
requires a certificate of that authority from both sides. Host names are not compared: nodes move,
and are identified by key and id.
"""

from __future__ import annotations

import hashlib
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path

__all__ = ["Tls", "TlsSource"]


class TlsSource(Protocol):
    """Supplies TLS contexts for new connections."""

    def current(self) -> Tls: ...


class _ServerContext(ssl.SSLContext):
    """A context that keeps its certificate's fingerprint: during a handshake, a renewed context may
    become current.
    """

    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Tls:
    """The contexts of one node; `certificates` makes new ones when the files change."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    fingerprint: bytes
    """SHA-256 of the own certificate."""

    @staticmethod
    def load(cert: Path, key: Path, ca: Path | None = None) -> Tls:
        """Loads PEM files; `cert` may be a chain. Raises `ConfigError`, naming the file."""
        for flag, path in (("cert", cert), ("key", key), ("ca", ca)):
            if path is not None:
                _check_readable(flag, path)
        server = _ServerContext(ssl.PROTOCOL_TLS_SERVER)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        client.verify_mode = ssl.CERT_NONE
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            try:
                context.load_cert_chain(cert, key, password=_no_password)
            except (OSError, ValueError) as error:
                raise ConfigError(f"--tls-cert {cert} and --tls-key {key}: {_why(error)}") from None
            if ca is None:
                continue
            try:
                context.load_verify_locations(ca)
            except OSError as error:
                raise ConfigError(f"--tls-ca {ca}: {_why(error)}") from None
            context.verify_mode = ssl.CERT_REQUIRED
        server.fingerprint = _fingerprint(_first_certificate(cert))
        return Tls(server, client, server.fingerprint)

    def current(self) -> Tls:
        """These contexts (`TlsSource.current`)."""
        return self

    @staticmethod
    def binding(transport: asyncio.BaseTransport) -> bytes:
        """SHA-256 of the certificate that the accepting side of `transport` showed."""
        tls = transport.get_extra_info("ssl_object")
        if tls is None:
            raise RuntimeError("the transport is not encrypted")
        if tls.server_side:
            context: _ServerContext = tls.context
            return context.fingerprint
        return _fingerprint(tls.getpeercert(binary_form=True))


def _check_readable(flag: str, path: Path) -> None:
    """Raises `ConfigError` for an unreadable file; OpenSSL does not say which one is missing."""
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"--tls-{flag} {path} cannot be read: {error.strerror}") from None


def _no_password() -> str:
    """Refuses an encrypted key; otherwise OpenSSL would ask for a password at the terminal."""
    raise ValueError("the key is encrypted: give one that needs no password")


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not a matching pair of PEM files or not PEM ({error.reason or error})"
    return str(error)


def _first_certificate(path: Path) -> bytes:
    """The node's own certificate, as DER: the first in the chain."""
    # Latin-1 decodes every file: comments may be in any language and encoding.
    text = path.read_text("latin-1")
    end = "-----END CERTIFICATE-----"
    start = text.index("-----BEGIN CERTIFICATE-----")
    return ssl.PEM_cert_to_DER_cert(text[start : text.index(end, start) + len(end)])


def _fingerprint(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()
