"""The process of cores: what it says before its end, and what it imports."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.engine.launcher import ProcessLauncher
from pdserve.engine.process import _ChildProtocol
from pdserve.messages.engine import EngineSpec, StartCore, StopCore
from pdserve.observe.logs import JsonFormatter, TextFormatter
from pdserve.testing.scripted import ENGINE
from pdserve.wire.length_prefixed import encode_frame

if TYPE_CHECKING:
    from pathlib import Path

SPEC = EngineSpec(engine=ENGINE, model="", max_batch_tokens=256)
START = encode_frame(msgspec.msgpack.encode(StartCore(spec=SPEC)))
STOP = encode_frame(msgspec.msgpack.encode(StopCore()))


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
async def test_what_is_logged_in_daily_life_is_no_last_word(formatter: logging.Formatter):
    """It is passed on, and tells nobody why an engine was killed."""

    def logged(level: int) -> bytes:
        said = {
            "name": "pdserve.engine",
            "levelno": level,
            "levelname": logging.getLevelName(level),
        }
        return formatter.format(logging.makeLogRecord(said | {"msg": "said"})).encode() + b"\n"

    lines: list[str] = []
    child = _ChildProtocol(asyncio.get_running_loop(), lines.append)
    child.pipe_data_received(2, logged(logging.INFO) + logged(logging.WARNING))
    assert (len(lines), child.last_line) == (2, "")
    child.pipe_data_received(2, b"out of everything\n" + logged(logging.INFO))
    assert child.last_line == "out of everything"
    child.pipe_data_received(2, logged(logging.ERROR))
    assert (len(lines), child.last_line) == (5, lines[-1])


async def test_a_child_uses_our_search_path_and_not_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A file in the working directory must not replace a module of the library."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "argparse.py").write_text("raise SystemExit('hijacked')\n")
    launcher = ProcessLauncher()
    with await launcher.launch() as sock:
        sock.sendall(START + STOP)
        assert await launcher.ended() == "exited with code 0"
