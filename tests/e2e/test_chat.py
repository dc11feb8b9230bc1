"""`pdserve chat` as a person and as a pipe use it, against a real server."""

from __future__ import annotations

import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from pdserve.launch import exit_codes
from tests.e2e.server import PATIENCE, Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHAT = (sys.executable, "-m", "pdserve", "chat")


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    flags = ("--engine", "instant", "--engine-option", "tokens_per_second=30")
    with serving(tiny_model, *flags) as server:
        yield server


@pytest.fixture
def environ(tmp_path):
    return os.environ | {"XDG_STATE_HOME": str(tmp_path), "TERM": "dumb"}


def piped(text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CHAT, *flags], input=text, capture_output=True, text=True, timeout=PATIENCE
    )


def test_a_pipe_gets_one_answer(server):
    done = piped("hello\n", "--url", server.url, "--max-tokens", "5")
    assert done.returncode == exit_codes.OK, done.stderr
    assert done.stdout.strip()
    assert done.stdout.endswith("\n")
    assert done.stderr == ""
    again = piped("hello\n", "--url", server.url + "/v1/", "--max-tokens", "5")
    assert again.stdout == done.stdout


@pytest.mark.parametrize("said", ["", "  \n"])
def test_an_empty_pipe_is_a_mistake(server, said):
    done = piped(said, "--url", server.url)
    assert done.returncode == exit_codes.FAILED
    assert done.stderr == "pdserve: nothing to say: standard input is empty\n"


def test_without_a_server_the_message_says_how_to_start_one():
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    done = piped("hello", "--url", f"http://127.0.0.1:{port}")
    assert done.returncode == exit_codes.FAILED
    assert "start one with `pdserve`" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_refusal_is_told_in_the_servers_words(server):
    done = piped("hello", "--url", server.url, "--model", "nobody")
    assert done.returncode == exit_codes.FAILED
    assert "refused (404)" in done.stderr
    assert "nobody" in done.stderr


@pytest.mark.parametrize("url", ["ftp://x", "http://", "", "http://x:99999", "no where"])
def test_what_is_no_address_is_a_mistake(url):
    done = piped("hello", "--url", url)
    assert done.returncode == exit_codes.USAGE
    assert done.stderr == f"pdserve: --url: {url!r} is not a URL such as http://127.0.0.1:8000\n"


def test_an_address_may_come_without_its_scheme(server):
    done = piped("hello\n", "--url", server.url.removeprefix("http://"), "--max-tokens", "5")
    assert done.returncode == exit_codes.OK, done.stderr


def test_input_that_is_no_text_is_a_mistake(server):
    done = subprocess.run(
        [*CHAT, "--url", server.url], input=b"a\xff\xfe", capture_output=True, timeout=PATIENCE
    )
    assert done.returncode == exit_codes.FAILED
    assert done.stderr == b"pdserve: standard input is not text in UTF-8\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no full device")
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("command", ["chat", "config"])
def test_an_output_that_takes_no_more_is_one_clear_line(server, command, buffered):
    flags = ("--url", server.url) if command == "chat" else ("--config", "none")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*CHAT[:-1], command, *flags],
            input="hello",
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
            env=os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"},
        )
    assert done.returncode == exit_codes.FAILED
    assert done.stderr == "pdserve: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    "answer", [b"<html>", b"[]", b"{}", b'{"data": [{}]}', b'{"data": 5}', b'{"data": [{"id": 1}]}']
)
def test_another_kind_of_server_is_told_apart(answer):
    def serve_one(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(answer) + answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=serve_one, args=(listener,))
        thread.start()
        done = piped("hello", "--url", url)
        thread.join(PATIENCE)
    assert done.returncode == exit_codes.FAILED
    assert done.stderr == f"pdserve: what answers at {url} does not speak the OpenAI API\n"


class Terminal:
    """A person at a terminal, chatting."""

    def __init__(self, *flags: str, environ: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*CHAT, *flags], stdin=slave, stdout=slave, stderr=slave, env=environ
        )
        os.close(slave)
        self._unread = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str) -> None:
        """Read on until `text`; what came before it is forgotten."""
        deadline = time.monotonic() + PATIENCE
        while text not in self._unread:
            ready, _, _ = select.select([self._master], [], [], deadline - time.monotonic())
            assert ready, f"{text!r} did not appear in {self._unread!r}"
            self._unread += os.read(self._master, 4096).decode(errors="replace")
        self._unread = self._unread.partition(text)[2]

    def interrupt_until(self, text: str) -> None:
        """Press Ctrl-C until `text` appears: line editing misses it just before it listens."""
        while text not in self._unread:
            os.kill(self.process.pid, signal.SIGINT)
            if select.select([self._master], [], [], 0.5)[0]:
                self._unread += os.read(self._master, 4096).decode(errors="replace")

    def wait_for_words(self, count: int) -> None:
        """Read `count` characters of whatever comes."""
        while len(self._unread) < count:
            self._unread += os.read(self._master, 4096).decode(errors="replace")
        self._unread = self._unread[count:]


def test_a_person_chats_stops_an_answer_and_leaves(server, environ, tmp_path):
    with Terminal("--url", server.url, "--max-tokens", "900", environ=environ) as terminal:
        terminal.wait_for("tiny at ")
        terminal.wait_for("> ")
        terminal.type("hello\n")
        terminal.wait_for("hello\r\n")
        terminal.wait_for_words(10)
        assert server.metric("pdserve_http_requests_in_flight") == 1
        os.kill(terminal.process.pid, signal.SIGINT)
        terminal.wait_for("(stopped)")
        server.wait_for_metric("pdserve_http_requests_in_flight", 0)
        terminal.wait_for("> ")
        terminal.type("/help\n")
        terminal.wait_for("/reset")
        terminal.wait_for("> ")
        terminal.type("/reset\n")
        terminal.wait_for("(a new conversation)")
        terminal.wait_for("> ")
        terminal.type("/quit\n")
        assert terminal.process.wait(PATIENCE) == exit_codes.OK
    history = tmp_path / "pdserve" / "chat_history"
    assert "hello" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_ctrl_d_leaves_and_ctrl_c_at_the_prompt_does_not(server, environ):
    with Terminal("--url", server.url, environ=environ) as terminal:
        terminal.wait_for("> ")
        terminal.interrupt_until("Ctrl-D or /quit leaves")
        terminal.wait_for("leaves")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(PATIENCE) == exit_codes.OK
