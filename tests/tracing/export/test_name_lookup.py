"""Names of collectors are looked up without keeping the process alive."""

import asyncio
import socket
import threading

import pytest

from pdserve.tracing.export import collector_http
from pdserve.tracing.export.collector_http import HttpCollector
from pdserve.tracing.export.name_lookup import NameLookup
from pdserve.tracing.export.otel_env import OtelSettings
from tests.frontend.support import until


class StuckNames:
    """A name server that does not answer until `answer` is set."""

    def __init__(self):
        self.asked = 0
        self.answer = threading.Event()
        self.threads = []

    def look_up(self, host, port, **how):
        self.asked += 1
        self.threads.append(threading.current_thread())
        self.answer.wait(20.0)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]


@pytest.fixture
def stuck():
    names = StuckNames()
    yield names
    names.answer.set()
    for thread in names.threads:
        thread.join(5.0)


def test_the_loop_ends_while_the_name_server_is_silent(stuck, monkeypatch):
    monkeypatch.setattr(collector_http, "NameLookup", lambda: NameLookup(stuck.look_up))
    # This is what the loop itself would ask, in a thread for which its end waits.
    monkeypatch.setattr(socket, "getaddrinfo", stuck.look_up)

    async def post():
        client = HttpCollector("http://collector.example:4318/v1/traces", OtelSettings())
        for _ in range(3):
            got = await client.post(b"x", gzip=False, timeout=0.05)
            assert "does not answer" in got.failure
        await client.close()

    release = threading.Timer(10.0, stuck.answer.set)
    release.start()
    with asyncio.Runner() as runner:
        runner.run(post())
    release.cancel()
    release.join()
    assert not stuck.answer.is_set(), "the end of the loop has waited for the name server"
    assert stuck.asked == 1, "one lookup at a time"


async def test_the_addresses_of_a_name(stuck):
    names = NameLookup(stuck.look_up)
    asking = [asyncio.ensure_future(names.resolve("c", 4318)) for _ in range(3)]
    await asyncio.sleep(0)
    asking[0].cancel()
    stuck.answer.set()
    for each in asking[1:]:
        (found,) = await each
        assert (found["host"], found["port"], found["hostname"]) == ("127.0.0.1", 4318, "c")
    assert stuck.asked == 1
    await names.resolve("c", 4318)
    assert stuck.asked == 2
    await names.close()


async def test_a_name_that_is_none():
    def none(*name, **how):
        raise socket.gaierror(socket.EAI_NONAME, "not known")

    names = NameLookup(none)
    with pytest.raises(OSError, match="not known"):
        await names.resolve("c", 4318)
    asking = asyncio.ensure_future(names.resolve("c", 4318))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: not names._under_way)
