"""Fuzz target: every file that a person hands to pdserve.

    python -m tests.fuzz files -max_total_time=60

The first byte says what the rest is: a configuration, API keys, a cluster key, a hash secret, a
trace. It is read, or refused with one error that names the file, and never with another exception.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdserve.errors import ConfigError
from pdserve.frontend.service import read_api_keys
from pdserve.launch.config.resolve import option_rows, resolve
from pdserve.net.cluster_keys import read_hash_secret, read_keys
from pdserve.sim.workloads.trace_file import open_trace

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["KINDS", "fuzz", "seeds"]

_LONGEST: Final = 1000
"""Characters of an error: it is read in a terminal."""


def _config(path: Path) -> None:
    option_rows(resolve({"config": str(path)}, {}, path.parent))


def _trace(path: Path) -> None:
    for request in open_trace(path):
        assert request.at >= 0
        assert request.output_tokens >= 1
        assert all(tokens >= 1 for _, tokens in request.pieces)


KINDS: Final[tuple[Callable[[Path], object], ...]] = (
    _config,
    read_api_keys,
    read_keys,
    read_hash_secret,
    _trace,
)


def fuzz(data: bytes) -> None:
    """One input: what kind of file, and what is in it."""
    read = KINDS[(data[0] if data else 0) % len(KINDS)]
    path = _folder() / "the-file"
    path.write_bytes(data[1:])
    path.chmod(0o600)
    try:
        read(path)
    except ConfigError as error:
        check(error, path)


def check(error: ConfigError, path: Path) -> None:
    """One sentence or two, that say where to look."""
    message = error.message
    assert str(path) in message, message
    assert len(message) < _LONGEST + len(str(path)), message
    assert message.isprintable(), message
    assert error.__cause__ is None, "whoever reads it needs no traceback"


def _folder() -> Path:
    """One for the whole process."""
    path = Path(tempfile.gettempdir()) / f"pdserve-fuzz-{os.getpid()}"
    path.mkdir(exist_ok=True)
    return path


_CONFIG = b"""\
# of a node
model = "/models/qwen3-0.6b"
served-model-name = ["qwen3", "default"]
port = 9000
kv-memory = "4GiB"
request-timeout = "5min"
strict_api = true
max-priority = -3
hold-work = 0.25

[engine-option]
preset = "h100-8b"
noise = 0.1
"""
_KEYS = b"""\
[[key]]
key = "sk-research-4f1d2c"
tenant = "research"
weight = 2.0
max_priority = 7
models = ["llama-3-8b"]
cache_isolation = true

[key.limits]
max_concurrent_requests = 16
requests_per_minute = 600

[[key]]
key_sha256 = "60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752"
tenant = "batch"
"""
_MOONCAKE = b"""\
{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
{"timestamp": 3000.5, "input_length": 512, "output_length": 0, "hash_ids": [9]}
"""
_AZURE = b"""\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""


def seeds() -> list[bytes]:
    """A good file of each kind, and what has been wrong once."""
    key = b"# old and new\n" + b"ab" * 32 + b"\n" + b"cd" * 32 + b"\n"
    good = [(0, _CONFIG), (1, _KEYS), (2, key), (3, b"ef" * 32), (4, _MOONCAKE), (4, _AZURE)]
    deep = b"a = " + b"[" * 3000
    long = b"port = " + b"9" * 5000
    odd = [(kind, text) for kind in (0, 1) for text in (deep, long, b"a = 1e999\x00", b"\xff\xfe")]
    return [bytes([kind]) + text for kind, text in [*good, *odd]]
