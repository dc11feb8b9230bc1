"""A prefix below the device, or at another engine: in float32 the tokens are those of an engine
that computes everything, at every border of blocks, and what lies somewhere is not computed.

`make test` takes some of all layouts, others for each commit; `make test-long` takes them all.
"""

from __future__ import annotations

import itertools
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.engine_core.kv_fetch.pair import evict
from tests.engines.torch.checkpoints import checkpoint
from tests.engines.torch.test_handoff import (
    BLOCK,
    BUNDLED,
    KERNELS,
    VARIANTS,
    engine_spec,
    prompt_of,
    request,
)
from tests.engines.torch.tiered_pair import (
    TieredPair,
    counted,
    named,
    tiered_pair,
)
from tests.support.seeds import is_long

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


MOST = 6
"""Blocks of a prompt at most."""
BORDERS = (-1, 0, 1)
"""Tokens of a prompt beside whole blocks."""
POOL = 1 << 19
"""Bytes of a device's blocks: a hundred."""


def layouts() -> list[str]:
    """Every layout of up to two blocks in each place; host and disk in both orders, and in turn."""
    found = set()
    counts = range(3)
    for device, host, disk, peer, rest in itertools.product(*[counts] * 4, range(2)):
        for lower in ("H" * host + "S" * disk, "S" * disk + "H" * host):
            found.add("D" * device + lower + "P" * peer + "." * rest)
    found |= {"HSHS", "SHSHP", "DSHSH", "DHSHP."}
    return sorted(one for one in found if 0 < len(one) <= MOST)


LAYOUTS = layouts()


def some(cases: list[Any], seed: int, long: bool, count: int) -> list[Any]:
    """All of the cases, or some that the seed chooses."""
    return cases if long else Random(seed).sample(cases, count)


@pytest.fixture(scope="module", params=KERNELS if is_long() else KERNELS[:1])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[2048, 6], ids=["whole", "chunked"])
def engines(
    request: pytest.FixtureRequest, kernels: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TieredPair]:
    """D computes prompts at once, or in chunks that end within blocks."""
    pair = made(kernels, tmp_path_factory.mktemp("tiers"), max_batch_tokens=request.param)
    yield pair
    pair.close()


@pytest.fixture
def both(engines: TieredPair) -> TieredPair:
    """The engines, which have nothing yet."""
    engines.forget()
    return engines


def made(kernels: str, folder: Path, model: Path | None = None, **changes: Any) -> TieredPair:
    spec = engine_spec(model or checkpoint("qwen3")[0], kernels, max_sequences=6)
    # Every step looks at every block.
    spec = replace(spec, kv_memory=POOL if model is None else spec.kv_memory)
    return tiered_pair(spec, folder, request([1], max_tokens=1), **changes)


def case(pair: TieredPair, layout: str, border: int, dice: int, **changes: Any) -> None:
    """Place a prompt's blocks, ask for it, and forget everything."""
    length = max(1, len(layout) * BLOCK + border)
    wanted = request(prompt_of(length, dice), **({"max_tokens": 4} | changes))
    pair.place(wanted.prompt, layout)
    pair.check(wanted, layout[: length // BLOCK], Random(dice))
    pair.forget()


def test_every_layout_at_every_border(both: TieredPair, seed: int, long: bool) -> None:
    cases = list(itertools.product(LAYOUTS, BORDERS))
    for number, (layout, border) in enumerate(some(cases, seed, long, 8)):
        case(both, layout, border, seed + number, temperature=0.8, seed=number)
    both.check_idle()


@pytest.mark.parametrize("name", [name for name in VARIANTS if "log" not in name])
def test_every_kind_of_request(both: TieredPair, name: str, seed: int, long: bool) -> None:
    """Also of several choices, and with output that an earlier worker has given."""
    for number, layout in enumerate(some(LAYOUTS, seed, long, 1)):
        case(both, layout, Random(number).choice(BORDERS), seed + number, **VARIANTS[name])


def test_log_probabilities_of_a_prefix_from_everywhere(both: TieredPair) -> None:
    case(both, "DHSPP", 1, 5, logprobs=3, temperature=0.0)


@pytest.mark.parametrize("place", ["device", "host", "disk"])
def test_the_peer_gives_what_it_has_below_its_device(
    both: TieredPair, place: str, seed: int
) -> None:
    """Each block of the owner's own, wherever it lies there."""
    letter = {"device": "D", "host": "H", "disk": "S"}[place]
    wanted = request(prompt_of(5 * BLOCK + 1, seed), max_tokens=4, temperature=0.0)
    both.place(wanted.prompt, letter * 5, both.p)
    both.place(wanted.prompt, "HS")
    both.check(wanted, "HSPPP", Random(seed))
    both.forget()


def test_sequences_that_were_fetched_for_are_preempted(
    kernels: str, tmp_path: Path, seed: int
) -> None:
    """They come back, from wherever their blocks are by then, and have the same tokens."""
    pair = made(kernels, tmp_path, kv_memory=1 << 18)
    places = ["DHHP", "HSPP", "SSHHP", "PPPP"]
    wanted = [
        request(
            prompt_of(len(layout) * BLOCK + border, seed + border),
            max_tokens=90,
            ignore_eos=True,
            temperature=0.9,
            seed=border,
        )
        for border, layout in enumerate(places, -1)
    ]
    for one, layout in zip(wanted, places, strict=True):
        pair.place(one.prompt, layout)
        evict(pair.d, pair.d.core.pool.counts().cached)
    cold = [pair.expected(one)[0] for one in wanted]
    before, pair.pace = counted(pair.d), 0.001
    ledgers = [
        pair.d.engine.submit(named(one, layout)) for one, layout in zip(wanted, places, strict=True)
    ]
    pair.run(Random(seed))
    for ledger, expected in zip(ledgers, cold, strict=True):
        pair.compare(ledger, expected)
    came = counted(pair.d).since(before)
    assert pair.d.stats.preemptions > 0
    assert min(came.host, came.disk, came.peer) > 0, came
    pair.close()


def test_the_bundled_model(kernels: str, tmp_path: Path, seed: int, long: bool) -> None:
    pair = made(kernels, tmp_path, BUNDLED)
    for layout in some(["HHH", "SSS", "DHSPP"], seed, long, 1):
        case(pair, layout, 1, seed, temperature=0.7, seed=4)
    pair.close()
