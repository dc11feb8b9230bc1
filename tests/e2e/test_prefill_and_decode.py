"""README's prefill and decode worker, command by command: the transfer shows in `pdserve top`."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import subprocess
import sys
import termios
import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.readme import Places, blocks, flags, header, run, section, wait_sound
from tests.e2e.server import PATIENCE, Server

if TYPE_CHECKING:
    from collections.abc import Iterator

SECTION = section("Prefill and decode apart")
SHELLS, FIFTH = blocks(SECTION)
TRACES = section("Where the time of a request went")
TRACED, HEAD = blocks(TRACES)
PROMPT, TOP = FIFTH.splitlines()
KEPT = ("--kv-memory", "128MiB", "--threads", "1")
"""What README leaves to the machine, which is ours alone there."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    """README's four shells, ready."""
    home = {"XDG_CONFIG_HOME": str(tmp_path_factory.mktemp("home"))}
    found = Places()
    router, prefill, decode, frontend = SHELLS.splitlines()
    listen = ("--listen", "127.0.0.1:0")
    with Server(None, *flags(router, found), *listen, **home) as routing:
        seed = routing.wait_for_line(r"router \S+ at (\S+)")[1]
        found.ports["7700"] = int(seed.rpartition(":")[2])
        found.ports["8000"] = 0
        with (
            Server(None, *flags(prefill, found), *KEPT, **home) as one,
            Server(None, *flags(decode, found), *KEPT, **home) as other,
            Server(None, *flags(frontend, found), **home) as front,
        ):
            for worker in (one, other):
                worker.wait_for_line("ready: ")
            front.wait_for_line("ready: ")
            wait_sound(front, 1)
            found.ports["8000"] = front.port
            found.environ = {"PDSERVE_JOIN": seed, "PDSERVE_CONFIG": "none"} | home
            yield found


@pytest.mark.timeout(180)
def test_readmes_prompt_is_computed_on_p_and_top_shows_it(places):
    (promised,) = re.findall(r"x-pdserve-(prefill: [^`]*)", SECTION)
    end = time.monotonic() + PATIENCE
    while f"prefill: {header(run(PROMPT, places), 'prefill')}" != promised:
        assert time.monotonic() < end  # the prefill worker has not been heard of yet
        time.sleep(0.1)
    shown = top(places, r"d +p +shm +0 B +([\d.]+ [KM]iB) +0 ")
    assert re.search(r"d +decode +always +\d", shown), shown


def test_readmes_request_is_drawn_as_in_readme(places):
    """But for its times, and for notes that do not fit."""
    ask, draw = TRACED.splitlines()
    run(ask, places)
    end = time.monotonic() + PATIENCE
    while True:
        done = pdserve(places, *shlex.split(draw)[1:])
        if done.returncode == 0:
            break
        assert time.monotonic() < end, done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert phases(done.stdout) == phases(TRACES.replace("\n    ", "\n"))
    for text in (*HEAD.splitlines()[1::2], "worker=d", "node=p", "backend=shm"):
        assert text in done.stdout


def phases(drawn: str) -> list[str]:
    """Names of phases with their indentation."""
    lines = drawn.splitlines()
    first = [line.startswith("phase ") for line in lines].index(True) + 1
    last = [line == "" for line in (*lines[first:], "")].index(True) + first
    return [line[:22].rstrip() for line in lines[first:last]]


def pdserve(places: Places, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of pdserve's that asks README's cluster."""
    return subprocess.run(
        [sys.executable, "-m", "pdserve", *arguments],
        env=os.environ | places.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def top(places: Places, pattern: str) -> str:
    """What it has drawn when the pattern is there."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (60, 200))
    command = [sys.executable, "-m", "pdserve", *flags(TOP, places)]
    environ = os.environ | {"TERM": "xterm"} | places.environ
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, env=environ) as process:
        drawn, end = "", time.monotonic() + PATIENCE
        while not re.search(pattern, drawn):
            assert time.monotonic() < end, drawn
            if select.select([ours], [], [], 0.1)[0]:
                drawn += os.read(ours, 65536).decode(errors="replace")
        os.write(ours, b"q")
        assert process.wait(PATIENCE) == 0
    os.close(theirs)
    os.close(ours)
    return drawn
