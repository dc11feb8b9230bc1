"""README's commands, run as they stand there but for their ports."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.server import PATIENCE, Server

README = (Path(__file__).parents[2] / "README.md").read_text()


def section(title: str) -> str:
    """Its text."""
    return re.split(r"\n##", README.partition(f"\n### {title}\n")[2])[0]


def blocks(text: str) -> list[str]:
    """Its indented blocks: commands."""
    found = re.findall(r"\n\n((?:    .*\n)+)", text)
    return [block.replace("\n    ", "\n").strip() for block in found]


class Places:
    """What stands for README's ports here."""

    def __init__(self) -> None:
        self.ports = {name: free_port() for name in ("9001", "9002")}
        self.environ: dict[str, str] = {}
        """For commands that need no port in README."""

    def fill(self, text: str) -> str:
        return re.sub(r"\b(7700|8000|9001|9002)\b", lambda m: str(self.ports[m[0]]), text)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def flags(command: str, places: Places) -> list[str]:
    """Of one of README's commands; `Server` chooses the HTTP port itself."""
    name, *words = shlex.split(places.fill(command))
    assert name == "pdserve"
    return words


def need_shell() -> None:
    """Skips where bash or curl is missing, which README's commands need. With
    `PDSERVE_REQUIRE_CURL`, that is a failure."""
    missing = [name for name in ("bash", "curl") if shutil.which(name) is None]
    if missing and os.environ.get("PDSERVE_REQUIRE_CURL", "") not in ("", "0"):
        pytest.fail(f"PDSERVE_REQUIRE_CURL is set, and there is no {missing[0]}", pytrace=False)
    if missing:
        pytest.skip(f"no {missing[0]} here")


def run(command: str, places: Places) -> str:
    need_shell()
    done = subprocess.run(
        ["bash", "-ec", places.fill(command)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return done.stdout


def header(answer: str, name: str) -> str:
    (value,) = re.findall(rf"^x-pdserve-{name}: (.*?)\r?$", answer, re.MULTILINE)
    return value


def wait_sound(front: Server, count: int) -> None:
    """Until the router sees so many workers that are ready."""
    end = time.monotonic() + PATIENCE
    while True:
        explained = front.post("/route", {"messages": [{"role": "user", "content": "hello"}]})
        if [one["standing"] for one in explained["candidates"]] == ["sound"] * count:
            return
        assert time.monotonic() < end, explained
        time.sleep(0.05)
