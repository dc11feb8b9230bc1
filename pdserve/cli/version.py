"""Runs `pdserve version`: prints the version, and whether hot loops are native."""

from __future__ import annotations

import platform

from pdserve import __version__, accel
from pdserve.cli.parser import Parser
from pdserve.launch import exit_codes


def run(arguments: list[str]) -> int:
    """Prints the version."""
    Parser("pdserve version", "Print the version.").parse(arguments)
    print(f"pdserve {__version__} (Python {platform.python_version()}; {accel.describe()})")
    return exit_codes.OK
