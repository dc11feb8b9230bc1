"""Says which releases of vLLM the adapter is tested with. Others are used and named untested."""

from __future__ import annotations

import re

__all__ = ["KNOWN", "untested"]

KNOWN = ((0, 31), (0, 33))
"""First and last minor release whose source the contract tests have compared."""


def untested(version: str) -> str:
    """Why this release may behave otherwise, with the remedy; empty: it is a known one."""
    found = re.match(r"(\d+)\.(\d+)", version)
    first, last = KNOWN
    if found is not None and first <= (int(found[1]), int(found[2])) <= last:
        return ""
    span = f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
    return (
        f"vLLM {version or 'of an unknown version'} is untested with this release of pdserve, "
        f"which knows {span}; install one of these if requests fail"
    )
