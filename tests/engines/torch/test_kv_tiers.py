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

    from pdserve.messages.request import GenerateRequest

MOST = 6
"""Blocks of a prompt at most."""
BORDERS = (-1, 0, 1)
"""Tokens of a prompt beside whole blocks."""
POOL = 1 << 19
"""Bytes of a device's blocks: a hundred."""
CUTS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 19)
"""Tokens of output after which a request moves."""


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
AT_D = ("", "D", "H", "S", "DHS", "SH")
AT_P = ("", "DD", "HHH", "SSSS", "DHSH")
"""Blocks that either end of a handoff has."""


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


def made(
    kernels: str,
    folder: Path,
    model: Path | None = None,
    kv_cache_dtype: str = "auto",
    **changes: Any,
) -> TieredPair:
    spec = engine_spec(model or checkpoint("qwen3")[0], kernels, max_sequences=6)
    spec.options["kv_cache_dtype"] = kv_cache_dtype
    # Every step looks at every block.
    spec = replace(spec, kv_memory=POOL if model is None else spec.kv_memory)
    return tiered_pair(spec, folder, request([1], max_tokens=1), **changes)


def test_kv_in_fp8_comes_back_from_every_place(tmp_path: Path) -> None:
    pair = made("torch", tmp_path, kv_cache_dtype="fp8_e4m3")
    for dice, layout in enumerate(("DHSP.", "HS", "SP", "D.")):
        case(pair, layout, dice - 1, dice)
    pair.close()


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


def test_a_request_that_moves_takes_its_own_output_along(
    both: TieredPair, seed: int, long: bool
) -> None:
    """Its first worker goes when it has streamed so much. The blocks of its output come too."""
    cases = list(itertools.product(LAYOUTS, CUTS))
    for number, (layout, cut) in enumerate(some(cases, seed, long, 3)):
        move(both, layout, cut, seed + number)


def move(both: TieredPair, layout: str, cut: int, seed: int) -> None:
    prompt = prompt_of(max(1, len(layout) * BLOCK - cut), seed)
    wanted = request(prompt, max_tokens=30, temperature=0.9, seed=seed % 7, ignore_eos=True)
    cold, _ = both.expected(wanted)
    running = both.p.engine.submit(wanted)
    while len(running.tokens[0]) < cut:
        both.turn()
    given = list(running.tokens[0])
    both.p.engine.abort(running)
    both.run()
    assert given == cold.tokens[0][: len(given)]
    tokens = prompt + given
    if "P" not in layout:
        evict(both.p, both.p.core.pool.counts().cached)
    both.place(tokens, layout.replace("P", "."))
    # The last token has no KV before the next step, so P has the full blocks of all but it.
    both.check(replace(wanted, output=[given]), layout[: (len(tokens) - 1) // BLOCK])
    both.forget()


@pytest.mark.parametrize("early", [True, False])
def test_a_prompt_is_prefilled_elsewhere_and_both_ends_have_some(
    both: TieredPair, early: bool, seed: int, long: bool
) -> None:
    """What D has brought up by then is not sent, what P has is not computed."""
    cases = list(itertools.product(AT_D, AT_P, BORDERS, (1, 3)))
    for number, (at_d, at_p, border, n) in enumerate(some(cases, seed, long, 2)):
        length = 5 * BLOCK + border
        wanted = request(prompt_of(length, seed + number), n=n, temperature=0.9, seed=number)
        hand_over(both, wanted, at_d, at_p, early)


def hand_over(both: TieredPair, wanted: GenerateRequest, at_d: str, at_p: str, early: bool) -> None:
    """`early`: D has brought up its blocks before P's attempt is opened."""
    length = len(wanted.prompt)
    both.place(wanted.prompt, at_d)
    both.place(wanted.prompt, at_p, both.p)
    cold, _ = both.expected(wanted)
    before_d, before_p = counted(both.d), counted(both.p)
    handle, ledger = both.submit(wanted)
    if early:
        both.bring_up(handle)
        both.open(handle)
    both.run(Random(length))
    both.compare(ledger, cold)
    at_once = len(at_d) if early else at_d.count("D")
    d, p = counted(both.d).since(before_d), counted(both.p).since(before_p)
    assert d.computed == sum(len(output) - 1 for output in ledger.tokens)
    assert d.received == length - at_once * BLOCK
    usable = at_p[: (length - 1) // BLOCK]
    # Each further choice samples from the last token's logits, computed once more.
    assert p.computed == length - len(usable) * BLOCK + wanted.n - 1
    assert (p.host, p.disk) == (usable.count("H") * BLOCK, usable.count("S") * BLOCK)
    if early:
        assert (d.host, d.disk) == (at_d.count("H") * BLOCK, at_d.count("S") * BLOCK)
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
