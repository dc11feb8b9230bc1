"""A stream's chunks do not depend on where the network cuts it."""

from __future__ import annotations

import asyncio
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.client import ChatStream, Timeouts
from pdserve.client.transport import Answered
from tests.client.scripted import CHUNK

CUT = CHUNK.index(",") + 1
"""Where JSON may hold a line break."""
WORDS = ("a", "é", "😀", "b c")


class Body:
    """Pieces as they come from a socket."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    async def readany(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    def at_eof(self) -> bool:
        return not self._pieces


class Response:
    def __init__(self, pieces: list[bytes]) -> None:
        self.content = Body(pieces)
        self.headers: dict[str, str] = {}
        self.released = False

    def release(self) -> None:
        self.released = True

    close = release


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["\n", "\r\n", "\r"]), st.lists(st.integers(0, 1200), max_size=12))
def test_any_cut_gives_the_same(end, cuts):
    # A comment, a field of another name, and data in two lines, as any server may send.
    events = [
        f": ping{end}event: message{end}data: {(CHUNK % word)[:CUT]}{end}"
        f"data:{(CHUNK % word)[CUT:]}{end}{end}"
        for word in WORDS
    ]
    whole = "".join([*events, f"data: [DONE]{end}{end}"]).encode()
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    pieces = [whole[a:b] for a, b in itertools.pairwise(edges)]
    response = Response(pieces)

    async def ask() -> Answered:
        return Answered(response, 1, "id", None, Timeouts())  # type: ignore[arg-type]

    async def read() -> list[str]:
        return [text async for text in ChatStream(ask).texts()]

    assert asyncio.run(read()) == list(WORDS)
    assert response.released
