"""Blocks that the real vLLM evicts come back from host memory and disk.

Answers are compared with those of an engine that had nothing cached, and vLLM's own counters say
what it has computed. The engine is that of the tests of disaggregation, which has the connector.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.messages.engine import ClearCache
from pdserve.messages.tiers import CachedSource, TierSpec
from tests.engines.vllm import real
from tests.engines.vllm.real_pair import P
from tests.engines.vllm.real_tiers import (
    BLOCK,
    FULL,
    PROMPT,
    Tiered,
    cached,
    disk,
    host,
    prompt_of,
    sources,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

real.require_vllm()
pytestmark = real.MARKS
engines_of_this_file = real.keeps(P)


@pytest.fixture
def opened() -> Iterator[Any]:
    """Makes cores with tiers, one after the other, and closes them."""
    cores: list[Tiered] = []

    def make(spec: TierSpec) -> Tiered:
        while cores:
            cores.pop().close()
        cores.append(Tiered(spec))
        return cores[-1]

    yield make
    for core in cores:
        core.close()


_ANSWERS: dict[tuple[int, ...], list[list[int]]] = {}


def cold(core: Tiered, prompt: list[int]) -> list[list[int]]:
    """The answer of an engine that has nothing cached."""
    if tuple(prompt) not in _ANSWERS:
        core.core.handle(ClearCache())
        _ANSWERS[tuple(prompt)] = core.ask(prompt).tokens
        core.core.handle(ClearCache())
        core.run()
    return _ANSWERS[tuple(prompt)]


# ------------------------------------------------------------------ the host


def test_evicted_blocks_come_back_from_the_host(opened: Any) -> None:
    core = opened(host(120))
    assert core.inline.capabilities.tiers == ("host",)
    reference = cold(core, PROMPT)
    core.ask(PROMPT)
    core.evict()
    before = core.stats
    ledger = core.ask(PROMPT)
    after = core.stats
    assert ledger.tokens == reference
    assert sources(ledger) == (CachedSource("host", 5 * BLOCK),)
    assert cached(ledger) == 5 * BLOCK
    computed = after.computed_tokens - before.computed_tokens
    assert computed == FULL - 5 * BLOCK + len(ledger.tokens[0]) - 1
    assert after.cached_tokens - before.cached_tokens == 5 * BLOCK
    assert after.tiers[0].hit_tokens == 5 * BLOCK
    measured = {lane.lane for lane in after.lanes if lane.bandwidth or lane.latency}
    assert measured >= {"d2h", "h2d"}
    assert core.router.blocks["host"] == set(core.tiers.lower.host.names())


def test_a_load_goes_on_behind_what_vllm_has(opened: Any) -> None:
    """Two blocks are in vLLM's cache, two on the host; the block with the last token is
    computed."""
    core, prompt = opened(host(120)), prompt_of(2, 5 * BLOCK)
    reference = cold(core, prompt)
    core.ask(prompt)
    core.forget()
    core.tiers.loads.planner.deadline = -10.0  # what is asked for now is computed
    core.ask(prompt[: 2 * BLOCK + 1], max_tokens=1)
    core.tiers.loads.planner.deadline = 30.0
    ledger = core.ask(prompt)
    assert ledger.tokens == reference
    assert sum(source.tokens for source in sources(ledger)) == 2 * BLOCK
    assert cached(ledger) == 4 * BLOCK


def test_output_and_shared_beginnings_are_loaded_once(opened: Any) -> None:
    core = opened(host(120))
    head = prompt_of(3, 40)
    head += core.ask(head, max_tokens=25).tokens[0]
    prompts = [[*head, *prompt_of(30 + number, 20)] for number in range(3)]
    references = [cold(core, prompt) for prompt in prompts]
    core.ask(head[:40], max_tokens=26)
    core.forget()
    before = core.stats.tiers[0].hit_tokens
    ledgers = [core.inline.submit(real.request(prompt, max_tokens=4)) for prompt in prompts]
    core.run()
    assert [ledger.tokens for ledger in ledgers] == references
    assert core.stats.tiers[0].hit_tokens - before == 2 * BLOCK
    assert sorted(len(sources(ledger)) for ledger in ledgers) == [0, 0, 1]
    assert [cached(ledger) for ledger in ledgers] == [2 * BLOCK] * 3


def test_private_blocks_do_not_leave_the_device(opened: Any) -> None:
    core = opened(host(120))
    core.ask(PROMPT, cache_scope="never")
    assert len(core.tiers.lower.host) == 0
    core.forget()
    assert sources(core.ask(PROMPT)) == ()
    assert len(core.tiers.lower.host) == 5


def test_what_is_cleared_while_it_is_copied_does_not_come_back(opened: Any) -> None:
    core = opened(host(120))
    ledger = core.inline.submit(real.request(PROMPT, max_tokens=1))
    while not core.tiers.waits:
        core.step()
    assert ledger.done
    core.core.handle(ClearCache())
    core.run()
    assert len(core.tiers.lower.host) == 0
    assert sources(core.ask(PROMPT)) == ()


def test_random_traffic_is_answered_as_by_a_cold_engine(opened: Any, seed: int) -> None:
    """With evictions on the device and on the host, preemptions and aborts."""
    rng, core = random.Random(seed), opened(host(50))
    prompts = [prompt_of(40 + number) for number in range(9)]
    references = [cold(core, prompt) for prompt in prompts]
    running: list[tuple[Any, Any]] = []
    for _ in range(16):
        number = rng.randrange(len(prompts))
        asked = real.request(prompts[number], max_tokens=4, priority=rng.randrange(3))
        running.append((core.inline.submit(asked), references[number]))
        if rng.random() < 0.2:
            ended, _ = running.pop(rng.randrange(len(running)))
            if not ended.done:
                core.inline.abort(ended)
        for _ in range(rng.randrange(6)):
            core.step()
    core.run()
    for ledger, reference in running:
        assert ledger.tokens == reference
    assert core.stats.blocks_used == 0
    assert core.router.blocks["host"] == set(core.tiers.lower.host.names())


def test_blocks_of_a_preempted_request_come_back(opened: Any) -> None:
    """Every prompt is asked for once, so nothing but preempted requests has anything to load."""
    core = opened(host(120))
    prompts = [prompt_of(60 + number, 3 * BLOCK + 10) for number in range(9)]
    ledgers = [core.inline.submit(real.request(each, max_tokens=60)) for each in prompts]
    core.run()
    preempted = [
        number
        for number, ledger in enumerate(ledgers)
        if (finish := ledger.finishes[0]) is not None and finish.preemptions
    ]
    assert preempted
    assert core.stats.tiers[0].hit_tokens >= 2 * BLOCK
    assert core.stats.blocks_used == 0
    for number in preempted[:2]:
        core.core.handle(ClearCache())
        assert core.ask(prompts[number], max_tokens=60).tokens == ledgers[number].tokens


# ------------------------------------------------------------------ the disk


def test_blocks_come_back_from_disk_after_a_restart(opened: Any, tmp_path: Path) -> None:
    core = opened(disk(tmp_path))
    assert core.inline.capabilities.tiers == ("disk",)
    reference = core.ask(PROMPT).tokens
    assert core.stats.tiers[1].blocks_stored == 5
    kept = core.router.blocks["disk"]
    core = opened(disk(tmp_path))
    core.run()
    assert core.router.blocks["disk"] == kept
    before = core.stats
    ledger = core.ask(PROMPT)
    assert ledger.tokens == reference
    assert sources(ledger) == (CachedSource("disk", 5 * BLOCK),)
    computed = core.stats.computed_tokens - before.computed_tokens
    assert computed == FULL - 5 * BLOCK + len(ledger.tokens[0]) - 1


def test_a_flipped_byte_on_disk_is_a_miss(opened: Any, tmp_path: Path) -> None:
    """The blocks before it are used, and the rest is computed."""
    core = opened(disk(tmp_path))
    reference = core.ask(PROMPT).tokens
    name = core.core.names.chain(PROMPT, core.core.names.salt("", ""))[3]
    place = core.tiers.lower.disk.place(name)
    core = opened(disk(tmp_path))
    (segment,) = tmp_path.glob("*/seg-*")
    with segment.open("r+b") as file:
        file.seek(place.offset + place.payload_bytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    ledger = core.ask(PROMPT)
    assert ledger.tokens == reference
    assert sources(ledger) == (CachedSource("disk", 3 * BLOCK),)
    assert cached(ledger) == 3 * BLOCK
    assert core.stats.tiers[1].failed == 1


class Slow:
    """Holds back what goes to the disk's threads."""

    def __init__(self, core: Tiered) -> None:
        self._files: Any = core.tiers.io._files
        self._submit = self._files.submit
        self.held: list[Any] = []
        self._files.submit = self.held.append

    def release(self) -> None:
        self._files.submit = self._submit
        for job in self.held:
            self._submit(job)


@pytest.mark.parametrize("how", ["aborted", "late"])
def test_a_load_that_does_not_come_leaks_nothing(opened: Any, tmp_path: Path, how: str) -> None:
    reference = opened(disk(tmp_path)).ask(PROMPT).tokens
    core = opened(disk(tmp_path))
    slow = Slow(core)
    if how == "late":
        core.tiers.loads.planner.deadline = 0.0
    ledger = core.inline.submit(real.request(PROMPT, max_tokens=4))
    for _ in range(3):
        core.step()
    assert len(slow.held) == 5
    assert len(core.tiers.loads) == 1
    assert core.core.engine.waiting == 1
    if how == "aborted":
        core.inline.abort(ledger)
    until = time.monotonic() + 30.0
    while len(core.tiers.loads) or not (ledger.done or how == "aborted"):
        core.step()
        assert time.monotonic() < until
    slow.release()
    core.run()
    assert core.stats.blocks_used == 0
    if how == "late":
        assert ledger.tokens == reference
        assert sources(ledger) == ()
    assert core.ask(PROMPT).tokens == reference
