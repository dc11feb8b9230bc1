"""Runs other programs' commands under a deadline, with bounded output.

It does not know what a command means. A command that runs too long is killed with what it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
from typing import IO, TYPE_CHECKING, Final, NamedTuple

from pdserve.errors import ActuatorDenied, ActuatorTransient

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.ids import Seconds

__all__ = ["Finished", "end_session", "leave_running", "run_command"]

_MOST_OUTPUT: Final = 4 << 20
"""Bytes of output that are read: twenty thousand lines of `squeue`."""

_START: Final[Seconds] = 5.0
"""Longest that it takes to start a command which is left alone."""


class Finished(NamedTuple):
    """A command that has ended by itself."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """What it said about its failure, in one line of at most 500 characters."""
        text = " ".join((self.err.strip() or self.out.strip()).split())
        return text[:500] or f"exit status {self.code}"


async def run_command(
    command: Sequence[str],
    environ: Mapping[str, str],
    deadline: Seconds,
    *,
    text: str = "",
    most: int = _MOST_OUTPUT,
) -> Finished:
    """Runs a command and returns how it ended.

    Args: `text` is its input; `most` bounds each output in bytes.

    Errors: `ActuatorTransient` if it takes longer than `deadline` seconds or writes too much: it is
    killed, and it may have acted. `ActuatorDenied` if there is no such program. Cancellation: the
    same as a missed deadline.
    """
    with tempfile.TemporaryFile() as given:  # a pipe would break when nobody reads it
        given.write(text.encode())
        given.seek(0)
        process = await _start(command, environ, given)
    try:
        async with asyncio.timeout(deadline):
            out, err = await asyncio.gather(
                _bounded(process, process.stdout, most), _bounded(process, process.stderr, most)
            )
            code = await process.wait()
    except TimeoutError:
        raise ActuatorTransient(f"{command[0]}: no answer within {deadline:g} s") from None
    finally:
        await _end(process)
    if max(len(out), len(err)) > most:
        raise ActuatorTransient(f"{command[0]}: more than {most >> 10} KiB of output")
    return Finished(code, out.decode(errors="replace"), err.decode(errors="replace"))


def leave_running(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Starts a command that outlives this process: it is no child of it, has no input and no
    output, and nobody waits for it. Blocks until it was started. Errors: `OSError`.

    The event loop does not start it: uvloop's children inherit the ends of its pipes.
    """
    subprocess.run(
        ("setsid", "--fork", *command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=dict(environ),
        timeout=_START,
        check=False,
    )


def end_session(pid: int) -> None:
    """Sends SIGTERM to a command that was left running, and to what it started. Does nothing if it
    has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM)


async def _start(
    command: Sequence[str], environ: Mapping[str, str], given: IO[bytes]
) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=given,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environ),
            start_new_session=True,
        )
    except OSError as error:
        raise ActuatorDenied(f"{command[0]} does not run here: {error.strerror}") from None


async def _bounded(
    process: asyncio.subprocess.Process, stream: asyncio.StreamReader | None, most: int
) -> bytes:
    """Reads to the end; a process that writes more than allowed is killed."""
    read = bytearray()
    while stream is not None and (part := await stream.read(1 << 16)):
        if len(read) <= most:
            read += part
        else:  # what is still in the pipe is dropped
            _kill(process)
    return bytes(read)


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kills the command with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kills what still runs, and collects the process."""
    if process.returncode is None:
        _kill(process)
        await process.wait()
