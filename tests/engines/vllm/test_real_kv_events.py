"""What routers hear of the real vLLM is what its pool holds."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.blocks.hashing import block_hashes, prompt_root
from pdserve.messages.engine import ClearCache, KvEvents, SetHashSecret
from tests.engines.vllm import real
from tests.engines.vllm.vllm_pool import Router

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.messages.engine import Event
    from pdserve.testing.inline_engine import InlineEngine

real.require_vllm()
pytestmark = real.MARKS
engines_of_this_file = real.keeps(real.MAIN)


@pytest.fixture
def engine() -> Iterator[InlineEngine]:
    with real.inline() as inline:
        yield inline


def pool_of(engine: InlineEngine) -> Any:
    core: Any = engine.core
    return core.engine._scheduler.kv_cache_manager.block_pool


def held(engine: InlineEngine) -> int:
    """Different blocks that vLLM could reuse."""
    return len(pool_of(engine).cached_block_hash_to_block)


def names(engine: InlineEngine, tokens: list[int], salt: str = "", secret: bytes = real.SECRET):
    root = prompt_root(secret, engine.capabilities.compat_hash, salt, "")
    return block_hashes(tokens, real.BLOCK, parent=root, secret=secret)


def hear(router: Router, events: list[Event]) -> None:
    for event in events:
        if isinstance(event, KvEvents):
            router.hear(event.events)


def prompt_of(rng: random.Random) -> list[int]:
    """Some share long beginnings, none fills the context."""
    head = [300 + rng.randrange(3)] * (real.BLOCK * rng.randrange(4))
    return [*head, *(rng.randrange(300, 900) for _ in range(rng.randrange(1, 50)))]


def random_traffic(engine: InlineEngine, router: Router, rng: random.Random, count: int) -> None:
    running = []
    for _ in range(count):
        salt = rng.choice(["", "tenant"])
        shape: dict[str, Any] = {"max_tokens": rng.randrange(1, 40), "n": rng.randrange(1, 3)}
        shape |= {"cache_salt": salt, "priority": rng.randrange(3), "temperature": 1.0}
        running.append(engine.submit(real.request(prompt_of(rng), **shape)))
        if rng.random() < 0.2:
            ledger = running.pop(rng.randrange(len(running)))
            if not ledger.done:
                engine.abort(ledger)
        for _ in range(rng.randrange(4)):
            hear(router, engine.step())
    while engine.core.has_work:
        hear(router, engine.step())


def test_the_index_is_the_pool_after_random_traffic(engine: InlineEngine, seed: int) -> None:
    """With evictions, preemptions and aborts; `Router` checks every single event, too."""
    router, rng = Router(), random.Random(seed)
    random_traffic(engine, router, rng, 60)
    assert len(router.device) == held(engine) > 0
    core: Any = engine.core
    assert len(core.names) == held(engine)


def test_what_the_index_says_is_found(engine: InlineEngine, seed: int) -> None:
    """A prompt of which routers know k blocks is computed from the k-th block on."""
    router, rng = Router(), random.Random(seed)
    random_traffic(engine, router, rng, 25)
    for _ in range(20):
        prompt = prompt_of(rng)
        known = 0
        for name in names(engine, prompt[: (len(prompt) - 1) // real.BLOCK * real.BLOCK]):
            if name not in router.device:
                break
            known += 1
        ledger = engine.submit(real.request(prompt, max_tokens=1))
        while engine.core.has_work:
            hear(router, engine.step())
        assert ledger.finishes[0] is not None
        assert ledger.finishes[0].cached_tokens == known * real.BLOCK


def test_output_is_named_like_a_prompt(engine: InlineEngine) -> None:
    """So that the next turn of a conversation finds it."""
    router, prompt = Router(), [400] * 40
    ledger = engine.submit(real.request(prompt, max_tokens=60, cache_salt="tenant"))
    while engine.core.has_work:
        hear(router, engine.step())
    # The last token is sampled and not computed.
    whole = [*prompt, *ledger.tokens[0]][:-1]
    assert router.device == set(names(engine, whole, "tenant"))


def test_a_preempted_request_keeps_the_index_right(engine: InlineEngine) -> None:
    router = Router()
    for number in range(12):
        engine.submit(real.request([300 + number] * 100, max_tokens=80, priority=number))
    while engine.core.has_work:
        hear(router, engine.step())
    assert engine.core.stats().preemptions > 0  # type: ignore[attr-defined]
    assert len(router.device) == held(engine)


def test_clearing_and_rekeying(engine: InlineEngine) -> None:
    router, prompt = Router(), [400] * 65
    for secret in (real.SECRET, b"another"):
        engine.submit(real.request(prompt, max_tokens=1))
        while engine.core.has_work:
            hear(router, engine.step())
        assert router.device == set(names(engine, prompt, secret=secret))
        engine.core.handle(ClearCache() if secret != b"another" else SetHashSecret(b"third"))
        while engine.core.has_work:
            hear(router, engine.step())
        assert router.device == set()
        assert held(engine) == 0
        engine.core.handle(SetHashSecret(hash_secret=b"another"))
