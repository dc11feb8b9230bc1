"""Whom a command is about."""

from __future__ import annotations

import pytest

from pdserve.cli.console.reach import OPTIONS, Reach, add_reach, reach_of
from pdserve.cli.parser import Parser
from pdserve.errors import ConfigError
from pdserve.launch.config.options import BY_NAME


def reach(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Reach:
    monkeypatch.setenv("PDSERVE_CONFIG", "none")
    monkeypatch.delenv("PDSERVE_ADMIN_SOCKET", raising=False)
    parser = Parser("pdserve test", "")
    add_reach(parser)
    return reach_of(parser.parse(arguments))


def test_its_options_are_those_of_serving() -> None:
    assert set(OPTIONS) <= set(BY_NAME)


@pytest.mark.parametrize(
    ("arguments", "named", "server"),
    [
        ((), False, False),
        (("--port", "8000"), True, True),
        (("--admin-socket", "/a"), True, True),
        (("--admin-socket", "none"), True, False),
        (("--join", "h:1"), True, False),
        (("--cluster", "x"), False, False),
    ],
)
def test_what_was_named(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], named: bool, server: bool
) -> None:
    found = reach(monkeypatch, *arguments)
    assert (found.named, found.server) == (named, server)


def test_a_variable_names_a_socket_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_PORT", "9")
    assert not reach(monkeypatch).named
    monkeypatch.setenv("PDSERVE_ADMIN_SOCKET", "/run/p.sock")
    parser = Parser("pdserve test", "")
    add_reach(parser)
    assert reach_of(parser.parse([])).server


@pytest.mark.parametrize("port", ["0", "65536", "x", "-1", "8000.0"])
def test_a_port_is_a_number(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    with pytest.raises(ConfigError, match="no port such as 8000"):
        reach(monkeypatch, f"--port={port}")


def test_a_server_and_a_cluster_are_not_both_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        reach(monkeypatch, "--port", "1", "--join", "h:1")
