"""A sequence that runs on one torch engine goes on at another with its KV: in float32 its tokens
are those of one engine, wherever it is cut, and it is computed once."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from pdserve.testing.inline_engine import InlineEngine
from pdserve_engines.torch.executor import TorchExecutor
from tests.engines.torch.checkpoints import WITH_KERNELS, checkpoint
from tests.engines.torch.test_handoff import (
    BLOCK,
    BUNDLED,
    KERNELS,
    VARIANTS,
    engine_spec,
    prompt_of,
    request,
)
from tests.support.disagg_pair import DisaggPair, make_pair

if TYPE_CHECKING:
    from pdserve.messages.request import GenerateRequest

LENGTH = 30
CUTS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 19)
SETTINGS = {
    name: fields | {"max_tokens": LENGTH, "ignore_eos": True, "stop_token_ids": ()}
    for name, fields in VARIANTS.items()
    if "n" not in fields and "output" not in fields
}


def warm_up(wanted: GenerateRequest, output: list[int]) -> GenerateRequest:
    """As a frontend asks for it."""
    sampling = replace(
        wanted.sampling,
        max_tokens=len(output) + 1,
        ignore_eos=True,
        logprobs=None,
        prompt_logprobs=None,
    )
    return replace(wanted, output=[output], sampling=sampling)


def move(pair: DisaggPair, wanted: GenerateRequest, cut: int, later: int) -> list[int]:
    """Of P's, after so many tokens; it runs on there for `later` more. Returns its output."""
    p, d = pair.p, pair.d
    before = p.stats.computed_tokens
    running = p.engine.submit(wanted)
    while len(running.tokens[0]) < cut:
        p.engine.step()
    snapshot = list(running.tokens[0])
    received, there = d.stats.received_blocks, d.stats.computed_tokens
    pair.generate([warm_up(wanted, snapshot)])
    assert running.done, "it has not noticed"
    whole = running.tokens[0]
    size = len(wanted.prompt) + len(snapshot)
    assert d.stats.computed_tokens == there
    assert d.stats.received_blocks - received == -(-size // BLOCK)
    spent = p.stats.computed_tokens - before - (len(wanted.prompt) + len(whole) - 1)
    assert spent <= BLOCK
    given = whole[: len(snapshot) + later]
    rest = replace(wanted.sampling, prompt_logprobs=None)
    after = d.engine.submit(replace(wanted, output=[given], sampling=rest))
    pair.run()
    assert after.tokens[0] == whole
    assert d.stats.computed_tokens - there <= BLOCK + len(whole) - len(snapshot)
    if wanted.sampling.logprobs is not None:
        for ours, theirs in zip(running.logprobs[0][len(given) :], after.logprobs[0], strict=True):
            assert (ours.token, ours.rank) == (theirs.token, theirs.rank)
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    return whole


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_every_kind_of_request_goes_on(kernels: str, name: str) -> None:
    pair = make_pair(TorchExecutor, engine_spec(checkpoint("qwen3")[0], kernels))
    for seed, cut in enumerate(CUTS if name == "greedy" else CUTS[1::2]):
        wanted = request(prompt_of(13 + seed, seed + 50), **SETTINGS[name])
        move(pair, wanted, cut, later=seed % 3)
    pair.close()


@pytest.mark.parametrize(
    ("name", "kernels"), [*WITH_KERNELS, *(("bundled", kernels) for kernels in KERNELS)]
)
def test_every_family_goes_on(name: str, kernels: str) -> None:
    """As an engine would that is alone with it."""
    chance = random.Random(f"{name} {kernels}")
    spec = engine_spec(BUNDLED if name == "bundled" else checkpoint(name)[0], kernels)
    pair = make_pair(TorchExecutor, spec)
    with InlineEngine.of(TorchExecutor(), replace(spec, transfer=None)) as alone:
        prompt = prompt_of(chance.randrange(1, 40), 90)
        wanted = request(prompt, **SETTINGS["seeded"])
        output = move(pair, wanted, chance.randrange(1, 25), chance.randrange(4))
        assert [[output]] == alone.generate([wanted])
    pair.close()
