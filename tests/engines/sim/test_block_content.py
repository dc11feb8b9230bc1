"""Tokens: known beforehand, and with content changed by every block that is not right."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from pdserve.engine_core.executor import ScheduledChunk
from pdserve.engine_core.scheduler.block_hasher import BlockHasher
from pdserve.engine_core.scheduler.scheduler import Scheduler
from pdserve.engine_core.scheduler.sequence import Sequence
from pdserve.kv.block_pool import BlockPool
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.exactness import SCENARIOS, Scenario, continued_requests, mixed_requests
from pdserve.token_ids import token_ids
from pdserve_engines.sim import SimExecutor
from pdserve_engines.sim.block_content import DigestContent
from pdserve_engines.sim.block_entries import PlainEntries
from pdserve_engines.sim.settings import SimOptions, read_model
from pdserve_engines.sim.tokens import EMBEDDING_SIZE, reference_tokens
from tests.engines.sim.driver import Driver, request, spec

if TYPE_CHECKING:
    from pdserve.messages.engine import EngineSpec
    from pdserve.messages.request import Pooling

SPEC = spec(content="on")
PLAIN = spec()
VOCABULARY = read_model(SPEC, SimOptions(vocab=97))


def reference(requests: list[GenerateRequest], *, content: bool) -> list[list[list[int]]]:
    return [
        [reference_tokens(r, VOCABULARY, c, content=content) for c in range(r.n)] for r in requests
    ]


@pytest.mark.timeout(300)  # in long mode, beside others
@pytest.mark.parametrize("content", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scheduling_never_shows_in_the_tokens(
    scenario: Scenario, content: bool, seed: int, long: bool
):
    rng = random.Random(seed)
    for _ in range(20 if long else 2):
        requests = mixed_requests(rng, range(4, 97))
        outputs = scenario.outputs(SimExecutor, SPEC if content else PLAIN, requests)
        assert outputs == reference(requests, content=content)


@pytest.mark.timeout(300)  # in long mode, beside others
@pytest.mark.parametrize("content", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_what_was_broken_off_goes_on_as_if_nothing_had_happened(
    scenario: Scenario, content: bool, seed: int, long: bool
):
    rng = random.Random(seed)
    for _ in range(20 if long else 2):
        requests = mixed_requests(rng, range(4, 97))
        whole = reference(requests, content=content)
        parts = continued_requests(rng, requests, whole)
        wanted = SPEC if content else PLAIN
        assert scenario.outputs(SimExecutor, wanted, parts, prove=False) == whole


@pytest.mark.parametrize("content", ["on", "off"])
def test_tokens_are_the_same_when_steps_take_time(content: str, seed: int):
    rng = random.Random(seed)
    requests = mixed_requests(rng, range(4, 97))
    with Driver(spec(content=content, noise=0.3, steps_at_once=20)) as driver:
        for wanted in requests:
            driver.run_until(driver.clock.now() + rng.uniform(0.0, 0.05))
            driver.submit(wanted)
        ledgers = driver.run().ledgers.values()
        tokens = [ledger.tokens for ledger in ledgers]
    assert tokens == reference(requests, content=content == "on")


@pytest.mark.parametrize("content", [True, False])
def test_what_may_not_come_does_not_come(content: bool):
    free = request(max_tokens=6)
    (first, *_) = reference_tokens(free, VOCABULARY, content=content)
    masked = request(max_tokens=6, stop_token_ids=(first,), min_tokens=3)
    tokens = reference_tokens(masked, VOCABULARY, content=content)
    assert first not in tokens[:3]
    ended = request(max_tokens=6, stop_token_ids=(first,))
    assert reference_tokens(ended, VOCABULARY, content=content) == [first]


def test_prompt_and_noise_key_matter_where_they_should():
    def tokens(content: bool, **changes: object) -> list[int]:
        return reference_tokens(request(**changes), VOCABULARY, content=content)  # type: ignore[arg-type]

    for content in (False, True):
        assert tokens(content) == tokens(content, seed=1)
        assert tokens(content) != tokens(content, prompt=(5, 6, 8))
        assert tokens(content, temperature=1.0) != tokens(content, temperature=1.0, seed=1)


# ------------------------------------------------------------------ adapters


def adapted(requests: list[GenerateRequest]) -> list[GenerateRequest]:
    """Every request three times: for the model, and for two of its adapters."""
    return [replace(one, lora=lora) for one in requests for lora in ("", "poet@1", "clerk@1")]


@pytest.mark.parametrize("content", [True, False])
def test_an_adapter_answers_in_its_own_way(content: bool):
    loras = ("", "poet@1", "poet@2", "clerk@1")
    answers = {
        tuple(reference_tokens(request(lora=lora), VOCABULARY, content=content)) for lora in loras
    }
    assert len(answers) == len(loras)


@pytest.mark.parametrize("content", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scheduling_never_shows_in_the_tokens_of_adapters(
    scenario: Scenario, content: bool, seed: int
):
    mixed = mixed_requests(random.Random(seed), range(4, 97), count=4)
    # One comes once more after all others: a prefix of several blocks is surely there.
    again = replace(mixed[0], prompt=token_ids(range(4, 44)), output=[])
    requests = [*adapted([again]), *adapted(mixed), *adapted([again])]
    outputs = scenario.outputs(SimExecutor, SPEC if content else PLAIN, requests)
    assert outputs == reference(requests, content=content)


def test_a_prefix_is_reused_within_an_adapter_and_never_across():
    cached: dict[str, list[int]] = {}
    with Driver(SPEC) as driver:
        for _ in range(2):
            for lora in ("", "poet@1", "poet@2"):
                handle = driver.submit(request(range(4, 30), lora=lora))
                (end,) = driver.run().ledgers[handle].finishes
                assert end is not None
                cached.setdefault(lora, []).append(end.cached_tokens)
    assert list(cached.values()) == [[0, 24]] * 3


def test_a_vector_is_the_adapters_own():
    def vector(spec: EngineSpec, lora: str) -> bytes:
        with Driver(spec) as driver:
            handle = driver.submit(request(lora=lora, pooling="last", max_tokens=1))
            (end,) = driver.run().ledgers[handle].finishes
            assert end is not None
            return end.embedding

    for wanted in (SPEC, PLAIN):
        assert len({vector(wanted, lora) for lora in ("", "poet@1", "clerk@1")}) == 3


# ------------------------------------------------------------------ planted mistakes


def a_missed_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_plan_copies", lambda self, plan: self._forked.clear())


def a_stale_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash survives its block's eviction."""
    forget = BlockPool._forget

    def keep(self: BlockPool, block: int) -> bytes:
        name = forget(self, block)
        self._by_hash[name] = block
        return name

    monkeypatch.setattr(BlockPool, "_forget", keep)
    monkeypatch.setattr(BlockPool, "check", lambda self: None)


def adapters_under_one_block_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hashes of a prompt's blocks do not depend on the adapter."""
    root = BlockHasher.root
    monkeypatch.setattr(BlockHasher, "root", lambda self, salt, lora="": root(self, salt))


def a_resumed_sequence_that_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a preemption its new blocks count as filled."""
    place = Scheduler._place

    def careless(self: Scheduler, sequence: Sequence) -> bool:
        done = place(self, sequence)
        if done and sequence.preemptions:
            sequence.num_computed = len(sequence.tokens) - 1
        return done

    monkeypatch.setattr(Scheduler, "_place", careless)


@pytest.mark.parametrize(
    "mistake",
    [
        a_missed_copy,
        a_stale_prefix,
        adapters_under_one_block_name,
        a_resumed_sequence_that_computes_nothing,
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_a_mistake_in_a_block_table_changes_the_output(mistake, monkeypatch, seed: int):
    mistake(monkeypatch)
    for attempt in range(20):
        rng = random.Random(f"{seed} {attempt}")
        requests = adapted(mixed_requests(rng, range(4, 97)))
        for scenario in SCENARIOS:
            try:
                outputs = scenario.outputs(SimExecutor, SPEC, requests)
            except (AssertionError, ValueError):
                return  # the books do not balance any more, which is noticed too
            if outputs != reference(requests, content=True):
                return
    raise AssertionError("nobody noticed")


def flip(driver: Driver, block: int) -> None:
    """Change a bit of a block's first byte."""
    region = driver.executor.region()
    assert region.view is not None
    region.view[block * region.block_bytes] ^= 1


@pytest.mark.parametrize("position", [0, 1, 5])
def test_a_block_that_changes_under_a_running_sequence_shows(position: int):
    wanted = request(range(4, 30), max_tokens=40)
    with Driver(SPEC) as driver:
        handle = driver.submit(wanted)
        driver.run_until(0.1)
        (sequence,) = driver.core.scheduler.running
        content = driver.executor.content
        assert isinstance(content, DigestContent)
        flip(driver, sequence.blocks[position])
        ledger = driver.run().ledgers[handle]
        assert content.mismatches > 0
    assert ledger.tokens != reference([wanted], content=True)[0]


def test_a_cached_block_that_is_not_what_its_name_says_shows():
    wanted = request(range(4, 30))
    with Driver(SPEC) as driver:
        first = driver.submit(wanted)
        driver.run()
        block = next(iter(driver.core.pool._cached))
        flip(driver, block)
        second = driver.submit(wanted)
        ledgers = driver.run().ledgers
        assert ledgers[second].finishes[0].cached_tokens > 0  # type: ignore[union-attr]
    assert [ledgers[first].tokens] == reference([wanted], content=True)
    assert ledgers[second].tokens != ledgers[first].tokens


def test_a_vector_depends_on_every_byte_of_every_block() -> None:
    """However the prompt was cut; and not on what lies beyond it."""
    entries = PlainEntries(4, 4)
    digests = DigestContent(VOCABULARY.words, entries, 4)
    found = set()
    ways: list[tuple[Pooling, tuple[int, ...]]] = [("last", (10,)), ("last", (3, 7))]
    for pooling, cuts in (*ways, ("mean", (10,)), ("mean", (1, 9))):
        sequence = pooled(pooling)
        start = 0
        for count in cuts:
            digests.write(ScheduledChunk(sequence, start, count, False))
            start += count
        found.add(digests.vector(sequence))
        digests.release(sequence)
    assert len(found) == 2
    for block, byte in ((0, 0), (1, 63), (2, 15)):
        sequence = pooled("last")
        digests.write(ScheduledChunk(sequence, 0, 9, False))
        digests.release(sequence)
        entries.joined(block, 4)[byte] ^= 1
        digests.write(ScheduledChunk(sequence, 9, 1, False))
        found.add(digests.vector(sequence))
        digests.release(sequence)
    assert len(found) == 5
    assert all(len(vector) == 4 * EMBEDDING_SIZE for vector in found)
    digests.close()


def pooled(pooling: Pooling) -> Sequence:
    """Ten tokens in three blocks, to become a vector."""
    request = GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids(range(10)),
        sampling=SamplingParams(max_tokens=1),
        pooling=pooling,
    )
    return Sequence(1, 0, request, token_ids(range(10)), 10, 0.0, blocks=[0, 1, 2], pools=True)
