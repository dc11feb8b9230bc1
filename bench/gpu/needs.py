"""Which Python packages are missing here for which part of `run.sh`. It needs none itself.

python bench/gpu/needs.py engine        # exit status 1 and a line for each that is missing
"""

from __future__ import annotations

import importlib
import sys

NEEDS = {
    "limits": ("torch",),
    "engine": ("torch", "numpy", "msgspec", "sortedcontainers", "llguidance"),
    "handoff": ("torch", "numpy", "msgspec", "uvloop"),
    "tests": (
        *("torch", "numpy", "msgspec", "sortedcontainers", "llguidance", "tokenizers", "jinja2"),
        *("aiohttp", "uvloop", "prometheus_client", "transformers", "psutil", "hypothesis"),
        *("pytest", "pytest_asyncio", "pytest_timeout"),
    ),
}


def missing(part: str) -> dict[str, str]:
    """Packages that cannot be imported, and why."""
    found: dict[str, str] = {}
    for name in NEEDS[part]:
        try:
            importlib.import_module(name)
        except Exception as error:  # a package that is installed and broken counts as missing
            found[name] = f"{type(error).__name__}: {error}"
    return found


def main(parts: list[str]) -> int:
    """Name what is missing."""
    status = 0
    for part in parts or list(NEEDS):
        for name, why in missing(part).items():
            print(f"missing for the {part}: {name} ({why})")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
