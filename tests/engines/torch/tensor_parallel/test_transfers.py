"""Prompts prefilled with one tensor-parallel size and decoded with another: each rank's pool moves
its own slices, and the tokens are those of one engine."""

from __future__ import annotations

import functools
import random
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from msgspec.structs import replace as replace_fields

from pdserve.clock import SystemClock
from pdserve.engine_core.core import EngineCore
from pdserve.messages.engine import TransferSpec
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.fake_mover import FakeMover
from pdserve.testing.inline_engine import InlineEngine
from pdserve.token_ids import token_ids
from pdserve.transfer import copy_plan
from pdserve.transfer.copy_plan import plan_block
from pdserve_engines.torch.executor import TorchExecutor
from tests.engine_core.kv_fetch import pair as fetched
from tests.engines.torch.checkpoints import VOCAB, Tiny, build
from tests.engines.torch.driver import spec
from tests.engines.torch.tensor_parallel.thread_ranks import ranks_as_threads
from tests.support.disagg_pair import DisaggPair, make_pair
from tests.support.handoff_pair import EnginePair, HandoffPair, kv_bytes
from tests.support.seeds import is_long, number_for, run_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pdserve.engine_core.kv_transfer.connector import KvConnector
    from pdserve.ids import NodeLife
    from pdserve.messages.engine import EngineSpec
    from pdserve.messages.transfer import RankKvLayout, TransferTicket
    from pdserve.transfer.base import KvPart

BLOCK = 8
HEADS = 12
SIZES = [(1, 2), (2, 1), (3, 2), (2, 3)]
MORE_SIZES = [(4, 2), (4, 1), (1, 4), (2, 4), (4, 4), (3, 3)]
REAL_SIZES = [
    *((6, p, d) for p, d in SIZES),
    *((4, p, d) for p, d in ((4, 1), (4, 2), (2, 4))),
    *((1, p, d) for p, d in ((4, 1), (4, 2), (2, 3), (1, 2))),
]
"""KV heads of the model, ranks of the prefill and of the decode engine. With one KV head all ranks
hold it."""


def real_sizes() -> list[tuple[str, int, int, int]]:
    """Real transports and sizes: two pairs in a short run, others with each commit."""
    pairs = [(backend, *sizes) for backend in ("shm", "tcp") for sizes in REAL_SIZES]
    if is_long():
        return pairs
    turn = number_for(run_seed(), __name__) % len(REAL_SIZES)
    return [pairs[turn], pairs[len(REAL_SIZES) + (turn + 2) % len(REAL_SIZES)]]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with ranks_as_threads():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Checkpoints with 12 heads and so many KV heads."""

    @functools.cache
    def make(kv_heads: int) -> Path:
        fields = {"num_attention_heads": HEADS, "num_key_value_heads": kv_heads, "head_dim": 8}
        directory = tmp_path_factory.mktemp(f"kv{kv_heads}")
        build(Tiny("Llama", fields)).save_pretrained(directory)
        return directory

    return make


def engine_spec(directory: Path, ranks: int = 1) -> EngineSpec:
    return spec(
        directory,
        block_size=BLOCK,
        kv_memory=1 << 19,
        max_model_len=128,
        hash_secret=b"secret",
        options={"kernels": "torch"},
        transfer=TransferSpec(verify="all"),
        tensor_parallel=ranks,
    )


def request(length: int, number: int = 0, n: int = 1, **sampling: Any) -> GenerateRequest:
    fields: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0} | sampling
    prompt = random.Random(number).choices(range(VOCAB), k=length)
    return GenerateRequest(
        request_id="r", model="m", prompt=token_ids(prompt), sampling=SamplingParams(**fields), n=n
    )


def compare(directory: Path, p: int, d: int) -> None:
    alone = InlineEngine.of(TorchExecutor(), engine_spec(directory))
    pair = make_pair(
        TorchExecutor,
        engine_spec(directory),
        p={"tensor_parallel": p, "max_batch_tokens": 12, "max_sequences": 12},
        d={"tensor_parallel": d},
    )
    try:
        hand_over(pair, alone)
    finally:
        pair.close()
        alone.close()


def hand_over(pair: DisaggPair, alone: InlineEngine) -> None:
    wanted = [
        request(5),
        request(16, 1),
        request(27, 2, temperature=0.9, seed=3),
        request(19, 3, n=2, temperature=0.9, seed=4),
    ]
    for one in wanted:
        (ledger,) = pair.generate([one])
        (tokens,) = alone.generate([one])
        assert ledger.tokens == tokens
    stats = pair.d.stats
    assert stats.received_bytes == pair.net.bytes_applied == pair.p.stats.sent_bytes > 0
    assert stats.received_bytes == stats.received_blocks * pair.d.mover.region.block_bytes


@pytest.mark.parametrize(("p", "d"), SIZES)
def test_unequal_sizes_give_the_tokens_of_one_engine(
    model: Callable[[int], Path], p: int, d: int
) -> None:
    compare(model(6), p, d)


@pytest.mark.parametrize(("p", "d"), [(2, 3), (3, 2)])
def test_every_rank_gets_the_bytes_of_its_own_heads(
    model: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, p: int, d: int
) -> None:
    pair = make_pair(
        TorchExecutor,
        engine_spec(model(6)),
        p={"tensor_parallel": p},
        d={"tensor_parallel": d},
    )
    sent: dict[int, int] = {}
    deliver = FakeMover.deliver

    def note(
        mover: FakeMover, handle: int, peer: NodeLife, ticket: TransferTicket, part: KvPart
    ) -> None:
        sent.update(enumerate(part.blocks, part.start // BLOCK))
        deliver(mover, handle, peer, ticket, part)

    monkeypatch.setattr(FakeMover, "deliver", note)
    handle, _ = pair.submit(request(3 * BLOCK))
    pair.run()
    taken = list(pair.opened[handle].ticket.blocks)
    ours = kv_bytes(pair.p.mover.region, [sent[n] for n in range(3)], 3 * BLOCK)
    theirs = kv_bytes(pair.d.mover.region, taken, 3 * BLOCK)
    assert ours.any()
    assert (ours == theirs).all()
    pair.close()


def test_a_byte_that_differs_on_one_rank_is_found(model: Callable[[int], Path]) -> None:
    """The checksum is over the heads in the model's order, so it is the same for both sizes."""
    pair = make_pair(
        TorchExecutor, engine_spec(model(6)), p={"tensor_parallel": 2}, d={"tensor_parallel": 3}
    )
    pair.net.faults = ["corrupt"]
    pair.submit(request(2 * BLOCK))
    while not pair.lost:
        pair.turn()
    assert "corrupt" in pair.lost[0].message
    pair.close()


def test_a_slice_that_goes_to_the_wrong_rank_is_found(model: Callable[[int], Path]) -> None:
    pair = make_pair(
        TorchExecutor, engine_spec(model(6)), p={"tensor_parallel": 2}, d={"tensor_parallel": 2}
    )
    region = pair.d.mover.region
    first, second = region.ranks
    swapped = (replace(first, view=second.view), replace(second, view=first.view))
    pair.d.mover.region = replace(region, ranks=swapped)
    pair.submit(request(2 * BLOCK))
    while not pair.lost:
        pair.turn()
    assert "corrupt" in pair.lost[0].message
    pair.close()


@pytest.mark.parametrize(("p", "d"), [(2, 1), (4, 2)])
def test_a_replicated_head_that_is_sent_twice_is_found(
    model: Callable[[int], Path], p: int, d: int
) -> None:
    """Ranks that hold the same head divide the work; the bytes would be right all the same."""
    plan_block.cache_clear()
    pair = make_pair(
        TorchExecutor, engine_spec(model(1)), p={"tensor_parallel": p}, d={"tensor_parallel": d}
    )
    try:
        with mock.patch.object(copy_plan, "_layers_to_send", all_layers_to_send):
            pair.submit(request(2 * BLOCK))
            while not pair.lost:
                pair.turn()
    finally:
        plan_block.cache_clear()
        pair.close()
    assert re.search(r"\d+ bytes have arrived instead of \d+", pair.lost[0].message)


def all_layers_to_send(
    source: RankKvLayout, destination: RankKvLayout, layers: tuple[int, int]
) -> Iterator[int]:
    """As if no other rank held the same head."""
    first = max(layers[0], source.first_layer, destination.first_layer)
    last = min(layers[1], source.first_layer + source.layers)
    return iter(range(first, last))


@pytest.mark.long(one_in=3)
@pytest.mark.parametrize("kv_heads", [1, 4, 6, 12])
@pytest.mark.parametrize(("p", "d"), [*SIZES, *MORE_SIZES])
def test_every_pair_of_sizes(model: Callable[[int], Path], kv_heads: int, p: int, d: int) -> None:
    for size in (p, d):
        if kv_heads % size and size % kv_heads:
            pytest.skip(f"{size} ranks cannot hold {kv_heads} KV heads")
    compare(model(kv_heads), p, d)


# ------------------------------------------------------------------ real transports


def make_core(mover: KvConnector) -> EngineCore:
    return EngineCore(TorchExecutor(), SystemClock(), mover)


def specs(directory: Path, p: int, d: int, **fields: Any) -> dict[str, EngineSpec]:
    """Of a prefill and a decode engine with so many ranks."""
    sizes = {"p": p, "d": d}
    return {
        name: replace_fields(engine_spec(directory, ranks), **fields)
        for name, ranks in sizes.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "owner", "reader"), [("shm", 2, 3), ("shm", 3, 2), ("tcp", 1, 2), ("tcp", 2, 1)]
)
def test_prefixes_are_fetched_from_engines_of_another_size(
    model: Callable[[int], Path], backend: str, owner: int, reader: int
) -> None:
    alike = {"block_size": fetched.BLOCK, "hash_secret": fetched.SECRET}
    both = EnginePair(backend, make_core, specs(model(6), owner, reader, **alike))
    try:
        wanted = request(37)
        (expected,) = both.o.engine.generate([wanted])
        result = both.absorb(list(wanted.prompt[:36]))
        assert (result.blocks, result.pulled, result.error) == (9, 9, "")
        ledger = both.r.engine.submit(wanted)
        both.until(lambda: ledger.done)
        assert ledger.tokens == expected
        assert both.r.core.stats().cached_tokens == 36
        both.until(both.idle)
    finally:
        both.close()


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "kv_heads", "p", "d"), real_sizes())
def test_prompts_move_between_unequal_sizes_over_real_transports(
    model: Callable[[int], Path], backend: str, kv_heads: int, p: int, d: int
) -> None:
    """Each rank of the receiver has the sender's bytes of its own heads, and no others are sent."""
    both = HandoffPair(backend, make_core, specs(model(kv_heads), p, d))
    alone = InlineEngine.of(TorchExecutor(), engine_spec(model(kv_heads)))
    try:
        wanted = [
            request(5),
            request(37, 1),
            request(64, 2, temperature=0.9, seed=3),
            request(19, 3, n=2, temperature=0.9, seed=4),
        ]
        assert both.hand_over(wanted) == alone.generate(wanted)
    finally:
        both.close()
        alone.close()
