"""Says which releases of SGLang the adapter knows. Others are used, and named as untested."""

from __future__ import annotations

import re

__all__ = ["KNOWN", "untested"]

KNOWN = ((0, 5, 20), (0, 5, 23))
"""First and last release whose source text has been compared with tests/contracts/sglang.toml."""


def untested(version: str) -> str:
    """Why this release may behave otherwise, with the remedy; empty: it is a known one."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    first, last = KNOWN
    if found is not None:
        major, minor, patch = found.groups(default="0")
        if first <= (int(major), int(minor), int(patch)) <= last:
            return ""
    span = " to ".join(".".join(map(str, each)) for each in KNOWN)
    return (
        f"SGLang {version or 'of an unknown version'} is untested with this release of pdserve, "
        f"which knows {span}; install one of these if requests fail"
    )
