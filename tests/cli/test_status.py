import contextlib
import http.server
import json
import socket
import threading
import time

import pytest

from pdserve.cli.main import main
from pdserve.cli.status import OPTIONS
from pdserve.launch import exit_codes
from pdserve.launch.config.options import BY_NAME


@pytest.fixture
def server():
    """Answers `/health` with whatever `body` and `status` are set to."""

    class Handler(http.server.BaseHTTPRequestHandler):
        body = b"{}"
        status = 200

        def do_GET(self):
            self.send_response(self.status)
            self.send_header("Content-Length", str(len(self.body)))
            self.end_headers()
            self.wfile.write(self.body)

        def log_message(self, *arguments):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield Handler, f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_its_options_are_those_of_serving():
    assert set(OPTIONS) <= set(BY_NAME)


def test_a_server_without_a_cluster_is_asked_over_http(server, capsys):
    handler, address = server
    handler.status = 503
    handler.body = json.dumps(
        {
            "status": "loading",
            "reason": "weights",
            "version": "9",
            "degraded": {"no_uvloop": "slow"},
        }
    ).encode()
    assert main(["status", "--url", address]) == exit_codes.OK
    text = capsys.readouterr().out
    assert f"{address} is loading: weights" in text
    assert "degraded: no_uvloop: slow" in text
    assert text.splitlines()[1] == "pdserve 9", "a port for probes does not say more"
    assert main(["status", "--json", "--url", f"http://{address}/"]) == exit_codes.OK
    assert json.loads(capsys.readouterr().out)["status"] == "loading"


STRANGE = [
    *(b"hello", b"[]", b'{"ok": 1}', b'{"status": 1}', b"[" * 100_000, b'{"status": "\\ud800"}'),
    *(b'{"status": "ok", "degraded": [1]}', b'{"status": "ok", "degraded": {"a": 1}}'),
    *(b'{"status": "ok", "uptime_seconds": "x"}', b'{"status": "ok", "uptime_seconds": 1e999}'),
    *(b'{"status": "ok", "active_requests": NaN}', b'{"status": "ok", "memory_bytes": "x"}'),
]


@pytest.mark.parametrize("body", STRANGE)
def test_a_stranger_is_told_apart(server, capsys, body):
    handler, address = server
    handler.body = body
    assert main(["status", "--url", address]) == exit_codes.FAILED
    assert "is no pdserve" in capsys.readouterr().err


def test_a_proxy_is_not_asked_for_this_machine(server, capsys, monkeypatch):
    handler, address = server
    handler.body = b'{"status": "ok"}'
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert main(["status", "--url", address]) == exit_codes.OK
    assert f"{address} is ok" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["_MOST_BODY", "_HTTP_TIMEOUT"])
def test_an_answer_without_end_is_not_waited_for(server, capsys, monkeypatch, what):
    handler, address = server
    monkeypatch.setattr(f"pdserve.cli.status.{what}", {"_MOST_BODY": 1 << 16}.get(what, 0.2))

    def babble(self):
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(b" " if what == "_HTTP_TIMEOUT" else b" " * 8192)
                time.sleep(0.01)

    monkeypatch.setattr(handler, "do_GET", babble)
    assert main(["status", "--url", address]) == exit_codes.FAILED
    assert "does not end within" in capsys.readouterr().err


def test_nobody_and_nonsense_are_told_in_one_line(capsys):
    assert main(["status", "--url", "http://127.0.0.1:1"]) == exit_codes.FAILED
    assert main(["status", "--url", "file:///etc/passwd"]) == exit_codes.USAGE
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "no server answers" in errors[0]
    assert "--url" in errors[1]


def test_what_speaks_no_http_is_told_in_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"\x10\x00\x00\x00 binary\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert main(["status", "--url", url]) == exit_codes.FAILED
        thread.join()
    (line,) = capsys.readouterr().err.splitlines()
    assert "does not speak HTTP" in line
