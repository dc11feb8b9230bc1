"""This release and the one before it in one cluster, as while a cluster is being upgraded.

The engine is `sim` with content, whose tokens follow from the bytes of a sequence's blocks: a text
that is not the expected one means that something was lost, doubled or mixed up on the way.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.chaos.cluster import eventually
from tests.chaos.load import Stream, ask, wait_served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.chaos.cluster import Node
    from tests.compat.previous import Mixed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PACE = 5
"""Makes the engine's steps so many times longer than a GPU's: a stream of `TOKENS` takes a second
or two, and is met in its middle by whatever happens."""
TOKENS = 40
PROMPTS = tuple(f"{number} " + "~" * length for number, length in enumerate((1, 31, 64, 150)))


def start_worker(cluster: Mixed, name: str, model: Path, *flags: str) -> Node:
    engine = ("--engine", "sim", "--engine-option", "content=on")
    slow = ("--engine-option", f"slowdown={PACE}")
    where = ("--join", cluster.address, "--model", str(model))
    return cluster.start("worker", name, *where, *engine, *slow, *flags)


def wait_chosen(frontend: Node, *workers: str) -> None:
    """Until requests reach these: a worker is ready before everybody has heard of it."""
    for worker in workers:
        wait_served(frontend, worker=worker, max_tokens=1)


def wait_members(nodes: list[Node], workers: int) -> None:
    """Until these know so many workers."""
    metric = 'pdserve_node_members{{member="worker",role="{}"}}'
    for node in nodes:
        node.wait_count(metric.format(node.role), workers)


class Texts:
    """The text that each prompt has, once it was asked for."""

    def __init__(self, frontend: Node) -> None:
        self._texts = {prompt: self._ask(frontend, prompt) for prompt in PROMPTS}
        assert len(set(self._texts.values())) == len(PROMPTS)

    @staticmethod
    def _ask(frontend: Node, prompt: str) -> str:
        body = wait_served(frontend, **fields(prompt)).body
        text: str = body["choices"][0]["message"]["content"]
        return text

    def check(self, prompt: str, stream: Stream) -> None:
        """It ended well, with the text it had to have."""
        assert stream.wait().done, (prompt[:4], stream)
        assert stream.text == self._texts[prompt], prompt[:4]


def fields(prompt: str) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }


def open_stream(frontend: Node, prompt: str, worker: str = "") -> Stream:
    return Stream(frontend, tokens=TOKENS, worker=worker, **fields(prompt))


class Users:
    """Threads that have a stream each, all the time, and in turn at every frontend there is."""

    def __init__(self, frontends: list[Node], texts: Texts, count: int) -> None:
        self.frontends = frontends
        """May change while they run."""
        self.ended = 0
        self._texts = texts
        self._turn = itertools.count()
        self._over = threading.Event()
        self._wrong: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]

    def _run(self) -> None:
        while not self._over.is_set() and not self._wrong:
            number = next(self._turn)
            frontend = self.frontends[number % len(self.frontends)]
            prompt = PROMPTS[number % len(PROMPTS)]
            try:
                self._texts.check(prompt, open_stream(frontend, prompt))
            except Exception as error:
                self._wrong.append(error)
            self.ended += 1

    def wait(self, count: int) -> None:
        """Until so many more have ended."""
        wanted = self.ended + count
        eventually(lambda: self.ended >= wanted or self._wrong, "streams stand still")
        self.check()

    def check(self) -> None:
        if self._wrong:
            raise self._wrong[0]

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()
        self.check()


@pytest.mark.long(one_in=3)
def test_a_cluster_is_upgraded_under_load(cluster, tiny_model):
    """Workers, router and frontends one by one; frontends of both releases ask all the time, so
    that each meets routers and workers of both. No request fails, none has a wrong token."""
    cluster.old = True
    router = cluster.router()
    workers = [start_worker(cluster, "w1", tiny_model), start_worker(cluster, "w2", tiny_model)]
    old = cluster.frontend(name="f-old")
    cluster.old = False
    new = cluster.frontend(name="f-new")
    cluster.wait_ready()
    wait_members([router, old, new], 2)
    users = Users([old, new], Texts(old), 6)
    with users.at_work():
        users.wait(8)  # an old router and old workers, for both frontends
        for number, worker in enumerate(tuple(workers)):
            name = f"w{number + 3}"
            start_worker(cluster, name, tiny_model).wait_ready()
            wait_chosen(old, name)
            wait_chosen(new, name)
            assert worker.end() == 0
            users.wait(8)
        after = cluster.router(name="r-new")
        after.wait_ready()
        wait_members([after], 2)
        assert router.end() == 0
        users.wait(8)
        users.frontends = [new]
        assert old.end() == 0
        users.wait(4)


@pytest.mark.long
def test_a_cluster_goes_back_under_load(cluster, tiny_model):
    """A new router and new workers are replaced by those of the release before."""
    router = cluster.router()
    worker = start_worker(cluster, "w-new", tiny_model)
    cluster.old = True
    old = cluster.frontend(name="f-old")
    cluster.wait_ready()
    wait_members([router, old], 1)
    users = Users([old], Texts(old), 4)
    with users.at_work():
        users.wait(4)  # a new router and a new worker, for an old frontend
        start_worker(cluster, "w-old", tiny_model).wait_ready()
        wait_chosen(old, "w-old")
        assert worker.end() == 0
        users.wait(4)
        after = cluster.router(name="r-old")
        after.wait_ready()
        wait_members([after], 1)
        old.wait_count('pdserve_node_members{member="router",role="frontend"}', 2)
        assert router.end() == 0
        users.wait(4)


def test_a_new_frontend_takes_a_request_off_an_old_worker_that_dies(cluster, tiny_model):
    router, frontend = cluster.router(), cluster.frontend()
    cluster.old = True
    dying, other = (start_worker(cluster, name, tiny_model) for name in ("dying", "other"))
    cluster.wait_ready()
    wait_members([router, frontend], 2)
    texts = Texts(frontend)
    streams = [open_stream(frontend, prompt) for prompt in PROMPTS * 3]
    for stream in streams:
        stream.wait_tokens(3)
    assert dying.count("pdserve_num_requests_running") > 0
    dying.kill()
    for prompt, stream in zip(PROMPTS * 3, streams, strict=True):
        texts.check(prompt, stream)
    assert other.process.poll() is None


@pytest.mark.parametrize("time", [pytest.param("60", marks=pytest.mark.long), "0.3"])
def test_an_old_frontend_stays_with_a_new_worker_that_drains(cluster, tiny_model, time):
    """Requests that name a worker do not move: they end there, or with the error that says so."""
    router = cluster.router()
    leaving = start_worker(cluster, "leaving", tiny_model, "--drain-timeout", time)
    start_worker(cluster, "staying", tiny_model).wait_ready()
    cluster.old = True
    frontend = cluster.frontend()
    cluster.wait_ready()
    wait_members([router, frontend], 2)
    texts = Texts(frontend)
    streams = [open_stream(frontend, prompt, worker="leaving") for prompt in PROMPTS]
    for stream in streams:
        stream.wait_tokens(1)
    assert leaving.end() == 0
    for prompt, stream in zip(PROMPTS, streams, strict=True):
        if time == "60":
            texts.check(prompt, stream)
        else:
            assert stream.wait().code in ("no_worker", "draining"), stream
    assert ask(frontend, **fields(PROMPTS[0])).status == 200
