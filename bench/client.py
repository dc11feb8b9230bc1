"""Measures the cost of a stream's chunk in a Python program: pdserve's client and other ways.

    python -m bench.client [--rounds N] [--streams N] [--write bench/results/client.md]

A server of aiohttp on the other core answers every request with the same ready-made stream. Arms
take turns within a round, all on one connection: raw bytes of aiohttp, the same parsed by hand with
`json`, pdserve's client, and OpenAI's. The measure is this process's own CPU time per chunk.
Figures are medians over rounds, ratios are medians of each round's ratio. Nothing passes or fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import uvloop
from aiohttp import web
from openai import AsyncOpenAI

from bench.machine import facts
from pdserve.client import Client

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

CHUNKS = 256
CHUNK = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"system_fingerprint":null,"choices":[{"index":0,"delta":{"content":" word"},'
    b'"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
)
BODY = CHUNK * CHUNKS + b"data: [DONE]\n\n"
ASKED = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}


async def serve() -> None:
    """Serves until the process is ended."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for begin in range(0, len(BODY), 4 * len(CHUNK)):
            await response.write(BODY[begin : begin + 4 * len(CHUNK)])
            await asyncio.sleep(0)
        await response.write_eof()
        return response

    listener = await asyncio.get_running_loop().create_server(
        web.Server(answer, access_log=None), "127.0.0.1", 0
    )
    print(listener.sockets[0].getsockname()[1], flush=True)
    await listener.serve_forever()


async def raw(url: str, streams: int) -> int:
    """Reads the bytes and does not parse them."""
    count = 0
    async with aiohttp.ClientSession() as session:
        for _ in range(streams):
            async with session.post(f"{url}/v1/chat/completions", json=ASKED) as response:
                async for data in response.content.iter_any():
                    count += data.count(b'"content"')
    return count


async def by_hand(url: str, streams: int) -> int:
    """Parses the lines and dictionaries by hand."""
    count = 0
    async with aiohttp.ClientSession() as session:
        for _ in range(streams):
            async with session.post(f"{url}/v1/chat/completions", json=ASKED) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        choices = json.loads(line[6:])["choices"]
                        count += choices[0]["delta"]["content"] is not None
    return count


async def ours(url: str, streams: int) -> int:
    """Reads with `pdserve.client`."""
    count = 0
    async with Client(url, model="m") as client:
        for _ in range(streams):
            async for chunk in client.chat_stream("x"):
                count += chunk.choices[0].delta.content is not None
    return count


async def openais(url: str, streams: int) -> int:
    """Reads with the `openai` package."""
    count = 0
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        for _ in range(streams):
            answer = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}], stream=True
            )
            async for chunk in answer:
                count += chunk.choices[0].delta.content is not None
    return count


ARMS = {
    "raw bytes (aiohttp)": raw,
    "by hand (aiohttp, json)": by_hand,
    "pdserve.client": ours,
    "openai": openais,
}


def cost(arm: Callable[[str, int], Awaitable[int]], url: str, streams: int) -> float:
    """CPU seconds per chunk."""

    async def all_of_it() -> int:
        return await arm(url, streams)

    before = time.process_time()
    count = uvloop.run(all_of_it())
    spent = time.process_time() - before
    if count != streams * CHUNKS:
        raise RuntimeError(f"{count} chunks, not {streams * CHUNKS}")
    return spent / count


def measure(rounds: int, streams: int) -> list[dict[str, float]]:
    """Seconds per chunk by arm, a row for each round."""
    cores = sorted(os.sched_getaffinity(0))
    command = ["taskset", "-c", str(cores[-1]), sys.executable, "-m", "bench.client", "--serve"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        os.sched_setaffinity(0, {cores[0]})
        for arm in ARMS.values():
            cost(arm, url, 2)  # imports and first connections
        return [
            {name: cost(arm, url, streams) for name, arm in ARMS.items()} for _ in range(rounds)
        ]
    finally:
        os.sched_setaffinity(0, cores)
        server.terminate()
        server.wait()


def report(rows: list[dict[str, float]], streams: int) -> str:
    """Returns the results as Markdown."""
    lines = [
        "# What a streamed chunk costs a client",
        "",
        f"`python -m bench.client --rounds {len(rows)} --streams {streams}`: CPU time of the"
        f" client's process per chunk of a chat stream of {CHUNKS} chunks, medians of {len(rows)}"
        " rounds (range); ratios are medians of each round's ratio.",
        "",
        *(f"- {fact}" for fact in facts()),
        "",
        "| client | µs per chunk | against pdserve.client |",
        "|---|---|---|",
    ]
    for name in ARMS:
        values = [row[name] * 1e6 for row in rows]
        ratio = statistics.median(row[name] / row["pdserve.client"] for row in rows)
        span = f"{min(values):.1f} to {max(values):.1f}"
        lines.append(f"| {name} | {statistics.median(values):.1f} ({span}) | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        uvloop.run(serve())
        return
    text = report(measure(args.rounds, args.streams), args.streams)
    print(text)
    if args.write:
        args.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
