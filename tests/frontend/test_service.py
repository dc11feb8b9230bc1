"""Whole requests in their basic shapes, and the service's beginning and end."""

import asyncio
import json
import socket
from dataclasses import replace

import aiohttp
import pytest

from pdserve.errors import ConfigError
from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.service import FrontendService, read_api_keys
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from tests.frontend.support import (
    HELLO,
    MODEL,
    card,
    frontend,
    http,
    raw_connection,
    read_answer,
    text_of,
    tokens,
    until,
)
from tests.support.fake_backend import FakeBackend, Script

CHAT = "/v1/chat/completions"
TEXT = "The quick brown fox, naïve 你好 👍🏽 text"


async def test_a_chat_answer_has_openais_shape():
    async with frontend(Script(tokens=[*tokens(TEXT), 1], cached_tokens=3)) as client:
        answer = await client.chat(model=MODEL)
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    usage = answer["usage"]
    assert usage["completion_tokens"] == len(tokens(TEXT)) + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_a_stream_begins_with_the_role_and_ends_with_the_reason():
    async with frontend(Script(tokens=[*tokens(TEXT), 1])) as client:
        chunks = await client.chunks(stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(chunks) == TEXT
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(tokens(TEXT)) + 1
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_a_completion_echoes_and_indexes_prompts_times_choices():
    async with frontend(Script(tokens=tokens("abc"))) as client:
        answer = await client.complete(prompt=["x", "y"], n=2, echo=True, max_tokens=3)
        chunks = await client.chunks("/v1/completions", prompt=["x", "y"], n=2, max_tokens=3)
    texts = {choice["index"]: choice["text"] for choice in answer["choices"]}
    assert texts == {0: "xabc", 1: "xabc", 2: "yabc", 3: "yabc"}
    assert {index: text_of(chunks, index) for index in range(4)} == dict.fromkeys(range(4), "abc")


# ---------------------------------------------------------------- the end


async def test_shutdown_lets_running_requests_finish():
    script = Script(tokens=[*tokens("abcdefgh"), 1], interval=0.01)
    async with frontend(script) as client:
        whole = asyncio.ensure_future(client.chat())
        stream = asyncio.ensure_future(client.chunks())
        await until(lambda: len(client.backend.streams) == 2)
        await client.service.stop(drain_timeout=10)
        assert (await whole)["choices"][0]["message"]["content"] == "abcdefgh"
        assert text_of(await stream) == "abcdefgh"


async def test_while_draining_new_requests_are_refused_and_health_says_so():
    async with frontend(Script(tokens=tokens("ab"), interval=0.02)) as client:
        running = asyncio.ensure_future(client.chat(max_tokens=20))
        await until(lambda: client.backend.streams)
        stopping = asyncio.ensure_future(client.service.stop(drain_timeout=10))
        await asyncio.sleep(0)
        status, headers, answer = await client.post(CHAT, HELLO)
        assert (status, answer["error"]["code"]) == (503, "draining")
        assert headers["Retry-After"] == "1"
        assert headers["Connection"] == "close"
        status, _, body = await client.get("/health")
        assert (status, json.loads(body)["status"]) == (503, "draining")
        assert (await client.get("/live"))[0] == 200
        await running
        await stopping
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get("/live")


async def test_who_shares_its_port_leaves_new_connections_to_the_others_at_once():
    script = Script(tokens=tokens("ab"), interval=0.02)
    async with frontend(script, reuse_port=True) as client:
        running = asyncio.ensure_future(client.chat(max_tokens=20))
        await until(lambda: client.backend.streams)
        stopping = asyncio.ensure_future(client.service.stop(drain_timeout=10))
        for _ in range(5):  # turns of the loop
            await asyncio.sleep(0)
        with pytest.raises(aiohttp.ClientConnectorError):  # there are no others here
            await client.post(CHAT, HELLO)
        assert not stopping.done()
        assert (await running)["usage"]["completion_tokens"] == 20
        await stopping


@pytest.mark.parametrize("shares", [True, False])
async def test_an_end_that_is_undone_lets_streams_go_on_and_takes_new_requests(shares: bool):
    script = Script(tokens=tokens("ab"), interval=0.02)
    async with frontend(script, reuse_port=shares) as client:
        running = asyncio.ensure_future(client.chat(max_tokens=20))
        await until(lambda: client.backend.streams)
        stopping = asyncio.ensure_future(client.service.stop(drain_timeout=10))
        for _ in range(5):  # turns of the loop
            await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait({stopping})
        assert not running.done()
        await client.service.undo_stop()
        await client.service.undo_stop()  # once more changes nothing
        assert (await client.chat(max_tokens=2))["usage"]["completion_tokens"] == 2
        assert (await running)["usage"]["completion_tokens"] == 20


async def test_what_has_ended_is_started_again_on_its_port():
    async with frontend(Script(tokens=tokens("ab"))) as client:
        port = client.service.port
        await client.service.stop()
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get("/live")
        await client.service.undo_stop()
        assert client.service.port == port
        assert (await client.chat(max_tokens=2))["usage"]["completion_tokens"] == 2
        await client.service.stop()
        assert not client.service.listening


async def test_an_undo_while_connections_are_closed_waits_and_starts_again():
    async with frontend() as client, raw_connection(client):
        stopping = asyncio.ensure_future(client.service.stop())
        await until(lambda: client.service._closing is not None)
        stopping.cancel()
        await client.service.undo_stop()
        assert (await client.get("/live"))[0] == 200


@pytest.mark.parametrize("shares", [True, False])
async def test_who_waits_to_be_accepted_at_the_end_is_heard_out(shares: bool):
    """The kernel has the connection, nobody here: closing the listener would reset it."""
    async with frontend(reuse_port=shares) as client:
        with socket.create_connection(("127.0.0.1", client.service.port)) as peer:
            body = json.dumps(HELLO).encode()
            peer.sendall(http("POST", CHAT, headers=f"Content-Length: {len(body)}\r\n") + body)
            await client.service.stop()
            peer.settimeout(5.0)
            assert peer.recv(65536).startswith(b"HTTP/1.1 503 ")


async def test_those_who_come_while_others_are_heard_out_are_heard_or_refused():
    """Nobody is reset: each of many who dial again and again has an answer, or nobody to dial."""
    answers: list[bytes] = []
    body = json.dumps(HELLO).encode()
    asked = http("POST", CHAT, headers=f"Content-Length: {len(body)}\r\n") + body

    async def dial(port: int) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                return
            writer.write(asked)
            answers.append(await reader.read(65536))
            writer.close()

    async with frontend() as client:
        clients = [asyncio.ensure_future(dial(client.service.port)) for _ in range(50)]
        await until(lambda: len(answers) > 100)
        await client.service.stop()
        await asyncio.gather(*clients)
    assert all(answer.startswith((b"HTTP/1.1 503 ", b"HTTP/1.1 200 ")) for answer in answers)


async def test_served_models_have_their_metrics_before_the_first_request():
    async with frontend() as client:
        await client.service.usable_model()
        metrics = client.service.metrics
        assert {model for (model,), _ in metrics.e2e_request_latency} == {MODEL}
        assert {model for (model,), _ in metrics.num_requests_held} == {MODEL}


async def test_a_defect_in_what_is_told_each_second_stops_no_deadlines(monkeypatch):
    monkeypatch.setattr("pdserve.frontend.service.SWEEP", 0.01)
    swept: list[float] = []

    def fails():
        raise ValueError("a defect")

    async with frontend() as client:
        client.service.on_second = fails
        monkeypatch.setattr(client.service._server, "sweep", swept.append)
        await until(lambda: swept)


async def test_what_does_not_finish_in_time_is_answered_with_an_error():
    async with frontend(Script(tokens=tokens("la "), interval=0.001)) as client:
        whole = asyncio.ensure_future(client.post(CHAT, HELLO | {"max_tokens": 4000}))
        stream = asyncio.ensure_future(client.events(CHAT, HELLO | {"max_tokens": 4000}))
        await until(lambda: len(client.backend.streams) == 2)
        await until(lambda: all(sum(map(len, s._outputs)) for s in client.backend.streams))
        await client.service.stop(drain_timeout=0.05)
        status, _, answer = await whole
        assert (status, answer["error"]["code"]) == (503, "draining")
        assert json.loads((await stream)[-1].data)["error"]["code"] == "draining"
        assert client.backend.idle


async def test_requests_that_have_not_arrived_are_answered_too():
    async with frontend() as client, raw_connection(client) as (reader, writer):
        writer.write(http("POST", CHAT, headers="Content-Length: 100\r\n") + b"{")
        await until(lambda: client.service.active_requests == 1)
        await client.service.stop(drain_timeout=0.05)
        status, _, body = await read_answer(reader)
    assert (status, json.loads(body)["error"]["code"]) == (503, "draining")


async def test_a_connection_that_came_just_before_the_end_is_answered():
    async with frontend() as client, raw_connection(client) as (reader, writer):
        stopping = asyncio.ensure_future(client.service.stop())
        await asyncio.sleep(0.05)  # the end has begun, and nothing was said
        body = json.dumps(HELLO).encode()
        writer.write(http("POST", CHAT, headers=f"Content-Length: {len(body)}\r\n") + body)
        status, _, answer = await read_answer(reader)
        await stopping
    assert (status, json.loads(answer)["error"]["code"]) == (503, "draining")


async def test_idle_connections_do_not_delay_the_end():
    async with frontend() as client, raw_connection(client) as (reader, writer):
        writer.write(http("GET", "/live"))
        await read_answer(reader)
        async with asyncio.timeout(20):
            await client.service.stop()
        assert await reader.read() == b""
        await client.service.stop()  # once more changes nothing


# ---------------------------------------------------------------- the beginning


def service(**config):
    return FrontendService(FrontendConfig(**config), FakeBackend({MODEL: card()}))


async def test_models_can_be_made_ahead_and_one_that_cannot_is_named():
    async with frontend() as client:
        await client.service.make_models()
    async with frontend(models={"bad": card(name="bad", chat_template="{% for %}")}) as client:
        with pytest.raises(ConfigError, match=r"^model 'bad' cannot be served: the model's chat"):
            await client.service.make_models()


async def test_one_model_that_cannot_be_made_is_in_nobodys_way(caplog):
    bad = card(name="bad", chat_template="{% for %}")
    async with frontend(models={"bad": bad, MODEL: card()}) as client:
        for _ in range(2):
            usable = await client.service.usable_model()
            assert usable is not None
            assert usable.name == MODEL
    assert caplog.text.count("model bad cannot be served") == 1
    async with frontend(models={"bad": bad}) as client:
        assert await client.service.usable_model() is None


async def test_a_port_that_is_taken_is_a_config_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"\d: Address already in use; choose another --port"):
            await service(port=taken.getsockname()[1]).start()


async def test_an_address_that_is_not_ours_is_a_config_error():
    with pytest.raises(ConfigError, match=r"cannot listen.*choose another --host"):
        await service(port=0, host="192.0.2.1").start()


async def test_settings_are_checked_before_anything_is_opened(tmp_path):
    with pytest.raises(ConfigError):
        service(max_in_flight=0)
    with pytest.raises(ConfigError, match=r"--api-keys-file .* cannot be read.*docs/api-keys\.md"):
        await service(port=0, api_keys_file=tmp_path / "none").start()


CLEAR = 'key = "0123456789abcdef"'
DIGEST = f'key_sha256 = "{"0" * 64}"'


@pytest.mark.parametrize(
    ("entry", "mode", "said"),
    [
        (CLEAR, 0o644, "others can read its keys"),
        (CLEAR, 0o640, "others can read its keys"),
        (CLEAR, 0o620, "others can change it"),
        (DIGEST, 0o666, "others can change it"),
        (CLEAR, 0o600, ""),
        (CLEAR, 0o400, ""),
        (DIGEST, 0o644, ""),
    ],
)
def test_a_key_file_is_its_owners_business(entry, mode, said, tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(f'[[key]]\n{entry}\ntenant = "t"\n')
    file.chmod(mode)
    if not said:
        assert len(read_api_keys(file)) == 1
        return
    with pytest.raises(ConfigError, match=f"mode {mode:04o}: {said}; do `chmod 600"):
        read_api_keys(file)


def test_a_key_that_could_be_guessed_is_warned_about(tmp_path, caplog):
    file = tmp_path / "keys.toml"
    other = '[[key]]\nkey = "sk-12345678"\ntenant = "t"\n'
    file.write_text(f'[[key]]\n{CLEAR}\ntenant = "t"\n{other}')
    file.chmod(0o600)
    assert len(read_api_keys(file)) == 2
    assert "key 2: it has fewer than 16 characters" in caplog.text
    assert "key 1" not in caplog.text
    assert "12345678" not in caplog.text


async def test_two_frontends_may_share_a_port():
    first = service(port=0, reuse_port=True)
    await first.start()
    second = service(port=first.port, reuse_port=True)
    await second.start()
    assert second.port == first.port
    await second.stop(0)
    await first.stop(0)


async def test_models_are_made_before_the_first_request(monkeypatch):
    monkeypatch.setattr("pdserve.frontend.service.SWEEP", 0.01)
    async with frontend(models={}) as client:
        tiny = card()
        client.backend.models = {MODEL: tiny}
        await until(lambda: client.service._models.get_nowait(tiny))


def test_a_tokenizer_that_differs_is_a_degradation():
    degradations = Degradations(Metrics())
    backend = FakeBackend({MODEL: card()}, Script())
    frontend = FrontendService(FrontendConfig(port=0), backend, degradations=degradations)
    frontend._note_difference("model m: other ids")
    assert degradations.reasons()["tokenizer_differs"] == "model m: other ids"


async def test_stuck_text_work_is_a_degradation_until_it_ends():
    metrics = Metrics()
    degradations = Degradations(metrics)
    backend = FakeBackend({MODEL: card()}, Script())
    config = FrontendConfig(port=0)
    frontend = FrontendService(
        config, backend, metrics, degradations.reasons(), degradations=degradations
    )
    await frontend.start()
    tell = frontend._pool.on_stuck
    usual = frontend._pool.stats()
    tell(replace(usual, given_up=1, stuck=1))
    assert "restart" in degradations.reasons()["text_stuck"]
    assert (metrics.text_jobs_given_up.value, metrics.text_threads_stuck.value) == (1, 1)
    tell(replace(usual, given_up=1))
    assert "text_stuck" not in degradations.reasons()
    assert (metrics.text_jobs_given_up.value, metrics.text_threads_stuck.value) == (1, 0)
    await frontend.stop(0)
