"""Reads from the command line which server or cluster a command is about.

--port, --admin-socket   a server on this machine that has no cluster
--join, --cluster, …     a cluster
none of them             the only one that runs on this machine
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.cli.parser import Parser, add_options, given_flags
from pdserve.errors import ConfigError
from pdserve.launch.config.resolve import resolve

if TYPE_CHECKING:
    import argparse

    from pdserve.launch.cluster.addresses import ClusterConfig
    from pdserve.launch.cluster.admin_client import AdminClient

__all__ = ["OPTIONS", "Reach", "add_reach", "reach_of"]

OPTIONS: Final = (
    *("join", "admin-socket", "cluster", "cluster-key-file", "tls-cert", "tls-key", "tls-ca"),
    *("config", "log-level"),
)
"""The serving options that say how to reach a server or a cluster."""
_LARGEST_PORT: Final = 65535


@dataclass(frozen=True, slots=True)
class Reach:
    """Whom a command asks."""

    cluster: ClusterConfig
    port: int | None = None
    """HTTP port of a server on this machine; None: no port was given."""

    @property
    def named(self) -> bool:
        """True if the command line or a setting says whom to ask."""
        return bool(self.cluster.join or self.cluster.admin_socket or self.port is not None)

    @property
    def server(self) -> bool:
        """True if it is said to be a server without a cluster."""
        return self.port is not None or self.cluster.admin_socket not in ("", "none")

    def client(self) -> AdminClient:
        """A client; call it inside the running loop. Errors: `ConfigError`."""
        from pdserve.launch.cluster.admin_client import AdminClient

        return AdminClient(self.cluster, port=self.port)


def add_reach(parser: Parser) -> None:
    """Adds the options."""
    parser.own.add_argument(
        "--port",
        metavar="PORT",
        default="",
        help="The server on this machine with this HTTP port, if several run.",
    )
    add_options(parser, OPTIONS)


def reach_of(parsed: argparse.Namespace) -> Reach:
    """What was given. Errors: `ConfigError`."""
    # A command's own flags, such as `--port`, may have names of serving options.
    flags = {name: text for name, text in given_flags(parsed).items() if name in OPTIONS}
    config = resolve(flags).cluster
    port = _port(parsed.port) if parsed.port else None
    if port is not None and config.join:
        raise ConfigError(
            "--port names a server without a cluster, --join a node of a cluster: give one of them"
        )
    return Reach(config, port)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= _LARGEST_PORT:
        raise ConfigError(f"--port: {text!r} is no port such as 8000")
    return int(text)
