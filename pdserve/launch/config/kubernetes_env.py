"""Recognises the environment variables that Kubernetes sets in pods for services. Pure.

A service named pdserve or pdserve-router produces variables with the prefix of ours. The shape of
name and value identifies them, so that a misspelt variable of ours is still an error.
https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["is_service_variable"]

_ADDRESS: Final = r"[0-9a-fA-F.:]+"
_URL: Final = r"(tcp|udp|sctp)://\S+"
_PORT: Final = r"\d{1,5}"
_SHAPES: Final = tuple(
    (re.compile(rf"PDSERVE(_[A-Z0-9_]+)?_{name}"), re.compile(value))
    for name, value in (
        ("SERVICE_HOST", _ADDRESS),
        ("SERVICE_PORT(_[A-Z0-9_]+)?", _PORT),
        ("PORT", _URL),
        (r"PORT_\d+_(TCP|UDP|SCTP)", _URL),
        (r"PORT_\d+_(TCP|UDP|SCTP)_PROTO", "tcp|udp|sctp"),
        (r"PORT_\d+_(TCP|UDP|SCTP)_PORT", _PORT),
        (r"PORT_\d+_(TCP|UDP|SCTP)_ADDR", _ADDRESS),
    )
)


def is_service_variable(name: str, value: str) -> bool:
    """True if Kubernetes set this variable for a service."""
    return any(shape.fullmatch(name) and form.fullmatch(value) for shape, form in _SHAPES)
