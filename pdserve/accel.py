"""Selects the native or the pure version of each hot function; only this file imports
`pdserve._native`.

A module with a native twin keeps its pure version beside it and asks here:

    chain = accel.native.block_hashes if accel.NATIVE else chain_pure

`PDSERVE_PURE=1` in the environment selects the pure versions even where the extension is built, so
that one installation can test both.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

__all__ = ["NATIVE", "REASON", "describe", "native"]


def _load() -> tuple[object, str]:
    """Returns the extension, or None with a readable reason."""
    if os.environ.get("PDSERVE_PURE", "").lower() not in ("", "0", "false", "no", "off"):
        return None, "PDSERVE_PURE is set"
    try:
        return importlib.import_module("pdserve._native"), "extension found"
    except ModuleNotFoundError:
        return None, "the extension was not built"
    except ImportError as error:  # built for another interpreter, or a library is missing
        return None, f"the extension does not load: {error}"


if TYPE_CHECKING:
    # The stub is the one description of the extension's types; touch `native` only when NATIVE.
    from pdserve import _native as native

    REASON: str
else:
    native, REASON = _load()

NATIVE: bool = native is not None


def describe() -> str:
    """One line for logs and `pdserve doctor`."""
    return f"hot loops: {'native' if NATIVE else 'pure Python'} ({REASON})"
