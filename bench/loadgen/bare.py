"""The limit: aiohttp on uvloop that answers with ready-made bytes, one socket write per token.

    python bench/loadgen/bare.py PORT [--chunks N] [--bytes B]

`POST /stream` answers with N chunks, each written by a callback of its own, as tokens that become
ready one by one; any other path with one ready-made body. It reads the request's body and nothing
else: no JSON, no template, no tokens. Whatever serves tokens over aiohttp pays at least this.
"""

from __future__ import annotations

import argparse
import asyncio

import uvloop
from aiohttp import web

BODY = b"x" * 400


class Stream:
    """Writes one ready-made chunk per turn of the event loop."""

    def __init__(self, transport: asyncio.WriteTransport, chunk: bytes, count: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._chunk = chunk
        self._left = count
        self.finished: asyncio.Future[None] = self._loop.create_future()
        self._step()

    def _step(self) -> None:
        if self._transport.is_closing():
            self.finished.cancel()
            return
        self._transport.write(self._chunk)
        self._left -= 1
        if self._left:
            self._loop.call_soon(self._step)
        else:
            self.finished.set_result(None)


async def serve(port: int, chunks: int, size: int) -> None:
    """Serve until cancelled."""
    data = b"data: " + b"x" * size + b"\n\n"
    framed = b"%x\r\n%b\r\n" % (len(data), data)

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        if request.path != "/stream":
            return web.Response(body=BODY, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        assert request.transport is not None
        await Stream(request.transport, framed, chunks).finished
        await response.write_eof()
        return response

    server = web.Server(answer, access_log=None)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", port)
    print(listener.sockets[0].getsockname()[1], flush=True)
    await listener.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("port", type=int)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--bytes", type=int, default=220)
    args = parser.parse_args()
    uvloop.run(serve(args.port, args.chunks, args.bytes))


if __name__ == "__main__":
    main()
