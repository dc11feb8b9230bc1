"""TLS by flags: both sides bind the proof to the same certificate, authorities are enforced."""

from __future__ import annotations

import subprocess

import pytest

from pdserve.errors import ConfigError, DialFailed, WrongClusterKey
from pdserve.net.settings import NetSettings
from pdserve.net.transport.tcp import TcpNetwork
from pdserve.net.transport.tls import Tls
from tests.net.certificates import certificate, folder, tls_of
from tests.support.net_support import ECHO, Echo, RecordingHandler, node


async def dial(ours: Tls | None, theirs: Tls | None) -> None:
    """Dial from a node with one configuration to a node with another, and ask something."""
    settings = NetSettings(dial_timeout=2.0, handshake_timeout=1.0)
    a = node("a", TcpNetwork(settings, ours), RecordingHandler(), settings=settings)
    b = node("b", TcpNetwork(settings, theirs), RecordingHandler(), settings=settings)
    try:
        link = await a.dial(await b.listen("127.0.0.1:0"))
        assert (await link.request(ECHO, Echo(b"x"), timeout=5.0)).payload == b"x"
    finally:
        await a.close()
        await b.close()


async def test_nodes_of_one_authority_talk() -> None:
    await dial(tls_of("a"), tls_of("b"))


async def test_without_an_authority_the_key_alone_vouches_for_the_certificate() -> None:
    await dial(tls_of("a", trusts=None), tls_of("b", trusts=None))


async def test_a_certificate_of_another_authority_is_refused_by_either_side() -> None:
    with pytest.raises(DialFailed):
        await dial(tls_of("a", "other-ca"), tls_of("b"))
    with pytest.raises(DialFailed, match="TLS"):
        await dial(tls_of("a"), tls_of("b", "other-ca"))


async def test_plain_and_encrypted_nodes_do_not_mix(caplog) -> None:
    with pytest.raises(DialFailed, match="does it use TLS"):
        await dial(None, tls_of("b"))
    assert "TLS: the peer does not use it" in caplog.text
    with pytest.raises(DialFailed, match="all nodes --tls-cert, or none"):
        await dial(tls_of("a"), None)


async def test_a_certificate_swapped_on_the_way_fails_the_proof() -> None:
    """The dialler believes to see another certificate than the acceptor shows."""

    class Deceived(TcpNetwork):
        def binding(self, transport):
            return b"\0" * 32

    settings = NetSettings()
    a = node("a", Deceived(settings, tls_of("a", trusts=None)), RecordingHandler())
    b = node("b", TcpNetwork(settings, tls_of("b", trusts=None)), RecordingHandler())
    with pytest.raises(WrongClusterKey):
        await a.dial(await b.listen("127.0.0.1:0"))
    await a.close()
    await b.close()


def test_files_that_do_not_fit_together_are_named(tmp_path) -> None:
    cert, key = certificate("a", "ca")
    _, other_key = certificate("b", "ca")
    with pytest.raises(ConfigError, match="--tls-"):
        Tls.load(cert, other_key)
    with pytest.raises(ConfigError, match="--tls-"):
        Tls.load(tmp_path / "absent", key)
    (tmp_path / "nonsense").write_text("no certificate")
    with pytest.raises(ConfigError, match="--tls-"):
        Tls.load(cert, key, tmp_path / "nonsense")
    assert Tls.load(cert, key, folder() / "ca.pem").fingerprint == tls_of("a").fingerprint


def test_a_missing_file_and_a_key_with_a_password_are_named(tmp_path) -> None:
    cert, key = certificate("a", "ca")
    for files in ((tmp_path / "no", key), (cert, tmp_path / "no"), (cert, key, tmp_path / "no")):
        with pytest.raises(ConfigError, match=r"no cannot be read: No such file"):
            Tls.load(*files)
    locked = tmp_path / "locked.pem"
    command = ["openssl", "pkcs8", "-topk8", "-in", key, "-out", locked, "-passout", "pass:word"]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ConfigError, match="needs no password"):
        Tls.load(cert, locked)
