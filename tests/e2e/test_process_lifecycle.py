"""How a real process begins, survives and ends: keys, hang-ups, crashes, signals, mistakes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from pdserve.launch import exit_codes
from pdserve.protocols.sse import SseDecoder
from tests.e2e.server import PATIENCE, Server, serving
from tests.support.metrics_page import find

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHAT = "/v1/chat/completions"
ENDLESS = {"max_tokens": 1900, "ignore_eos": True, "stream": True}
LONG = ENDLESS | {"max_tokens": 300}
PACED = ("--engine", "instant", "--engine-option", "tokens_per_second=20")
"""An engine whose answers take as long as a test needs."""


@contextlib.contextmanager
def asking(server: Server, headers=None, **fields) -> Iterator[http.client.HTTPResponse]:
    """A chat request whose answer is being received."""
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8} | fields
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    try:
        sent = {"Content-Type": "application/json", "Connection": "close"} | (headers or {})
        connection.request("POST", CHAT, json.dumps(body), sent)
        with connection.getresponse() as response:
            yield response
    finally:
        connection.close()


def ask(server: Server, headers=None, **fields):
    """Status and decoded answer."""
    with asking(server, headers, **fields) as response:
        return response.status, json.loads(response.read())


def events(response: http.client.HTTPResponse):
    """The stream's events, as they come."""
    decoder = SseDecoder()
    while data := response.read1():
        for event in decoder.feed(data):
            yield event.data


# ---------------------------------------------------------------------- one server, many guests


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's key file."""
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text('[[key]]\nkey = "sk-alice-0123456789"\ntenant = "alice"\n')
    keys.chmod(0o600)
    return keys


@pytest.fixture(scope="module")
def server(tiny_model: Path, keys: Path) -> Iterator[Server]:
    """A server with a key file and a second listener."""
    flags = ("--api-keys-file", str(keys), "--metrics-port", "0", "--threads", "1")
    with serving(tiny_model, *flags) as server:
        yield server


KEY = {"Authorization": "Bearer sk-alice-0123456789"}


def test_without_a_known_key_nothing_is_computed(server):
    before = server.metric("pdserve_computed_tokens_total")
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        status, answer = ask(server, headers)
        assert status == 401
        assert answer["error"]["code"] == "invalid_api_key"
    assert server.metric("pdserve_computed_tokens_total") == before
    assert ask(server, KEY)[0] == 200


def test_the_ready_line_asks_for_a_key(server):
    assert "YOUR_API_KEY" in server.wait_for_line("ready: ").string


def test_the_second_listener_serves_probes_and_nothing_else(server):
    port = int(server.wait_for_line(r"probes at http://\S+:(\d+)")[1])
    assert server.get("/live", port)[0] == 200
    assert server.get("/health", port)[1]["status"] == "ok"
    assert find(server.get("/metrics", port)[1], "pdserve_engine_ready") == 2
    assert server.get("/v1/models", port)[0] == 404
    assert server.get("/metrics?names=sglang", port)[0] == 400


def test_both_listeners_have_vllms_names(server):
    assert ask(server, KEY)[0] == 200
    for port in (None, int(server.wait_for_line(r"probes at http://\S+:(\d+)")[1])):
        page = server.get("/metrics?names=vllm", *(() if port is None else (port,)))[1]
        assert find(page, 'vllm:num_requests_running{engine="0",model_name="tiny"}') == 0
        assert (find(page, 'vllm:e2e_request_latency_seconds_count{engine="0"}') or 0) >= 1
        assert find(page, "pdserve_engine_ready") is None


def test_the_memory_of_the_engine_is_told(server):
    engine = psutil.Process(server.core().pid).memory_info().rss
    page = server.get("/metrics")[1]
    told = find(page, "pdserve_engine_process_resident_memory_bytes")
    assert told == pytest.approx(engine, rel=0.2)
    assert (find(page, "pdserve_engine_process_cpu_seconds_total") or 0) > 0
    own = psutil.Process(server.process.pid).memory_info().rss
    assert server.get("/health")[1]["memory_bytes"] == pytest.approx(own + engine, rel=0.2)


def test_keys_are_read_again_on_a_hangup(server, keys):
    with keys.open("a") as file:
        file.write('[[key]]\nkey = "sk-bob-0123456789"\ntenant = "bob"\n')
    bob = {"Authorization": "Bearer sk-bob-0123456789"}
    assert ask(server, bob)[0] == 401
    os.kill(server.process.pid, signal.SIGHUP)
    server.wait_for_line("API keys read again")
    assert ask(server, bob)[0] == 200


def test_who_hangs_up_frees_everything(server):
    # Several choices: one is over before a busy machine has answered the next question.
    with asking(server, KEY, n=8, **ENDLESS) as response:
        next(events(response))
        server.wait_for_metric("pdserve_http_requests_in_flight", 1, timeout=5)
    server.wait_for_metric("pdserve_http_requests_in_flight", 0, timeout=5)
    server.wait_for_metric("pdserve_num_requests_running", 0, timeout=5)
    server.wait_for_metric("pdserve_kv_blocks_used", 0, timeout=5)
    assert server.metric('pdserve_requests_total{outcome="cancelled"}') >= 1


def test_a_killed_engine_comes_back_and_goes_on_with_its_requests(server):
    restarts = server.metric("pdserve_engine_restarts_total")
    tokens = server.metric("pdserve_generation_tokens_total")
    with contextlib.ExitStack() as stack:
        streams = [events(stack.enter_context(asking(server, KEY, **LONG))) for _ in range(4)]
        for stream in streams:
            next(stream)
        server.core().kill()
        for stream in streams:
            told = [json.loads(data) for data in stream if data != "[DONE]"]
            assert [chunk for chunk in told if "error" in chunk] == []
            assert told[-1]["choices"][0]["finish_reason"] == "length"
    # Both workers have their engines in that process.
    server.wait_for_metric("pdserve_engine_ready", 2)
    assert server.metric("pdserve_engine_restarts_total") == restarts + 2
    server.wait_healthy()  # the frontend hears of it as it would of a worker elsewhere
    assert ask(server, KEY)[0] == 200
    assert server.metric("pdserve_generation_tokens_total") >= tokens


def test_the_loop_is_never_blocked_by_loading_or_computing(server):
    with asking(server, KEY, max_tokens=500, ignore_eos=True) as response:
        response.read()
    # Loading, computing and a restart have all happened by now. A machine that stands still delays
    # the loop too; what must not be is the library that computes, in the process that answers.
    assert not any("libtorch" in m.path for m in psutil.Process(server.process.pid).memory_maps())
    assert server.metric("pdserve_event_loop_lag_max_seconds") < 5 + server.starved()


# ---------------------------------------------------------------------- ends


def test_ctrl_c_lets_requests_finish_and_exits_with_0(tiny_model):
    with serving(tiny_model, *PACED) as server:
        with asking(server, max_tokens=20, stream=True) as response:
            stream = events(response)
            next(stream)
            os.kill(server.process.pid, signal.SIGINT)
            server.wait_for_line("SIGINT: finishing 1 request;")
            rest = list(stream)
        assert rest[-1] == "[DONE]"
        assert len([data for data in rest if '"content":' in data]) >= 18
        assert server.process.wait(PATIENCE) == exit_codes.OK
        assert "Traceback" not in "\n".join(server.lines)


def test_a_signal_to_every_process_still_drains(tiny_model):
    """As service managers and batch systems send it: the engine leaves the decision to its node."""
    with serving(tiny_model, *PACED) as server:
        with asking(server, max_tokens=20, stream=True) as response:
            stream = events(response)
            next(stream)
            for pid in (server.core().pid, server.process.pid):
                os.kill(pid, signal.SIGTERM)
            assert list(stream)[-1] == "[DONE]"
        assert server.process.wait(PATIENCE) == exit_codes.OK
        assert server.lines[-1].endswith("closed")


def test_a_draining_server_refuses_new_requests(tiny_model):
    with serving(tiny_model, *PACED) as server, asking(server, **ENDLESS) as response:
        next(events(response))
        os.kill(server.process.pid, signal.SIGTERM)
        server.wait_for_line("SIGTERM: finishing 1 request;")
        status, answer = ask(server)
        assert status == 503
        assert answer["error"]["code"] == "draining"
        assert server.get("/health")[0] == 503


def test_who_does_not_finish_in_time_is_told_so(tiny_model):
    with serving(tiny_model, *PACED, "--drain-timeout", "200ms") as server:
        with asking(server, max_tokens=1000, stream=True) as response:
            stream = events(response)
            next(stream)
            os.kill(server.process.pid, signal.SIGTERM)
            last = list(stream)[-1]
        assert "shutting down" in json.loads(last)["error"]["message"]
        assert server.process.wait(PATIENCE) == exit_codes.OK


def test_a_second_ctrl_c_ends_at_once(tiny_model):
    with serving(tiny_model, *PACED) as server, asking(server, **ENDLESS) as response:
        stream = events(response)
        next(stream)
        server._remember_children()
        os.kill(server.process.pid, signal.SIGINT)
        server.wait_for_line("SIGINT: finishing")
        for _ in range(20):  # a second's worth of tokens: it serves on
            next(stream)
        os.kill(server.process.pid, signal.SIGINT)
        assert server.process.wait(5) == exit_codes.INTERRUPTED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_echoes_of_a_signal_do_not_change_the_exit_status(tiny_model, number):
    with serving(tiny_model, "--engine", "instant") as server:
        server._remember_children()
        end = time.monotonic() + 0.25  # less than what makes it another wish
        while server.process.poll() is None and time.monotonic() < end:
            server.process.send_signal(number)
        # Handled late, on a machine that stood still, an echo is a second wish; it is never deadly.
        ends = (exit_codes.OK, exit_codes.INTERRUPTED)
        assert server.process.wait(PATIENCE) in ends


def test_a_killed_server_takes_its_engine_along(tiny_model):
    with serving(tiny_model, *PACED) as server:
        core = server.core()
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        psutil.wait_procs([core], timeout=10)
        assert not core.is_running()


def test_a_signal_while_loading_ends_in_order(tiny_model):
    with Server(tiny_model, "--threads", "1") as server:
        server.wait_for_line("listening on")
        status, health = server.get("/health")
        assert (status, health["status"]) == (503, "loading")
        assert health["reason"].startswith("starting")
        status, answer = ask(server)
        assert (status, answer["error"]["code"]) == (503, "not_ready")
        assert server.end(signal.SIGTERM) == exit_codes.OK
        assert not any("ready: " in line for line in server.lines)


def test_an_engine_that_dies_too_often_ends_the_server(tiny_model):
    with serving(tiny_model, *PACED) as server:
        gone = (OSError, http.client.HTTPException)
        for death in range(1, 7):
            with contextlib.suppress(*gone):
                server.wait_for_metric("pdserve_engine_ready", 1)
                server.core().kill()
                server.wait_for_metric("pdserve_engine_restarts_total", death)
        assert server.process.wait(PATIENCE) == exit_codes.ENGINE_FAILED


# ---------------------------------------------------------------------- mistakes


def test_a_taken_port_is_one_clear_line(tiny_model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Server(tiny_model, "--port", str(port), "--engine", "instant") as server:
            assert server.process.wait(PATIENCE) == exit_codes.CANNOT_LISTEN
            server.wait_for_line(f"cannot listen on 127.0.0.1:{port}.*in use.*--port")
            assert "Traceback" not in "\n".join(server.lines)


def broken(tmp_path, tiny_model, **changes):
    """A copy of the model with other values in its configuration."""
    folder = tmp_path / "broken"
    folder.mkdir()
    for path in tiny_model.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((tiny_model / "config.json").read_text()) | changes
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_that_cannot_be_served_is_one_clear_line(tiny_model, tmp_path):
    folder = broken(tmp_path, tiny_model, model_type="mamba", architectures=["MambaForCausalLM"])
    with Server(folder) as server:
        assert server.process.wait(PATIENCE) == exit_codes.USAGE
        server._reader.join(PATIENCE)
        complaints = [line for line in server.lines if "ERROR" in line]
        assert len(complaints) == 1
        assert "mamba" in complaints[0].lower()
        assert "Traceback" not in "\n".join(server.lines)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", "{}", "tokenizer.json cannot be used"),
        (
            "tokenizer_config.json",
            '{"chat_template": "{% for %}"}',
            "the model's chat template does not compile",
        ),
    ],
)
def test_a_model_that_has_no_use_for_text_is_never_ready(
    tiny_model, tmp_path, file, content, words
):
    folder = broken(tmp_path, tiny_model)
    (folder / file).unlink(missing_ok=True)
    (folder / file).write_text(content)
    with Server(folder, "--engine", "instant", "--engine-option", "tokens=5,6") as server:
        assert server.process.wait(PATIENCE) == exit_codes.USAGE
        server._reader.join(PATIENCE)
        assert words in server.lines[-1]
        assert not any("ready: " in line for line in server.lines)


def test_debug_shows_where_a_start_failed(tmp_path):
    with Server(tmp_path / "nothing", "--log-level", "debug") as server:
        assert server.process.wait(PATIENCE) == exit_codes.USAGE
        server.wait_for_line("no such directory")
        server.wait_for_line("Traceback")


def test_a_hangup_without_a_key_file_says_that_there_is_none(tiny_model):
    with serving(tiny_model, "--engine", "instant") as server:
        os.kill(server.process.pid, signal.SIGHUP)
        server.wait_for_line("SIGHUP: there is no --api-keys-file to read again")


def test_json_logs_are_json_from_the_first_to_the_last_line(tiny_model):
    with Server(tiny_model, "--engine", "instant", "--log-format", "json") as server:
        server.wait_for_line('"message": "ready: ')
        assert server.end() == exit_codes.OK
        server._reader.join(PATIENCE)
        records = [json.loads(line) for line in server.lines]
        assert records[-1]["message"] == "closed"
        assert {"time", "level", "logger"} <= records[0].keys()


def test_what_runs_poorer_shows_as_degraded_and_still_serves(tiny_model, tmp_path):
    (tmp_path / "uvloop.py").write_text("raise ImportError('not for this machine')")
    environ = {"PDSERVE_PURE": "1", "PYTHONPATH": str(tmp_path)}
    with serving(tiny_model, "--engine", "instant", **environ) as server:
        assert ask(server)[0] == 200
        assert server.metric('pdserve_degraded{reason="no_uvloop"}') == 1
        assert server.metric('pdserve_degraded{reason="pure_twins"}') == 1
        server.wait_for_line(r"degraded \(pure_twins\)")
        degraded = server.get("/health")[1]["degraded"]
        assert degraded.keys() == {"pure_twins", "no_uvloop"}
        assert "not for this machine" in degraded["no_uvloop"]
        assert server.end() == exit_codes.OK
