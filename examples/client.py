"""Talk to a running server: `python examples/client.py`."""

import asyncio
import sys

from pdserve.client import Client


async def main(url: str = "http://127.0.0.1:8000") -> None:
    async with Client(url) as client:
        async for text in client.chat_stream("Say hello.", max_tokens=64).texts():
            print(text, end="", flush=True)
    print()


asyncio.run(main(*sys.argv[1:]))
