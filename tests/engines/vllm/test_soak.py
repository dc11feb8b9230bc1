"""Many short requests through one engine: nothing grows."""

from __future__ import annotations

import gc
import os
import random
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.engines.vllm import real
from tests.engines.vllm.vllm_pool import Router
from tests.support.seeds import is_long

if TYPE_CHECKING:
    from pdserve.engine_core.structured_output import GrammarError

real.require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(7200), pytest.mark.slow, pytest.mark.long]
engines_of_this_file = real.keeps(real.MAIN)

COUNT = int(os.environ.get("PDSERVE_VLLM_SOAK", "100000" if is_long() else "4000"))
WAVE = 200
MOST_GROWTH = 64 << 20
"""Bytes that all processes may grow between the first tenth and the end."""


def memory() -> int:
    """Bytes of this process and of vLLM's worker processes."""
    gc.collect()
    here = psutil.Process()
    return sum(each.memory_info().rss for each in [here, *here.children(recursive=True)])


def sizes(core: Any) -> dict[str, int]:
    """Everything that is kept per request, here and inside of vLLM."""
    scheduler = core.engine._scheduler
    faults: dict[str, GrammarError] = core.engine._constraints.faults
    return {
        "choices": len(core._choices),
        "submissions": len(core._submissions_here),
        "submissions of the kit": len(core._submissions),
        "requests": len(scheduler.requests),
        "running": len(scheduler.running),
        "faults": len(faults),
        "sequences": core.sequences,
    }


def wave(engine: Any, rng: random.Random, router: Router) -> None:
    """Short requests of all kinds; some are aborted early or late."""
    running = []
    for _ in range(WAVE):
        prompt = [rng.randrange(300, 900) for _ in range(rng.randrange(1, 12))]
        shape: dict[str, Any] = {"max_tokens": rng.randrange(1, 5), "temperature": rng.random()}
        shape |= rng.choice([{}, {}, {"n": 2}, {"logprobs": 2}, {"output": [[5, 6]]}])
        shape |= rng.choice([{}, {}, {"logit_bias": {9999: 1.0}}, {"cache_salt": "tenant"}])
        if rng.random() < 0.02:
            shape["grammar"] = rng.choice(['start: "1"', "start: nonsense"])
        running.append(engine.submit(real.request(prompt, seed=rng.getrandbits(60), **shape)))
        if rng.random() < 0.1:
            engine.step()
        if rng.random() < 0.1:
            ledger = rng.choice(running)
            if not ledger.done:
                engine.abort(ledger)
    engine.run()
    assert all(ledger.done for ledger in running)
    router.hear(engine.kv_events)
    engine.kv_events.clear()
    # Handles are counted from the ledgers: those of this wave stay, all with the last one's.
    last = len(engine.ledgers)
    engine.ledgers.update(dict.fromkeys(range(last - WAVE + 1, last), running[-1]))


def test_nothing_grows(seed: int) -> None:
    rng, router = random.Random(seed), Router()
    with real.inline() as engine:
        core: Any = engine.core
        early = 0
        for done in range(0, COUNT, WAVE):
            wave(engine, rng, router)
            assert set(sizes(core).values()) == {0}, sizes(core)
            assert len(router.device) == len(core.names)
            if done <= COUNT // 10:
                early = memory()
        grown = memory() - early
        print(f"{COUNT} requests: {grown / 1e6:.1f} MB more than after {COUNT // 10}")
        assert grown < MOST_GROWTH
        assert len(core.names) <= engine.capabilities.num_blocks
