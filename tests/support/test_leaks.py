"""The leak fixtures fire on each kind of leak, and stay silent for tests that clean up."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LEAKY = '''
import asyncio, os, socket, subprocess, sys, threading, time
import pytest
from tests.support import leaks

leaks.GRACE_S = 0.1  # nothing here goes away by itself
kept = []

class Pool:
    """Stands in for a block pool: three numbers and a self-check."""
    def __init__(self, used=0, quarantined=0, sound=True):
        self.used, self.quarantined, self.sound = used, quarantined, sound
    def check(self):
        assert self.sound, "books do not balance"
    def counts(self):
        return self

def test_leaks_a_socket():
    kept.append(socket.socket())

def test_leaks_a_memfd():
    kept.append(os.memfd_create("blocks"))

def test_leaks_a_thread():
    stop = threading.Event()
    threading.Thread(target=stop.wait, args=(20,), name="forgotten", daemon=True).start()

def test_leaks_a_process():
    kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"]))

def test_leaks_a_zombie():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)

async def test_leaks_a_task():
    kept.append(asyncio.create_task(asyncio.sleep(20), name="forgotten"))

async def test_leaks_a_connection():
    loop = asyncio.get_running_loop()
    server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
    sock = socket.create_connection(server.sockets[0].getsockname())
    kept.extend([server, sock])

async def test_leaks_an_exception():
    async def fails():
        raise OSError("nobody asked")
    task = asyncio.create_task(fails())
    await asyncio.sleep(0)
    del task

def test_leaks_a_used_block(watch_blocks):
    watch_blocks(Pool(used=1))

def test_leaks_a_quarantined_block(watch_blocks):
    watch_blocks(Pool(quarantined=1))

def test_leaks_unsound_books(watch_blocks):
    watch_blocks(Pool(sound=False))
'''

CLEAN = """
import asyncio, os, socket, subprocess, sys, threading
import pytest

@pytest.fixture
async def server():
    started = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    background = asyncio.create_task(asyncio.sleep(20))
    yield started.sockets[0].getsockname()
    background.cancel()
    started.close()
    await started.wait_closed()

def test_plain():
    with socket.socket():
        subprocess.run([sys.executable, "-c", ""], check=True)
    thread = threading.Thread(target=int)
    thread.start()

def test_late_thread():
    threading.Timer(0.2, int).start()

async def test_server(server):
    reader, writer = await asyncio.open_connection(*server)
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    await asyncio.to_thread(int)

async def test_child():
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    assert await child.wait() == 0

async def test_uses_uvloop():
    uvloop = pytest.importorskip("uvloop")
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
    assert asyncio.get_running_loop().get_debug()
"""

INI = """
[pytest]
asyncio_mode = auto
asyncio_debug = true
asyncio_default_fixture_loop_scope = function
filterwarnings = error
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Runs one test file under the suite's own conftest, in a process of its own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run_file(source: str) -> pytest.RunResult:
        pytester.makeini(INI)
        pytester.makepyfile(source)
        return pytester.runpytest_subprocess("-v", "-p", "tests.conftest", "-p", "no:cacheprovider")

    return run_file


def test_each_leak_fails_its_own_test_and_no_other(run) -> None:
    result = run(LEAKY)
    # Each body passes; the error comes from the fixture that looks at what is left.
    leaks = LEAKY.count("test_leaks_")
    result.assert_outcomes(passed=leaks, errors=leaks)
    out = result.stdout.str()
    for words in (
        "socket:[",
        "/memfd:blocks",
        "thread forgotten",
        "time.sleep(20)",
        "(zombie)",
        "task <Task pending name='forgotten'",
        "unclosed resource <TCPServer",
        "nobody asked",
        "blocks left behind",
        "books do not balance",
    ):
        assert words in out, words


def test_clean_tests_pass(run) -> None:
    run(CLEAN).assert_outcomes(passed=CLEAN.count("def test_"))
