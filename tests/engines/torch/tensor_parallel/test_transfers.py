"""Prompts prefilled with one tensor-parallel size and decoded with another: each rank's pool moves
its own slices, and the tokens are those of one engine."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from msgspec.structs import replace as replace_fields

from pdserve.clock import SystemClock
from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.kv_transfer.thread_connector import (
    ThreadKvConnector,
    make_thread_connector,
)
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.engine import (
    Activate,
    Admitted,
    AttemptBlocksOpened,
    AttemptLost,
    OpenAttemptBlocks,
    Prefilled,
    PrefillForPeer,
    SetNodeLife,
    SubmitRemote,
    TransferSpec,
)
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.fake_mover import FakeMover
from pdserve.testing.inline_engine import InlineEngine
from pdserve.testing.output_checker import OutputChecker
from pdserve.testing.transfer_support import CallCarrier
from pdserve.token_ids import token_ids
from pdserve.transfer.copy_plan import heads_of
from pdserve_engines.torch.executor import TorchExecutor
from tests.engine_core.kv_fetch import pair as fetched
from tests.engine_core.kv_fetch.test_real_transports import RealEnd, RealPair
from tests.engines.torch.checkpoints import VOCAB, Tiny, build
from tests.engines.torch.driver import spec
from tests.engines.torch.tensor_parallel.thread_ranks import ranks_as_threads
from tests.support.disagg_pair import DisaggPair, make_pair
from tests.support.seeds import is_long, number_for, run_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pdserve.messages.engine import EngineSpec, Event
    from pdserve.messages.transfer import TransferTicket
    from pdserve.transfer.base import KvPart, Region

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


def kv_of(region: Region, blocks: list[int], tokens: int) -> torch.Tensor:
    """`[layer, k|v, head, token, dim]` of a sequence, from the pools of all ranks; asserts that
    ranks that hold the same head have the same bytes."""
    found: dict[int, torch.Tensor] = {}
    for pool in region.pools:
        assert pool.view is not None
        held, layout = heads_of(pool.layout), pool.layout
        shape = (pool.blocks, layout.layers, 2, len(held), layout.tokens, layout.dim)
        all_blocks = torch.frombuffer(pool.view, dtype=torch.float32).view(shape)
        ours = torch.cat(list(all_blocks[blocks]), dim=3)[:, :, :, :tokens].clone()
        for place, head in enumerate(held):
            known = found.setdefault(head, ours[:, :, place])
            assert known.equal(ours[:, :, place])
    return torch.stack([found[head] for head in range(region.layout.heads)], dim=2)


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
    ours = kv_of(pair.p.mover.region, [sent[n] for n in range(3)], 3 * BLOCK)
    theirs = kv_of(pair.d.mover.region, taken, 3 * BLOCK)
    assert ours.abs().amax() > 0
    assert ours.equal(theirs)
    del ours, theirs
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


@pytest.mark.long(one_in=3)
@pytest.mark.parametrize("kv_heads", [1, 4, 6, 12])
@pytest.mark.parametrize(("p", "d"), [*SIZES, *MORE_SIZES])
def test_every_pair_of_sizes(model: Callable[[int], Path], kv_heads: int, p: int, d: int) -> None:
    for size in (p, d):
        if kv_heads % size and size % kv_heads:
            pytest.skip(f"{size} ranks cannot hold {kv_heads} KV heads")
    compare(model(kv_heads), p, d)


# ------------------------------------------------------------------ real transports


class TorchPair(RealPair):
    """R fetches what O has, over a real transport."""

    make_end: Callable[[CallCarrier, InlineEngine], RealEnd] = RealEnd

    def __init__(self, backend: str, directory: Path, ranks: dict[str, int]) -> None:
        self._directory, self._ranks = directory, ranks
        super().__init__(backend)

    def _end(self, name: str, spec: EngineSpec) -> RealEnd:
        wanted = replace_fields(
            engine_spec(self._directory, self._ranks[name]),
            block_size=fetched.BLOCK,
            hash_secret=fetched.SECRET,
            transfer=spec.transfer,
        )
        assert spec.transfer is not None
        carrier = CallCarrier(NodeLife(NodeId(name), 1))
        mover = make_thread_connector(spec.transfer, self._woken.set, carrier.end.theirs)
        core = EngineCore(TorchExecutor(), SystemClock(), mover)
        end = type(self).make_end(carrier, InlineEngine(core, wanted))
        core.handle(SetNodeLife(*end.life))
        return end


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "owner", "reader"), [("shm", 2, 3), ("shm", 3, 2), ("tcp", 1, 2), ("tcp", 2, 1)]
)
def test_prefixes_are_fetched_from_engines_of_another_size(
    model: Callable[[int], Path], backend: str, owner: int, reader: int
) -> None:
    both = TorchPair(backend, model(6), {"p": owner, "d": reader})
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


@dataclass(eq=False)
class HandoffEnd(RealEnd):
    """A worker that prefills for its peer, or decodes what its peer has prefilled."""

    requests: dict[int, GenerateRequest] = field(default_factory=dict)
    """What it decodes, by handle; the peer prefills it under the same one."""
    tickets: dict[int, TransferTicket] = field(default_factory=dict)
    sent: dict[int, dict[int, int]] = field(default_factory=dict)
    """By handle, which block holds the prompt's first, second, ... block at the sender."""

    @property
    def region(self) -> Region:
        region = self.core._region
        assert region is not None
        return region

    def note(self, handle: int, part: KvPart) -> None:
        """A part is sent."""
        first = part.start // self.region.layout.tokens
        self.sent.setdefault(handle, {}).update(enumerate(part.blocks, first))

    def submit(self, wanted: GenerateRequest) -> OutputChecker:
        handle = len(self.engine.ledgers) + 1
        self.requests[handle] = wanted
        ledger = self.engine.ledgers[handle] = OutputChecker(wanted)
        self.core.handle(SubmitRemote(handle, wanted))
        return ledger

    def _pass(self, event: Event) -> None:
        assert not isinstance(event, AttemptLost), event.message
        match event:
            case Admitted():
                self.core.handle(OpenAttemptBlocks(event.handle, 1, *self.peer.life))
            case AttemptBlocksOpened():
                self.tickets[event.handle] = event.ticket
                order = PrefillForPeer(
                    event.handle, self.requests[event.handle], event.ticket, *self.life
                )
                self.peer.core.handle(order)
            case Prefilled():
                self.peer.core.handle(Activate(event.handle, 1, event.handoff))
            case _:
                super()._pass(event)


class HandoffPair(TorchPair):
    """`o` prefills, `r` decodes."""

    make_end = HandoffEnd


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "kv_heads", "p", "d"), real_sizes())
def test_prompts_move_between_unequal_sizes_over_real_transports(
    model: Callable[[int], Path],
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    kv_heads: int,
    p: int,
    d: int,
) -> None:
    """Each rank of the receiver has the sender's bytes of its own heads, and no others are sent."""
    both = HandoffPair(backend, model(kv_heads), {"p": p, "d": d})
    prefill, decode = both.o, both.r
    assert isinstance(prefill, HandoffEnd)
    assert isinstance(decode, HandoffEnd)
    deliver = ThreadKvConnector.deliver

    def noted(mover: ThreadKvConnector, handle: int, *rest: Any) -> None:
        prefill.note(handle, rest[-1])
        deliver(mover, handle, *rest)

    monkeypatch.setattr(ThreadKvConnector, "deliver", noted)
    alone = InlineEngine.of(TorchExecutor(), engine_spec(model(kv_heads)))
    try:
        wanted = [
            request(5),
            request(37, 1),
            request(64, 2, temperature=0.9, seed=3),
            request(19, 3, n=2, temperature=0.9, seed=4),
        ]
        ledgers = [decode.submit(one) for one in wanted]
        both.until(lambda: all(ledger.done for ledger in ledgers) and both.idle())
        assert [ledger.tokens for ledger in ledgers] == alone.generate(wanted)
        blocks = 0
        for handle, one in enumerate(wanted, 1):
            sent, taken = prefill.sent[handle], list(decode.tickets[handle].blocks)
            ours = kv_of(prefill.region, [sent[n] for n in range(len(sent))], len(one.prompt))
            theirs = kv_of(decode.region, taken[: len(sent)], len(one.prompt))
            assert ours.abs().amax() > 0
            assert ours.equal(theirs)
            blocks += len(sent)
        del ours, theirs
        stats = decode.core.stats()
        assert stats.received_blocks == blocks
        assert stats.received_bytes == blocks * decode.region.block_bytes
        assert prefill.core.stats().sent_bytes == stats.received_bytes
    finally:
        both.close()
        alone.close()
