"""Long text work leaves the event loop alone, is bounded, and ends with its owner."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from pdserve import accel
from pdserve.errors import DeadlineExceeded, Draining, InvalidRequest, Overloaded
from pdserve.text.chat.template_limits import TemplateLimits
from pdserve.text.chat.template_process import TemplateProcess
from pdserve.text.text_pool import INLINE_FAST, TextPool, TextPoolStats
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.text import builders

if TYPE_CHECKING:
    from pdserve.token_ids import TokenIds

needs_extension = pytest.mark.skipif(not accel.NATIVE, reason="the extension is not built")


@pytest.fixture
async def pool():
    pool = TextPool(threads=1, max_jobs=2, inline_chars=10, max_foreign=1)
    yield pool
    assert await pool.close()


class Gate:
    """Work that takes until it is let through."""

    def __init__(self) -> None:
        self.running = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> str:
        self.running.set()
        assert self.open.wait(30)
        return "through"

    async def is_running(self) -> None:
        await asyncio.to_thread(self.running.wait, 30)


async def test_short_work_runs_in_place_and_long_work_elsewhere(pool):
    here = threading.get_ident()
    assert await pool.run(10, threading.get_ident) == here
    assert await pool.run(11, threading.get_ident) != here
    stats = pool.stats()
    assert (stats.inline, stats.handed_over) == (1, 1)


async def test_texts_are_encoded_the_same_either_way(pool):
    tokenizer = Tokenizer.from_bytes(builders.byte_level().to_str().encode())
    for text in ("short", "a rather long text, for this pool"):
        assert await pool.encode(tokenizer, text) == tokenizer.encode(text)
        assert await pool.encode_batch(tokenizer, [text, text]) == [tokenizer.encode(text)] * 2


@needs_extension
async def test_what_the_extension_encodes_may_be_longer_in_place(pool):
    tokenizer = Tokenizer.from_bytes(builders.byte_level().to_str().encode())
    assert tokenizer.choose_encoder().fast
    await pool.encode(tokenizer, "a" * 10 * INLINE_FAST)
    await pool.encode_batch(tokenizer, ["a" * 5 * INLINE_FAST] * 2)
    assert pool.stats().handed_over == 0
    await pool.encode(tokenizer, "a" * (10 * INLINE_FAST + 1))
    assert pool.stats().handed_over == 1


@needs_extension
async def test_what_the_extension_leaves_to_its_twin_begins_again_in_a_thread(pool):
    """One character that it does not know is enough, wherever it is."""
    tokenizer = Tokenizer.from_bytes(builders.byte_level().to_str().encode())
    assert tokenizer.choose_encoder().fast
    begun = []

    def encode(*texts: str) -> list[TokenIds]:
        begun.append(threading.get_ident())
        return tokenizer.encode_batch(texts)

    for texts, threads in ((["a\u0378"], 1), (["a" * 40, "\u0378"], 1), (["a" * 40 + "\u0378"], 2)):
        begun.clear()
        found = await pool.run(1, encode, *texts)
        assert len(set(begun)) == len(begun) == threads
        assert found == tokenizer.encode_batch(texts)
    assert (pool.stats().inline, pool.stats().handed_over) == (2, 1)


async def test_what_the_work_raises_comes_back(pool):
    def fail() -> None:
        raise InvalidRequest("no")

    for chars in (1, 100):
        with pytest.raises(InvalidRequest, match="no"):
            await pool.run(chars, fail)


async def test_at_the_bound_a_job_is_refused_at_once(pool):
    gate = Gate()
    tasks = [asyncio.ensure_future(pool.run(100, gate)) for _ in range(2)]
    await gate.is_running()
    with pytest.raises(Overloaded) as caught:
        await pool.run(100, gate)
    assert caught.value.retry_after is not None
    assert pool.stats().refused == 1
    gate.open.set()
    assert await asyncio.gather(*tasks) == ["through"] * 2
    assert await pool.run(100, gate) == "through"


async def test_a_cancelled_job_that_waits_is_withdrawn(pool):
    gate, never = Gate(), Gate()
    running = asyncio.ensure_future(pool.run(100, gate))
    await gate.is_running()
    waiting = asyncio.ensure_future(pool.run(100, never))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.open.set()
    assert await running == "through"
    assert not never.running.is_set()


async def test_a_cancelled_job_that_runs_keeps_its_place_until_it_ends(pool):
    gate = Gate()
    running = asyncio.ensure_future(pool.run(100, gate))
    await gate.is_running()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert pool.stats().jobs == 1
    gate.open.set()
    assert await pool.run(100, lambda: "next") == "next"
    await asyncio.sleep(0)
    assert pool.stats().jobs == 0


async def test_closing_tells_those_who_wait_and_hears_out_what_runs():
    pool = TextPool(threads=1, max_jobs=4, inline_chars=0)
    gate, never = Gate(), Gate()
    running = asyncio.ensure_future(pool.run(100, gate))
    await gate.is_running()
    waiting = asyncio.ensure_future(pool.run(100, never))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(pool.close())
    with pytest.raises(Draining):
        await waiting
    assert not closing.done()
    gate.open.set()
    assert await running == "through"
    assert await closing
    with pytest.raises(Draining):
        await pool.run(1, gate)
    assert await pool.close()


async def test_closing_does_not_wait_for_ever():
    pool = TextPool(threads=1, inline_chars=0)
    gate = Gate()
    running = asyncio.ensure_future(pool.run(100, gate))
    await gate.is_running()
    assert not await pool.close(timeout=0.01)
    with pytest.raises(Draining):
        await running
    gate.open.set()
    assert await pool.close()


async def test_what_is_done_is_finished_whatever_waits(pool):
    """An answer that was generated is put together, though no more text is taken."""
    gate = Gate()
    tasks = [asyncio.ensure_future(pool.run(100, gate)) for _ in range(2)]
    await gate.is_running()
    finishing = asyncio.ensure_future(pool.finish(100, lambda: "an answer"))
    with pytest.raises(Overloaded):
        await pool.run(100, gate)
    gate.open.set()
    assert await finishing == "an answer"
    await asyncio.gather(*tasks)
    assert await pool.close()
    assert await pool.finish(100, lambda: "a late answer") == "a late answer"


async def test_what_is_done_is_finished_without_a_thread(pool, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(Overloaded, match="no thread for the text"):
        await pool.run(100, lambda: "a text")
    assert await pool.finish(100, lambda: "an answer") == "an answer"


async def test_a_tenant_is_not_delayed_by_the_texts_of_another(pool):
    gates = [Gate(), Gate()]
    flood = [asyncio.ensure_future(pool.of("flood").run(100, gate)) for gate in gates]
    await gates[0].is_running()
    assert await pool.of("other").run(100, lambda: "soon") == "soon"
    with pytest.raises(Overloaded):  # the pool is full, and it made room
        await flood[1]
    gates[0].open.set()
    await flood[0]


async def test_stuck_work_is_told_of_when_it_begins_and_when_it_ends():
    pool = TextPool(threads=1, inline_chars=0, seconds=0.05)
    gate, changed = Gate(), asyncio.Event()
    told: list[int] = []

    def hear(text: TextPoolStats) -> None:
        told.append(text.stuck)
        changed.set()

    pool.on_stuck = hear
    with pytest.raises(DeadlineExceeded):
        await pool.run(100, gate)
    assert (pool.stats().stuck, pool.stats().given_up) == (1, 1)
    assert await pool.run(100, lambda: "next") == "next"
    changed.clear()
    gate.open.set()
    await changed.wait()
    assert told == [1, 0]
    assert await pool.close()


async def test_a_job_cancelled_while_the_pool_closes_is_cancelled():
    pool = TextPool(threads=1, inline_chars=0)
    gate = Gate()
    running = asyncio.ensure_future(pool.run(100, gate))
    await gate.is_running()
    waiting = asyncio.ensure_future(pool.run(100, gate))
    await asyncio.sleep(0)
    waiting.cancel()
    closing = asyncio.ensure_future(pool.close())
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.open.set()
    assert await running == "through"
    assert await closing


async def test_the_loop_goes_on_while_a_long_text_is_encoded():
    pool = TextPool()
    tokenizer = Tokenizer.from_bytes(builders.byte_level().to_str().encode())
    turns = 0
    async with asyncio.timeout(50):
        while turns < 100:  # in one encoding: a loop that stood still would have a turn or two
            encoding = asyncio.ensure_future(
                pool.encode(tokenizer, "The quick brown fox. " * 20_000)
            )
            turns = 0
            while not encoding.done():
                await asyncio.sleep(0)
                turns += 1
            assert len(await encoding) > 20_000
    assert await pool.close()


MESSAGES = [{"role": "user", "content": "hi"}]


async def test_foreign_templates_have_a_lane_of_their_own():
    foreign = TemplateProcess(TemplateLimits(seconds=60))
    pool = TextPool(threads=1, inline_chars=0, max_foreign=1, foreign=foreign)
    assert await pool.render_foreign("{{ messages[0].content }}!", {}, MESSAGES, {}) == "hi!"
    endless = "{% for i in range(9999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    foreign._limits = TemplateLimits(seconds=2.0)
    bad = asyncio.ensure_future(pool.render_foreign(endless, {}, MESSAGES, {}))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await pool.render_foreign("x", {}, MESSAGES, {})
    assert await pool.run(100, lambda: "not delayed") == "not delayed"
    assert not bad.done()
    with pytest.raises(InvalidRequest, match="chat template"):
        await bad
    assert await pool.close()
    with pytest.raises(Draining):
        await pool.render_foreign("x", {}, MESSAGES, {})


async def test_closing_ends_a_foreign_template_at_work():
    pool = TextPool(foreign=TemplateProcess(TemplateLimits(seconds=60)))
    assert await pool.render_foreign("x", {}, MESSAGES, {}) == "x"
    endless = "{% set n = namespace(x=[1]) %}{% for i in range(64) %}{% set n.x = [n.x, n.x] %}"
    endless += "{% endfor %}{{ n.x == [[[1]]] }}{{ n.x }}"
    bad = asyncio.ensure_future(pool.render_foreign(endless, {}, MESSAGES, {}))
    await asyncio.sleep(0.05)
    assert await pool.close()
    with pytest.raises(Draining):
        await bad


@pytest.mark.parametrize(("threads", "max_jobs"), [(0, 1), (2, 1)])
def test_impossible_bounds_are_refused(threads, max_jobs):
    with pytest.raises(ValueError, match="max_jobs"):
        TextPool(threads=threads, max_jobs=max_jobs)
