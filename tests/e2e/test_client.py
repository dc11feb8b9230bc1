"""The client against a real server."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pdserve.client import Client, InvalidRequest, NotFound
from tests.e2e.server import PATIENCE, Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

BENCH = (sys.executable, "-m", "pdserve", "bench")
EXAMPLE = Path(__file__).parents[2] / "examples" / "client.py"


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    flags = ("--engine", "instant", "--engine-option", "tokens_per_second=200")
    with serving(tiny_model, *flags) as server:
        yield server


async def test_everything_that_a_server_can_be_asked(server):
    async with Client(server.url + "/v1") as client:
        (model,) = await client.models()
        assert (await client.model(model.id)).max_model_len == model.max_model_len
        whole = await client.chat("hello", max_tokens=5, seed=1, temperature=0)
        assert whole.model == model.id
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 5
        async with client.chat_stream("hello", max_tokens=5, seed=1, temperature=0) as stream:
            async for _ in stream:
                pass
        assert stream.text == whole.choices[0].message.content
        assert stream.usage is not None
        assert stream.usage.completion_tokens == 5
        assert stream.finish_reason == "length"
        assert stream.headers["x-pdserve-worker"]
        completion = await client.complete([5, 6, 7], max_tokens=3, request_id="mine")
        assert completion.id.endswith("mine")
        said = [text async for text in client.complete_stream("a", max_tokens=3).texts()]
        assert said
        tokens = (await client.tokenize("hello")).tokens
        assert await client.detokenize(tokens) == "hello"
        assert (await client.tokenize(messages="hello")).count > len(tokens)
        assert (await client.route("hello")).model == model.id
        assert (await client.health()).status == "ok"
        assert await client.version()


async def test_its_errors(server):
    async with Client(server.url) as client:
        with pytest.raises(NotFound, match="nobody"):
            await client.chat("hello", model="nobody")
        with pytest.raises(InvalidRequest) as caught:
            await client.chat("hello", temperature=9)
    assert caught.value.param == "temperature"


async def test_a_stream_that_is_left_ends_at_the_server(server):
    async with Client(server.url) as client:
        async with client.chat_stream("hello", max_tokens=1500, ignore_eos=True) as stream:
            async for _ in stream:
                break
        name = "pdserve_http_requests_in_flight"
        await asyncio.to_thread(server.wait_for_metric, name, 0)


def test_the_example(server):
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), server.url], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    code = [line for line in EXAMPLE.read_text().split('"""')[2].splitlines() if line]
    assert len(code) <= 10, "the first answer takes ten lines"


@pytest.mark.timeout(120)
async def test_vectors_and_their_load(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, "--pooling=mean", "--threads", "1") as server:
        async with Client(server.url) as client:
            whole = await client.embed([[5, 6, 7], [5, 6, 7, 8]], encoding_format="float")
            packed = await client.embed([5, 6, 7], encoding_format="base64")
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (7, 0)
        assert [one.index for one in whole.data] == [0, 1]
        first, second = (one.embedding for one in whole.data)
        assert first != second
        assert isinstance(packed.data[0].embedding, str)
        unpacked = array("f", base64.b64decode(packed.data[0].embedding))
        assert unpacked.tolist() == pytest.approx(first, abs=1e-5)

        file = tmp_path / "run.json"
        flags = ("--endpoint", "embeddings", "--input-tokens", "uniform:5:40", "--requests", "9")
        command = [*BENCH, "--url", server.url, *flags, "--vocabulary", "200", "--json", str(file)]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=PATIENCE
        )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "9 of 9 requests answered" in done.stdout
    assert "first token" not in done.stdout, "there is none"
    summary = json.loads(file.read_text())["summary"]
    assert 9 * 5 <= summary["prompt_tokens"] <= 9 * 40
    assert (summary["output_tokens"], summary["ttft"], summary["tokens_from_usage"]) == (
        0,
        {},
        True,
    )
