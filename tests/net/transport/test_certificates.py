"""Certificates that are renewed in place."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import ConfigError
from pdserve.net.settings import NetSettings
from pdserve.net.transport.certificates import Certificates
from pdserve.net.transport.tcp import TcpNetwork
from tests.net.certificates import certificate, folder, tls_of
from tests.support.net_support import ECHO, Echo, RecordingHandler, node

if TYPE_CHECKING:
    from pathlib import Path


def put(there: Path, name: str, authority: str = "ca") -> Path:
    """Write the certificate and key of `name`, as a renewal does."""
    cert, key = certificate(name, authority)
    shutil.copyfile(key, there / "node.key")
    shutil.copyfile(cert, there / "node.crt")
    return there


def held(there: Path, *, trusting: bool = False) -> Certificates:
    ca = folder() / "ca.pem" if trusting else None
    return Certificates(there / "node.crt", there / "node.key", ca)


def test_a_renewed_certificate_is_used_from_then_on(tmp_path) -> None:
    certificates = held(put(tmp_path, "a"))
    first = certificates.current()
    assert certificates.current() is first, "nothing has changed"
    put(tmp_path, "b")
    assert certificates.current().fingerprint == tls_of("b").fingerprint
    assert not certificates.reload(), "it has been read"


def test_files_that_do_not_fit_together_change_nothing(tmp_path, caplog) -> None:
    certificates = held(put(tmp_path, "a"))
    first = certificates.current()
    shutil.copyfile(certificate("b", "ca")[0], tmp_path / "node.crt")  # the key comes later
    for _ in range(3):
        assert certificates.current() is first
    assert caplog.text.count("stay in force") == 1
    with pytest.raises(ConfigError):
        certificates.reload()
    (tmp_path / "node.crt").unlink()
    assert certificates.current() is first
    put(tmp_path, "b")
    assert certificates.current().fingerprint == tls_of("b").fingerprint


async def test_links_in_both_directions_show_the_renewed_certificate(tmp_path) -> None:
    """The old one is of an authority that the peer no longer takes."""
    certificates = held(put(tmp_path, "a", "other-ca"))
    put(tmp_path, "a")
    a = node("a", TcpNetwork(NetSettings(), certificates), RecordingHandler())
    b = node("b", TcpNetwork(NetSettings(), tls_of("b")), RecordingHandler())
    there, here = await b.listen("127.0.0.1:0"), await a.listen("127.0.0.1:0")
    for dialler, address in ((a, there), (b, here)):
        link = await dialler.dial(address)
        assert (await link.request(ECHO, Echo(b"x"), timeout=5.0)).payload == b"x"
    await a.close()
    await b.close()


async def test_the_proof_covers_the_certificate_that_was_shown(tmp_path) -> None:
    """It is renewed between a connection's TLS handshake and ours."""
    certificates = held(put(tmp_path, "a"))

    class Renewed(TcpNetwork):
        def binding(self, transport):
            put(tmp_path, "b")
            certificates.current()
            return super().binding(transport)

    a = node("a", Renewed(NetSettings(), certificates), RecordingHandler())
    b = node("b", TcpNetwork(NetSettings(), tls_of("b")), RecordingHandler())
    await b.dial(await a.listen("127.0.0.1:0"))
    await a.close()
    await b.close()
