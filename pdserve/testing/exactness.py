"""Tests token exactness: every request gets the tokens that it would get alone.

`solo_outputs` is the reference: each request in a fresh engine, without prefix cache and with room
for everything. `Scenario` runs all of them together under conditions that force one mechanism
(chunks, preemption, prefix hits, forks, aborted neighbours). It fails if the engine's counters show
that the mechanism did not run. Works with every executor whose results do not depend on the batch:
scripted, sim, torch in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.messages.engine import QueryStats, Stats
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.inline_engine import InlineEngine
from pdserve.token_ids import token_ids

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from pdserve.engine_core.executor import Executor
    from pdserve.messages.engine import EngineSpec, EngineStats

    Outputs = list[list[list[int]]]

__all__ = ["SCENARIOS", "Scenario", "continued_requests", "mixed_requests", "solo_outputs"]


def mixed_requests(
    rng: random.Random, vocab: Sequence[int], *, count: int = 12, longest: int = 40
) -> list[GenerateRequest]:
    """Requests with shared prefixes, one to three choices, greedy and not, some continued.

    `vocab` are the ids that prompts may contain. Prompt and output have at most `longest` tokens
    each.
    """
    stems = [rng.choices(vocab, k=rng.randint(1, longest // 2)) for _ in range(2)]
    # The same tokens follow different prefixes: their KV differs, so their hashes must differ.
    body = rng.choices(vocab, k=8)
    stems += [rng.choices(vocab, k=4) + body for _ in range(2)]
    requests = []
    for number in range(count):
        prompt = rng.choice(stems) + rng.choices(vocab, k=rng.randint(0, longest // 2))
        n = rng.choice([1, 1, 1, 2, 3])
        given = [rng.choices(vocab, k=rng.randint(0, 5)) for _ in range(n)]
        sampling = SamplingParams(
            max_tokens=rng.randint(6, longest),
            temperature=rng.choice([0.0, 0.8]),
            presence_penalty=rng.choice([0.0, 0.0, 0.6]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            seed=rng.getrandbits(32),
        )
        requests.append(
            GenerateRequest(
                request_id=f"mixed-{number}",
                model="model",
                prompt=token_ids(prompt),
                sampling=sampling,
                n=n,
                output=given if rng.random() < 0.2 else [],
                cache_salt=rng.choice(["", "", "tenant"]),
            )
        )
    return requests


def continued_requests(
    rng: random.Random, requests: Sequence[GenerateRequest], outputs: Outputs
) -> list[GenerateRequest]:
    """The requests as they continue on another worker: each choice at some point of its output,
    or ended."""
    parts = []
    for request, whole in zip(requests, outputs, strict=True):
        first = [len(given) for given in request.output] or [0] * request.n
        cuts = [
            rng.choice([shortest, rng.randint(shortest, len(tokens)), len(tokens)])
            for shortest, tokens in zip(first, whole, strict=True)
        ]
        complete = [choice for choice, cut in enumerate(cuts) if cut == len(whole[choice])]
        ended = [choice for choice in complete if rng.random() < 0.7]
        if len(ended) == request.n:
            # One choice is not listed as ended, so that its given output has to show that it has.
            _ = ended.pop(rng.randrange(request.n))
        output = [tokens[:cut] for tokens, cut in zip(whole, cuts, strict=True)]
        parts.append(msgspec.structs.replace(request, output=output, ended=tuple(ended)))
    return parts


def solo_outputs(
    make_executor: Callable[[], Executor], spec: EngineSpec, requests: Sequence[GenerateRequest]
) -> Outputs:
    """The reference outputs: one choice at a time in an idle engine without prefix cache, with
    whole prompts.

    One engine serves them one after the other; nothing of a request is left when the next one
    comes.
    """
    alone = msgspec.structs.replace(spec, prefix_cache=False)
    with InlineEngine.of(make_executor(), alone) as engine:
        return [engine.generate([request])[0] for request in requests]


@dataclass(frozen=True)
class Scenario:
    """One way to force a scheduling mechanism."""

    name: str
    changes: dict[str, Any]
    """Changed fields of the spec."""
    blocks: int | None
    """Pool size in blocks; None: as the spec says."""
    proof: Callable[[EngineStats], bool]
    """Returns whether the mechanism ran, from the counters at the end."""
    abort_every: int = 0
    """Submit an extra copy of each n-th request and abort it midway; 0: none."""

    def outputs(
        self,
        make_executor: Callable[[], Executor],
        spec: EngineSpec,
        requests: Sequence[GenerateRequest],
        *,
        prove: bool = True,
    ) -> Outputs:
        """Run all requests together. Errors: AssertionError if the mechanism did not run, unless
        `prove` is False."""
        spec = msgspec.structs.replace(spec, **self.changes)
        if self.blocks is not None:
            spec = msgspec.structs.replace(spec, kv_memory=self._memory(make_executor, spec))
        with InlineEngine.of(make_executor(), spec) as engine:
            outputs = self._run(engine, requests)
            engine.core.handle(QueryStats())
            stats = next(e.stats for e in engine.step() if isinstance(e, Stats))
            assert self.proof(stats) or not prove, f"{self.name} was not exercised: {stats}"
            assert stats.blocks_used == 0
            engine.pool.check()
        return outputs

    def _memory(self, make_executor: Callable[[], Executor], spec: EngineSpec) -> int:
        with InlineEngine.of(make_executor(), spec) as engine:
            return engine.capabilities.block_bytes * (self.blocks or 0)

    def _run(self, engine: InlineEngine, requests: Sequence[GenerateRequest]) -> Outputs:
        if not self.abort_every:
            return engine.generate(requests)
        ledgers, doomed = [], []
        for number, request in enumerate(requests):
            if number % self.abort_every == 0:
                doomed.append(engine.submit(request))
            ledgers.append(engine.submit(request))
        for ledger in doomed:
            engine.step()
            engine.abort(ledger)
        engine.run()
        return [ledger.tokens for ledger in ledgers]


SCENARIOS = (
    Scenario("one big batch", {}, None, lambda s: s.preemptions == 0),
    Scenario(
        "small chunks",
        {"max_batch_tokens": 8, "max_sequences": 8, "prefix_cache": False},
        None,
        lambda s: s.steps > s.computed_tokens / 8,
    ),
    Scenario("prefix hits", {"max_sequences": 2}, None, lambda s: s.cached_tokens > 0),
    Scenario("no prefix cache", {"prefix_cache": False}, None, lambda s: s.cached_tokens == 0),
    Scenario("preemption", {}, 24, lambda s: s.preemptions > 0),
    Scenario(
        "preemption without prefix cache",
        {"prefix_cache": False},
        24,
        lambda s: s.preemptions > 0 and s.cached_tokens == 0,
    ),
    Scenario(
        "chunks and preemption",
        {"max_batch_tokens": 8, "max_sequences": 8},
        24,
        lambda s: s.preemptions > 0,
    ),
    Scenario("aborted neighbours", {}, 24, lambda s: s.aborted > 0, abort_every=2),
    Scenario("one at a time", {"max_sequences": 1}, None, lambda s: s.running == 0),
)
"""For a spec with blocks of 4 tokens, `max_model_len` at most 96, and `mixed_requests` as it is."""
