"""Carriers start a core, say how it ended, and end it by force."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.engine.carrier import Carrier, ProcessCarrier, ThreadCarrier, _ChildProtocol
from pdserve.messages.engine import EngineSpec, Start, Stop
from pdserve.observe.logs import JsonFormatter, TextFormatter
from pdserve.testing.scripted import ENGINE
from pdserve.wire.frames import encode_frame, encode_frames

if TYPE_CHECKING:
    from pathlib import Path

SPEC = EngineSpec(engine=ENGINE, model="", max_batch_tokens=256)
START = encode_frame(msgspec.msgpack.encode(Start(spec=SPEC)))
STOP = encode_frame(msgspec.msgpack.encode(Stop()))


@pytest.fixture(params=[ProcessCarrier, ThreadCarrier])
def carrier(request: pytest.FixtureRequest) -> Carrier:
    made: Carrier = request.param()
    return made


async def test_a_core_that_is_told_to_stop_ends_with_status_0(carrier: Carrier):
    with await carrier.launch() as sock:
        sock.sendall(START + STOP)
        async with asyncio.timeout(20):
            text = await carrier.ended()
    assert "0" in text


async def test_a_core_ends_when_the_socket_closes(carrier: Carrier):
    (await carrier.launch()).close()
    carrier.kill()  # a thread's second handle on the socket
    async with asyncio.timeout(20):
        await carrier.ended()


async def test_killing_is_possible_at_any_time_and_twice(carrier: Carrier):
    assert await carrier.ended() == "never started"
    carrier.kill()
    with await carrier.launch():
        carrier.kill()
        async with asyncio.timeout(20):
            await carrier.ended()
        carrier.kill()
        assert await carrier.ended()


async def test_waiting_for_the_end_can_be_cancelled_and_repeated(carrier: Carrier):
    with await carrier.launch():
        waiting = asyncio.ensure_future(carrier.ended())
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        carrier.kill()
        async with asyncio.timeout(20):
            await carrier.ended()


async def test_the_exit_is_told_by_signal_and_by_code():
    carrier = ProcessCarrier()
    with await carrier.launch():
        assert carrier.pid is not None
        os.kill(carrier.pid, signal.SIGKILL)
        assert "was killed by SIGKILL" in await carrier.ended()


async def test_lines_of_stderr_are_passed_on_and_the_last_one_kept():
    lines: list[str] = []
    carrier = ProcessCarrier(on_line=lines.append)
    with await carrier.launch() as sock:
        sock.sendall(encode_frames([b"not msgpack"]))
        text = await carrier.ended()
    assert text.startswith("exited with code 1")
    assert carrier.pid is not None


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
    carrier = ProcessCarrier()
    with await carrier.launch() as sock:
        sock.sendall(START + STOP)
        assert await carrier.ended() == "exited with code 0"
