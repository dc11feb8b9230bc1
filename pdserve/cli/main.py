"""Dispatches the sub-command, and prints one clear line for any error. The entry point.

A sub-command is imported when chosen, so `--help` and `version` stay fast and a missing optional
library affects only its own command. Without a sub-command pdserve serves.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from typing import TYPE_CHECKING, cast

from pdserve.cli.outputs import printable
from pdserve.errors import ConfigError, HandshakeRefused, PdserveError
from pdserve.launch import exit_codes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COMMANDS = {
    "serve": ("pdserve.cli.serve", "serve a model (what happens without a sub-command)"),
    "chat": ("pdserve.cli.chat", "talk to a running server in the terminal"),
    "status": ("pdserve.cli.status", "members, models and load of a cluster"),
    "top": ("pdserve.cli.top", "the same, live in the terminal"),
    "trace": ("pdserve.cli.trace", "where the time of requests went, phase by phase"),
    "disagg": ("pdserve.cli.disagg", "how decode workers choose where prompts are computed"),
    "mode": ("pdserve.cli.mode", "change what a worker does, while it serves"),
    "planner": ("pdserve.cli.planner", "what the planner decides and why; pause it, pin workers"),
    "drain": ("pdserve.cli.drain", "take nodes away without losing a request"),
    "tier": ("pdserve.cli.tier.command", "what KV tiers hold; check, empty and warm them"),
    "simulate": (
        "pdserve.cli.simulate.command",
        "what a cluster would do with a trace of requests",
    ),
    "bench": ("pdserve.cli.bench.command", "put load on a server and measure it"),
    "dashboards": ("pdserve.cli.dashboards", "write Grafana boards and Prometheus rules"),
    "doctor": ("pdserve.cli.doctor", "what this machine has, and what pdserve will use"),
    "config": ("pdserve.cli.config", "the settings in force, and where each comes from"),
    "version": ("pdserve.cli.version", "the version"),
}
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _write_what_can_be()
    try:
        return _run(arguments)
    except PdserveError as error:
        # It may quote what others have sent.
        print(f"pdserve: {printable(error.message)}", file=sys.stderr)
        return _status_of(error)
    except BrokenPipeError:
        # The reader of the output is gone.
        _silence()
        return exit_codes.OK
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        _silence()
        print(f"pdserve: the output cannot be written: {error.strerror}", file=sys.stderr)
        return exit_codes.FAILED
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED


def _write_what_can_be() -> None:
    """Characters that the encoding of standard output lacks are replaced, and end no command."""
    output = sys.stdout
    if isinstance(output, io.TextIOWrapper) and output.errors == "strict":
        output.reconfigure(errors="replace")


def _run(arguments: list[str]) -> int:
    try:
        return _command(arguments)(arguments)
    finally:
        # What is still buffered fails here, where it can be reported, not at interpreter exit.
        # `sys.stdout` is None when the shell has closed it with `>&-`.
        if sys.stdout is not None:
            sys.stdout.flush()


def _status_of(error: PdserveError) -> int:
    if isinstance(error, HandshakeRefused):
        return exit_codes.CANNOT_JOIN
    return exit_codes.USAGE if isinstance(error, ConfigError) else exit_codes.FAILED


def _silence() -> None:
    """Prevents all further writes to standard output, also at interpreter exit: it is closed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _command(arguments: list[str]) -> Callable[[list[str]], int]:
    """Removes the sub-command's name from `arguments` and imports its code."""
    name = "serve"
    if arguments and not arguments[0].startswith("-"):
        name = arguments[0]
        # `serve` keeps its name, because a model may follow it.
        if name != "serve":
            arguments.pop(0)
    elif arguments and arguments[0] in ("--version", "-V"):
        name = "version"
        arguments.clear()
    if name not in COMMANDS:
        raise _unknown(name)
    module = importlib.import_module(COMMANDS[name][0])
    return cast("Callable[[list[str]], int]", module.run)


def _unknown(name: str) -> ConfigError:
    import difflib

    from pdserve.cli.flag_hints import COMMANDS as FOREIGN

    close = [FOREIGN[name]] if name in FOREIGN else difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ""
    if "/" in name or os.path.isdir(name) or name.endswith(".gguf"):
        hint = f", did you mean `pdserve serve {name}`?"
    return ConfigError(f"unknown sub-command {name!r}{hint} (try pdserve --help)")
