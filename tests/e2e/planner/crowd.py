"""Streams that go on all the time, each compared with the only right answer.

The sim engine's tokens follow from the prompt alone (`tests/chaos/storm/reference.py`), so no
undisturbed run is needed to know them.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from tests.chaos.cluster import eventually
from tests.chaos.storm import client
from tests.chaos.storm.client_request import ClientRequest
from tests.chaos.storm.reference import right_tokens
from tests.chaos.storm.storm_requests import IDS, StormRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from tests.chaos.cluster import Node

__all__ = ["Streams", "Surge", "Talk"]

PATIENCE = 120.0
STAGGER = 0.04
"""Seconds between the first requests of two streams."""


@dataclass(frozen=True)
class Talk:
    """What the requests of a crowd are like, in tokens."""

    prompt: int
    output: int


class Crowd:
    """Use with `with`: requests until the end, which hangs up."""

    def __init__(self, front: Node, talk: Talk, seed: int) -> None:
        self.lives: list[ClientRequest] = []
        """Requests that are over."""
        self.open: list[ClientRequest] = []
        self.wrong: list[str] = []
        """What failed, or was not answered as it must be."""
        self.over = threading.Event()
        self._front, self._talk = front, talk
        self._numbers = itertools.count()
        self._right: dict[int, list[int]] = {}
        """The only right answer to each request, by number."""
        self._rng = random.Random(f"{type(self).__name__} {seed}")
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="crowd")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.over.set()
        self._thread.join(2 * PATIENCE)
        assert not self._thread.is_alive(), f"streams do not end: {self.open}"
        if kind is None:
            self.check()

    def check(self) -> None:
        """All is well so far: no request has failed, and each has only right tokens."""
        assert self.wrong == []
        wrong = [why for life in tuple(self.open) for why in self._problems(life)]
        assert wrong == []

    # ------------------------------------------------------------------ on its thread

    async def _run(self) -> None:
        raise NotImplementedError

    async def _ask(self) -> None:
        """One request, compared with what it must be."""
        question = self._question()
        life = ClientRequest(question.number, question, "", True, time.monotonic())
        self.open.append(life)
        try:
            await client.ask(
                life,
                self._front.host,
                self._front.port,
                patience=PATIENCE,
                hang_up=lambda life: self.over.is_set(),
            )
        except client.NotAsked as error:
            life.broken = str(error)
        self.open.remove(life)
        self.lives.append(life)
        if found := self._problems(life):
            self.wrong += found
            await asyncio.sleep(0.2)  # a cluster that refuses all is not asked ever faster

    def _problems(self, life: ClientRequest) -> list[str]:
        question = life.question
        if life.number not in self._right:
            self._right[life.number] = right_tokens(question, question.fields["prompt"])
        return list(problems(life, self._right[life.number]))

    def _question(self) -> StormRequest:
        talk, rng = self._talk, self._rng
        fields = {
            "prompt": rng.choices(IDS, k=talk.prompt),
            "max_tokens": talk.output,
            "temperature": 0,
            "seed": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return StormRequest(next(self._numbers), "/v1/completions", fields)


class Streams(Crowd):
    """So many streams at any time: one that ends is followed by another."""

    def __init__(self, front: Node, at_once: int, talk: Talk, seed: int) -> None:
        super().__init__(front, talk, seed)
        self.at_once = at_once

    def wait_running(self) -> None:
        """Until each stream has brought a token."""
        eventually(
            lambda: sum(life.first > 0 for life in tuple(self.open)) >= self.at_once - 1,
            lambda: self.wrong or self.open,
        )

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self.at_once):
                group.create_task(self._client(number))

    async def _client(self, number: int) -> None:
        await asyncio.sleep(STAGGER * number)
        while not self.over.is_set():
            await self._ask()


class Surge(Crowd):
    """Requests at a rate, whatever becomes of those before."""

    def __init__(self, front: Node, rate: float, talk: Talk, seed: int) -> None:
        super().__init__(front, talk, seed)
        self._rate = rate

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while not self.over.is_set():
                group.create_task(self._ask())
                await asyncio.sleep(1 / self._rate)


def problems(life: ClientRequest, right: list[int]) -> Iterator[str]:
    """Why a request was not answered as it must be; nothing: it was, as far as it went."""
    if life.broken or life.error is not None or life.status not in (0, 200):
        yield life.story()
    (choice,) = life.choices
    tokens = list(choice.tokens)
    if tokens != right[: len(tokens)]:
        yield f"{tokens}, not {right}: {life.story()}"
    if life.done and len(tokens) < len(right):
        yield f"ends early: {life.story()}"
