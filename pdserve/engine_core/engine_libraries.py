"""Names the libraries that pdserve's own engines need, and checks that they are installed.

It imports neither engines nor their libraries, so a worker's node can ask it before it starts an
engine process.
"""

from __future__ import annotations

import importlib.util

from pdserve.errors import ConfigError

__all__ = ["check_installed", "is_missing", "lacking", "needed_libraries", "remedy"]

_EXTRAS = {
    "torch": "torch",
    "numpy": "torch",
    "safetensors": "torch",
    "sglang": "sglang",
    "tensorrt_llm": "trtllm",
    "vllm": "vllm",
}
"""Import name of a library -> the extra of pdserve that installs it."""

_NEEDS = {"torch": ("torch", "numpy")}
"""Engine name -> libraries it needs that pdserve itself does not."""


def needed_libraries(engine: str) -> tuple[str, ...]:
    """Return the libraries that an engine needs, if pdserve knows them."""
    return _NEEDS.get(engine, ())


def is_missing(library: str) -> bool:
    """True if this Python environment lacks the library."""
    return importlib.util.find_spec(library) is None


def check_installed(engine: str) -> None:
    """Check that the engine's libraries are installed, without importing them. For pdserve's own
    engines only. Raises `ConfigError`."""
    for name in needed_libraries(engine):
        if is_missing(name):
            raise lacking(engine, name)


def lacking(engine: str, library: str) -> ConfigError:
    """The error for a library that an engine needs."""
    return ConfigError(
        f"engine {engine!r} needs {library!r}, which is not installed: {remedy(library)}; or try "
        "pdserve without a model's arithmetic, with --engine sim"
    )


def remedy(library: str) -> str:
    """Return the command that installs a library."""
    extra = _EXTRAS.get(library.partition(".")[0])
    return f"pip install 'pdserve[{extra}]'" if extra else f"install {library!r}"
