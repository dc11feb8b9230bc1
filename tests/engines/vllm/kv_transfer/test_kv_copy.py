"""Copies between vLLM's caches and staging blocks, with ranks of unequal numbers. Needs no vLLM.

The caches are built as vLLM builds them: `[block][head][token][content]` over memory in some order
of axes. What a cell must contain is said by its coordinates alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pdserve.engine_core.staged_kv.pool import StagingPool
from pdserve.errors import EngineError
from pdserve.messages.transfer import RankKvLayout
from pdserve.transfer.copy_plan import PlanError, block_bytes
from pdserve_engines.vllm.kv_transfer import kv_copy
from pdserve_engines.vllm.kv_transfer.device_staging import StagingTensor, tensor_of
from pdserve_engines.vllm.kv_transfer.kv_copy import CacheForm, RankCopier

if TYPE_CHECKING:
    from collections.abc import Iterator

torch = pytest.importorskip("torch")

LAYERS, HEADS, TOKENS, DIM = 3, 4, 8, 6
BLOCKS, SLOTS = 10, 5
LAYOUT = RankKvLayout(content="c", layers=LAYERS, heads=HEADS, tokens=TOKENS, dim=DIM, itemsize=2)
ORDERS = {
    "heads first": (0, 1, 2, 3),
    "tokens first": (0, 2, 1, 3),
    "heads outside": (1, 0, 2, 3),
}


@pytest.fixture(params=["host", "device"])
def staging(request: pytest.FixtureRequest) -> Iterator[StagingPool]:
    """Staging blocks in host memory, or in a tensor that stands for a device's memory."""
    memory = None
    if request.param == "device":
        size = SLOTS * block_bytes(LAYOUT)
        memory = StagingTensor(torch.zeros(size, dtype=torch.uint8))
    pool = StagingPool(LAYOUT, SLOTS, memory)
    yield pool
    pool.close()


def staged_bytes(staging: StagingPool, slot: int) -> bytearray:
    size = staging.block_bytes
    if staging.region.view is not None:
        return bytearray(staging.region.view[slot * size : (slot + 1) * size])
    whole = tensor_of(staging.handle())
    return bytearray(whole[slot * size : (slot + 1) * size].numpy().tobytes())


def cache_of(order: str, packing: str, heads: int, parts: int) -> Any:
    """An empty cache of one layer and rank."""
    sizes = (BLOCKS * parts, heads, TOKENS // parts, 2 * DIM)
    axes = ORDERS[order]
    memory = torch.zeros([sizes[axis] for axis in axes], dtype=torch.bfloat16)
    return memory.permute([axes.index(axis) for axis in range(4)])


def cell(layer: int, kv: int, head: int, token: int, item: int) -> float:
    return float(((layer * 2 + kv) * HEADS + head) * TOKENS * DIM + token * DIM + item) % 199


def place(cache: Any, packing: str, block: int, kv: int, head: int, token: int, parts: int) -> Any:
    """The row of k or v of one token, by definition of the packing."""
    width = TOKENS // parts
    kernel, at = block * parts + token // width, token % width
    if packing == "rows":
        return cache[kernel, head, at, kv * DIM : (kv + 1) * DIM]
    flat = cache[kernel, head].view(-1)
    begin = (kv * width + at) * DIM
    return flat[begin : begin + DIM]


def ranks_of(
    tp: int, order: str, packing: str, parts: int
) -> tuple[list[list[Any]], list[RankCopier]]:
    """Caches and copiers of an engine of `tp` ranks."""
    width = max(1, HEADS // tp)
    form = CacheForm(packing, LAYERS, width, TOKENS, DIM, 2, BLOCKS)
    caches = [[cache_of(order, packing, width, parts) for _ in range(LAYERS)] for _ in range(tp)]
    return caches, [RankCopier(caches[rank], form, tp, rank) for rank in range(tp)]


def fill(caches: list[list[Any]], packing: str, block: int, parts: int) -> None:
    tp = len(caches)
    for rank, layers in enumerate(caches):
        for layer, cache in enumerate(layers):
            for head in range(cache.shape[1]):
                whole = rank * HEADS // tp + head
                for kv in (0, 1):
                    for token in range(TOKENS):
                        row = place(cache, packing, block, kv, head, token, parts)
                        values = [cell(layer, kv, whole, token, item) for item in range(DIM)]
                        row[:] = torch.tensor(values, dtype=torch.bfloat16)


def check(caches: list[list[Any]], packing: str, block: int, parts: int) -> None:
    expected = [[torch.zeros_like(cache) for cache in layers] for layers in caches]
    fill(expected, packing, block, parts)
    for layers, wanted in zip(caches, expected, strict=True):
        for cache, other in zip(layers, wanted, strict=True):
            assert torch.equal(cache, other)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("p", "d"), [(1, 1), (1, 2), (2, 1), (4, 1), (1, 4), (4, 2), (8, 1), (2, 8), (8, 8)]
)
def test_blocks_pass_between_engines_of_any_size(
    staging: StagingPool, p: int, d: int, parts: int, order: str
):
    """Ranks that hold the same head are allowed: 8 ranks of 4 heads."""
    sources, senders = ranks_of(p, order, "rows", parts)
    fill(sources, "rows", 3, parts)
    for sender in senders:
        sender.map(staging.handle())
        sender.save([(3, 2)])
    targets, receivers = ranks_of(d, "heads first", "rows", 1)
    for receiver in receivers:
        receiver.map(staging.handle())
        receiver.load([(7, 2)])
    check(targets, "rows", 7, 1)
    for each in (*senders, *receivers):
        each.close()


@pytest.mark.parametrize(("p", "d"), [(2, 1), (1, 2), (4, 2), (2, 8)])
def test_ranks_that_change_places_are_noticed(
    staging: StagingPool, p: int, d: int, monkeypatch: pytest.MonkeyPatch
):
    """A bug: the ranks are counted from the end."""
    whole = RankCopier.__init__

    def init(self: RankCopier, caches: Any, form: CacheForm, tp: int, rank: int) -> None:
        whole(self, caches, form, tp, tp - 1 - rank)

    monkeypatch.setattr(RankCopier, "__init__", init)
    with pytest.raises(AssertionError):
        test_blocks_pass_between_engines_of_any_size(staging, p, d, 1, "heads first")


@pytest.mark.parametrize("parts", [1, 2])
def test_packed_planes_pass_unchanged(staging: StagingPool, parts: int):
    sources, senders = ranks_of(2, "heads first", "planes vec", parts)
    fill(sources, "planes vec", 1, parts)
    targets, (receiver,) = ranks_of(1, "heads first", "planes vec", parts)
    for sender in senders:
        sender.map(staging.handle())
        sender.save([(1, 4)])
    receiver.map(staging.handle())
    receiver.load([(0, 4)])
    check(targets, "planes vec", 0, parts)
    for each in (*senders, receiver):
        each.close()


def test_staged_bytes_are_in_the_layout_of_transfers(staging: StagingPool):
    sources, (sender,) = ranks_of(1, "tokens first", "rows", 2)
    fill(sources, "rows", 0, 2)
    sender.map(staging.handle())
    sender.save([(0, 1)])
    sender.close()
    block = staged_bytes(staging, 1)
    staged = torch.frombuffer(block, dtype=torch.bfloat16).view(LAYERS, 2, HEADS, TOKENS, DIM)
    for layer in range(LAYERS):
        for kv in (0, 1):
            for head in range(HEADS):
                for token in range(TOKENS):
                    values = [cell(layer, kv, head, token, item) for item in range(DIM)]
                    wanted = torch.tensor(values, dtype=torch.bfloat16)
                    assert torch.equal(staged[layer, kv, head, token], wanted)


def test_many_blocks_are_copied_in_chunks(staging: StagingPool, monkeypatch):
    monkeypatch.setattr("pdserve_engines.vllm.kv_transfer.kv_copy._CHUNK", 2)
    sources, (sender,) = ranks_of(1, "heads first", "rows", 1)
    for block in range(5):
        sources[0][0][block] = block + 1
    sender.map(staging.handle())
    sender.save([(block, 4 - block) for block in range(5)])
    for cache in sources[0]:
        cache.zero_()
    sender.load([(block + 5, 4 - block) for block in range(5)])
    assert [float(sources[0][0][block].max()) for block in range(5, 10)] == [1, 2, 3, 4, 5]
    sender.close()


@pytest.mark.parametrize("pair", [(BLOCKS, 0), (0, SLOTS), (-1, 0), (0, -1)])
def test_blocks_that_do_not_exist_are_refused(staging: StagingPool, pair: tuple[int, int]):
    _, (copier,) = ranks_of(1, "heads first", "rows", 1)
    copier.map(staging.handle())
    for copy in (copier.load, copier.save):
        with pytest.raises(IndexError):
            copy([pair])
    copier.close()


def test_heads_that_cannot_be_divided_are_refused(staging: StagingPool):
    form = CacheForm("rows", LAYERS, 1, TOKENS, DIM, 2, BLOCKS)
    copier = RankCopier([cache_of("heads first", "rows", 1, 1)] * LAYERS, form, 3, 0)
    with pytest.raises(PlanError):
        copier.map(staging.handle())
    copier.close()


# ------------------------------------------------------------------ on the device


def test_the_device_is_waited_for_after_each_copy(staging: StagingPool, monkeypatch):
    """Peers read what was saved, and reuse what was loaded, once the call has ended."""
    seen: list[float] = []
    caches, (copier,) = ranks_of(1, "heads first", "rows", 1)
    copier.map(staging.handle())
    fill(caches, "rows", 3, 1)

    def waited(device: Any) -> None:
        seen.append(float(sum(staged_bytes(staging, 2))) + float(caches[0][0][7].sum()))

    monkeypatch.setattr(kv_copy, "synchronise", waited)
    copier.save([(3, 2)])
    copier.load([(7, 2)])
    with pytest.raises(IndexError):
        copier.load([(0, SLOTS)])
    if staging.in_device:
        saved, loaded, failed = seen
        assert 0 < saved < loaded == failed
    else:
        assert seen == []
    copier.close()


def test_memory_that_is_gone_or_elsewhere_is_refused():
    _, (copier,) = ranks_of(1, "heads first", "rows", 1)
    size = SLOTS * block_bytes(LAYOUT)
    pool = StagingPool(LAYOUT, SLOTS, StagingTensor(torch.zeros(size, dtype=torch.uint8)))
    copier._device = torch.device("meta")
    with pytest.raises(EngineError, match="staging is on cpu"):
        copier.map(pool.handle())
    pool.close()
    pool.close()
    with pytest.raises(EngineError, match="no staging memory"):
        copier.map(pool.handle())
    copier.close()
