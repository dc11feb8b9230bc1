"""Decides which hosts and web pages may call this frontend, before a request is routed.

Without API keys, only programs and pages of this server may call it. With keys, names are compared
only if some are configured. The checks themselves are in `edge/hosts.py`. Owned by the service.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from pdserve.edge.hosts import HostRule, OriginRule
from pdserve.errors import Forbidden

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.frontend.config import FrontendConfig

__all__ = ["TrustedHosts"]


class TrustedHosts:
    """The rules of one frontend."""

    def __init__(self, config: FrontendConfig, own_name: str | None = None) -> None:
        """`own_name`: this machine's host name; None: ask the system."""
        without_keys = config.api_keys_file is None
        self._hosts: HostRule | None = None
        self._origins = OriginRule(config.cors_origins) if without_keys else None
        if without_keys or config.allowed_hosts:
            name = socket.gethostname() if own_name is None else own_name
            mine = (config.host, name, name.partition(".")[0])
            self._hosts = HostRule((*config.allowed_hosts, *mine))
        self._known: str | None = None
        """The last host that was allowed: most clients use one name."""

    def check(self, headers: Mapping[str, str]) -> None:
        """Errors: `Forbidden` with cause and remedy."""
        host = headers.get("Host")
        if self._hosts is not None and host != self._known:
            if (refusal := self._hosts.refusal(host)) is not None:
                raise Forbidden(refusal)
            self._known = host
        if self._origins is not None and (refusal := self._origins.refusal(headers)) is not None:
            raise Forbidden(refusal)
