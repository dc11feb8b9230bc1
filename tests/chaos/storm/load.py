"""Sends a constant number of concurrent requests, of several kinds, to all frontends."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.chaos.storm import client
from tests.chaos.storm.client_request import ClientRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.chaos.storm.nodes import Node
    from tests.chaos.storm.storm_requests import Expected, Pool, StormRequest

AVOIDED = 1.0
"""Seconds for which a frontend that is down or leaves is asked nothing."""
REFUSED = (429, 503)
MOST_REFUSED = 500
"""Before the storm, all questions together."""
PAUSE = 0.2
"""Seconds after an address that does not answer, or a refusal."""


@dataclass(frozen=True)
class Habits:
    """Shares of all requests."""

    streamed: float = 0.75
    hang_up: float = 0.08
    """Share of clients that disconnect, at a random piece; of requests without a stream, soon."""
    hurried: float = 0.06


@dataclass
class Crowd:
    """See above; the storm owns it."""

    pool: Pool
    frontends: Sequence[Node]
    hurried: Sequence[Node]
    seed: int | str
    patience: float
    on_end: Callable[[ClientRequest, Expected], None]
    habits: Habits = field(default_factory=Habits)
    stopping: bool = False
    not_asked: int = 0
    """Connections that did not come about."""
    open: int = 0
    """Requests at this moment."""
    most_open: int = 0
    numbers: int = 0
    _avoided: dict[str, float] = field(default_factory=dict)
    """Times until which frontends that accepted nothing get no requests."""

    async def run(self, size: int) -> None:
        """Runs until `stopping`, and then waits for the open requests."""
        tasks = [asyncio.create_task(self._client(number)) for number in range(size)]
        try:
            for task in tasks:
                await task
        finally:
            for task in tasks:
                task.cancel()

    async def _client(self, number: int) -> None:
        rng = random.Random(f"client {self.seed} {number}")
        await asyncio.sleep(rng.uniform(0.0, 2.0))
        while not self.stopping:
            question, expected = self.pool.pick(rng)
            hurried = rng.random() < self.habits.hurried
            node = self._frontend(rng, hurried=hurried)
            streamed = rng.random() < self.habits.streamed
            life = self._life(question, node.name, streamed=streamed, hurried=hurried)
            try:
                self.open += 1
                self.most_open = max(self.most_open, self.open)
                await client.ask(
                    life,
                    node.host,
                    node.http,
                    patience=self.patience,
                    hang_up=self._hang_up(rng, life),
                )
            except client.NotAsked:
                self.not_asked += 1
                self._avoid(node)
                await asyncio.sleep(PAUSE)
                continue
            finally:
                self.open -= 1
            self.on_end(life, expected)
            if life.status in (0, 503):
                self._avoid(node)
                await asyncio.sleep(PAUSE)

    def _frontend(self, rng: random.Random, *, hurried: bool) -> Node:
        """Chooses a frontend, like a load balancer: one that accepted nothing lately only if
        there is no other."""
        if hurried:
            return rng.choice(self.hurried)
        now = time.monotonic()
        good = [node for node in self.frontends if self._avoided.get(node.name, 0.0) <= now]
        return rng.choice(good or self.frontends)

    def _avoid(self, node: Node) -> None:
        self._avoided[node.name] = time.monotonic() + AVOIDED

    def _life(
        self, question: StormRequest, frontend: str, *, streamed: bool, hurried: bool = False
    ) -> ClientRequest:
        self.numbers += 1
        now = time.monotonic()
        return ClientRequest(self.numbers, question, frontend, streamed, now, hurried)

    def _hang_up(self, rng: random.Random, life: ClientRequest) -> Callable[[ClientRequest], bool]:
        if rng.random() >= self.habits.hang_up:
            return lambda life: False
        after = rng.randint(0, life.question.fields["max_tokens"])
        return lambda life: life.chunks >= after or not life.streamed


async def undisturbed(
    questions: Sequence[StormRequest], frontends: Sequence[Node], at_once: int, patience: float
) -> list[ClientRequest]:
    """Each question once, streamed, in peace."""
    lives: list[ClientRequest] = []
    refusals = [True] * MOST_REFUSED
    waiting = list(reversed(questions))

    async def one(number: int) -> None:
        node = frontends[number % len(frontends)]
        while waiting:
            question = waiting.pop()
            life = ClientRequest(question.number, question, node.name, True, time.monotonic())
            await client.ask(
                life, node.host, node.http, patience=patience, hang_up=lambda life: False
            )
            if life.status in REFUSED and refusals and refusals.pop():
                waiting.append(question)  # a machine with other work can disturb by itself
                await asyncio.sleep(1.0)
            else:
                lives.append(life)

    async with asyncio.TaskGroup() as group:
        for number in range(at_once):
            group.create_task(one(number))
    return sorted(lives, key=lambda life: life.number)
