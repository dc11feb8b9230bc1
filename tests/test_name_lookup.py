"""Names are looked up without keeping the process alive, one lookup of a name at a time."""

import asyncio
import socket
import threading

import pytest

from pdserve import name_lookup
from pdserve.name_lookup import look_up
from pdserve.net.transport.sockets import connect_any
from pdserve.tracing.export.collector_http import HttpCollector
from pdserve.tracing.export.otel_env import OtelSettings
from tests.frontend.support import until


class StuckNames:
    """A name server that does not answer until `answer` is set."""

    def __init__(self):
        self.asked = 0
        self.answer = threading.Event()
        self.threads = []
        self.error = None

    def look_up(self, host, port, family=0, kind=0, proto=0, flags=0, **more):
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        self.asked += 1
        self.threads.append(threading.current_thread())
        self.answer.wait(20.0)
        if self.error is not None:
            raise self.error
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]


@pytest.fixture
def stuck(monkeypatch):
    names = StuckNames()
    # It is also what a loop asks, in a thread for which its end waits.
    monkeypatch.setattr(socket, "getaddrinfo", names.look_up)
    yield names
    names.answer.set()
    for thread in names.threads:
        thread.join(5.0)


async def post():
    client = HttpCollector("http://collector.example:4318/v1/traces", OtelSettings())
    for _ in range(3):
        got = await client.post(b"x", gzip=False, timeout=0.05)
        assert "does not answer" in got.failure
    await client.close()


async def dial():
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connect_any("seed.example", 7000)


@pytest.mark.parametrize("caller", [post, dial])
def test_the_loop_ends_while_the_name_server_is_silent(stuck, caller):
    release = threading.Timer(10.0, stuck.answer.set)
    release.start()
    with asyncio.Runner() as runner:
        runner.run(caller())
    release.cancel()
    release.join()
    assert not stuck.answer.is_set(), "the end of the loop has waited for the name server"
    assert stuck.asked == 1, "one lookup at a time"


async def test_those_who_ask_at_once_share_a_lookup(stuck):
    asking = [asyncio.ensure_future(look_up("c", 4318)) for _ in range(3)]
    await asyncio.sleep(0)
    asking[0].cancel()
    stuck.answer.set()
    for each in asking[1:]:
        ((*_, address),) = await each
        assert address == ("127.0.0.1", 4318)
    assert stuck.asked == 1
    await look_up("c", 4318)
    assert stuck.asked == 2


async def test_a_name_that_is_none(stuck):
    stuck.error = socket.gaierror(socket.EAI_NONAME, "not known")
    asking = asyncio.ensure_future(look_up("c", 4318))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    stuck.answer.set()
    with pytest.raises(OSError, match="not known"):
        await look_up("c", 4318)
    await until(lambda: not name_lookup._under_way[asyncio.get_running_loop()])
