"""Commands end in time, and their output is bounded."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from pdserve.errors import ActuatorDenied, ActuatorTransient
from pdserve.planner.actuators.commands import Finished, leave_running, run_command

if TYPE_CHECKING:
    from pathlib import Path


async def run(*command: str, deadline: float = 20.0, **more: object) -> Finished:
    return await run_command(command, os.environ, deadline, **more)  # type: ignore[arg-type]


async def test_input_and_both_outputs() -> None:
    done = await run("sh", "-c", "cat; echo no >&2; exit 3", text="yes\n")
    assert done == Finished(3, "yes\n", "no\n")


async def test_a_command_that_reads_nothing() -> None:
    assert (await run("true", text="x" * (1 << 20))).code == 0


async def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    began = time.monotonic()
    with pytest.raises(ActuatorTransient, match=r"sh: no answer within 0\.5 s"):
        await run("sh", "-c", f"sleep 60 & echo $! >{mark}; wait", deadline=0.5)
    assert time.monotonic() - began < 10
    child = int(mark.read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(child).wait(20)


async def test_too_much_output_is_not_read() -> None:
    with pytest.raises(ActuatorTransient, match="more than 64 KiB of output"):
        await run("sh", "-c", "yes", most=64 << 10, deadline=5.0)


async def test_a_program_that_is_not_there() -> None:
    with pytest.raises(ActuatorDenied, match="no-such does not run here: No such file"):
        await run("no-such")


def test_a_command_is_left_running(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    leave_running(("sh", "-c", f"echo $$ >{mark}; exec sleep 60"), os.environ)
    deadline = time.monotonic() + 20
    while not (mark.exists() and mark.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process = psutil.Process(int(mark.read_text()))
    assert os.getpid() not in [one.pid for one in process.parents()]
    process.kill()


def test_words_of_a_failure_are_one_line() -> None:
    assert Finished(1, "out", "a:\n b\n").words == "a: b"
    assert Finished(1, "out\n", "").words == "out"
    assert Finished(1, "", "").words == "exit status 1"
    assert len(Finished(1, "", "x" * 1000).words) == 500
