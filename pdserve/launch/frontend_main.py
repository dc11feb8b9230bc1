"""Runs an extra frontend process: `python -m pdserve.launch.frontend_main`.

The parent process starts it and writes one line to its standard input, the configuration. The end
of standard input means that the parent is gone: this process then ends at once. Otherwise it is a
frontend like any other.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading

from pdserve.errors import PdserveError
from pdserve.launch import exit_codes
from pdserve.launch.config.resolve import Config, resolve
from pdserve.launch.process import serve

__all__ = ["main", "read_config"]


def read_config(line: bytes) -> Config:
    """The configuration that the parent process sent. Errors: `ConfigError`."""
    told = json.loads(line)
    config = resolve(told["flags"])
    frontend = dataclasses.replace(config.frontend, reuse_port=True, group=told["group"])
    return dataclasses.replace(config, frontend=frontend)


def main() -> int:
    """Serves until a signal, or until the parent process is gone."""
    line = sys.stdin.buffer.readline()
    if not line:
        return exit_codes.FAILED
    # A thread ends this process with its parent even if the event loop is blocked.
    threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()
    try:
        config = read_config(line)
    except PdserveError as error:
        print(f"pdserve: {error.message}", file=sys.stderr)
        return exit_codes.USAGE
    return serve(config)


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(exit_codes.INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
