"""Plans put every byte where it belongs, whatever the ranks, or say why there is none."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.testing.kv_oracle import expected_block, expected_pool, held_heads, layouts, pattern
from pdserve.transfer.copy_plan import (
    CopyRuns,
    PlanError,
    align_blocks,
    bind_blocks,
    bind_blocks_pure,
    block_bytes,
    blocks_for,
    heads_of,
    layer_groups,
    plan_block,
    rank_pairs,
    split_runs,
    valid_tokens,
)

if TYPE_CHECKING:
    from pdserve.messages.transfer import RankKvLayout

SIZES = (1, 2, 3, 4, 6, 8)
FIT = [
    (heads, p) for heads in (24, 12, 8, 6, 4, 2, 1) for p in SIZES if not (heads % p and p % heads)
]
PAIRS = [(heads, p, d) for heads, p in FIT for other, d in FIT if other == heads]


def pools(ranks: tuple[RankKvLayout, ...], blocks: int, names: dict[int, int]) -> list[bytearray]:
    return [
        bytearray(expected_pool(rank, blocks, names, range(rank.first_layer, 99))) for rank in ranks
    ]


def carry(runs: CopyRuns, source: bytearray, destination: bytearray) -> None:
    for here, there, length in runs:
        assert 0 <= here <= here + length <= len(source)
        assert 0 <= there <= there + length <= len(destination)
        destination[there : there + length] = source[here : here + length]


@pytest.mark.parametrize(("heads", "p", "d"), PAIRS)
def test_every_byte_arrives_once_between_any_two_sizes(heads: int, p: int, d: int, seed: int):
    random = Random(seed)
    sources, destinations = layouts(heads, p), layouts(heads, d)
    ours, theirs = random.sample(range(8), 5), random.sample(range(9), 5)
    full = pools(sources, 8, {block: 10 + i for i, block in enumerate(ours)})
    empty = pools(destinations, 9, {})
    carried = 0
    for group in layer_groups((0, 3), random.randint(1, 3)):
        for s, source in enumerate(sources):
            for t, destination in enumerate(destinations):
                runs = bind_blocks(plan_block(source, destination, group), ours, theirs)
                carry(runs, full[s], empty[t])
                carried += runs.size
    want = pools(destinations, 9, {block: 10 + i for i, block in enumerate(theirs)})
    assert empty == want
    assert carried == 5 * sum(block_bytes(rank) for rank in destinations), "no byte goes twice"


@pytest.mark.parametrize(("heads", "p", "d"), PAIRS)
def test_replicas_share_the_work(heads: int, p: int, d: int):
    sources, destinations = layouts(heads, p, layers=8), layouts(heads, d, layers=8)
    busy = {s for s, _ in rank_pairs(sources, destinations)}
    copies = max(1, p // heads)
    served = max(1, d // heads)
    if d > heads:
        assert len(busy) == heads * min(copies, served) if p >= heads else len(busy) == p
    else:
        assert len(busy) == p


def test_one_pair_per_overlap():
    counts = {(4, 6): 8, (2, 4): 4, (3, 4): 6, (1, 12): 12, (12, 1): 12, (4, 4): 4}
    for (p, d), count in counts.items():
        assert len(rank_pairs(layouts(12, p), layouts(12, d))) == count


@pytest.mark.parametrize(("heads", "p"), FIT)
def test_ranks_hold_their_heads(heads: int, p: int):
    for rank in layouts(heads, p):
        assert list(heads_of(rank)) == held_heads(rank)
        assert block_bytes(rank) == len(expected_block(rank, 0))


def test_layers_of_a_pipeline_meet():
    (source,) = layouts(2, 1, layers=4, first_layer=2)
    (destination,) = layouts(2, 1, layers=5, first_layer=4)
    pool, out = pools((source,), 1, {0: 7})[0], pools((destination,), 1, {})[0]
    carry(bind_blocks(plan_block(source, destination, (0, 99)), [0], [0]), pool, out)
    assert out == expected_pool(destination, 1, {0: 7}, (4, 5))
    assert plan_block(source, layouts(2, 1, first_layer=9)[0], (0, 99)).spans == ()


# ------------------------------------------------------------------------------ runs


def test_neighbours_become_one_run():
    (rank,) = layouts(2, 1)
    size = block_bytes(rank)
    runs = bind_blocks(plan_block(rank, rank, (0, 3)), [4, 5, 6, 1, 2, 9], [0, 1, 2, 3, 4, 8])
    assert list(runs) == [
        (4 * size, 0, 3 * size),
        (size, 3 * size, 2 * size),
        (9 * size, 8 * size, size),
    ]
    assert len(bind_blocks(plan_block(rank, rank, (0, 3)), [4, 5], [1, 0])) == 2, "not backwards"
    assert len(bind_blocks(plan_block(rank, rank, (0, 3)), [], [])) == 0


def test_a_group_of_layers_is_one_run_per_block():
    (rank,) = layouts(2, 1, layers=4)
    size = block_bytes(rank)
    runs = bind_blocks(plan_block(rank, rank, (1, 3)), [4, 5], [0, 1])
    assert list(runs) == [
        (4 * size + size // 4, size // 4, size // 2),
        (5 * size + size // 4, size + size // 4, size // 2),
    ]


def test_heads_of_another_rank_are_one_run_per_layer_and_half():
    (whole,), halves = layouts(4, 1), layouts(4, 2)
    assert len(bind_blocks(plan_block(whole, halves[1], (0, 3)), [0, 1], [5, 6])) == 2 * 3 * 2


@given(
    st.lists(st.integers(0, 12), unique=True, max_size=12), st.sampled_from([1, 2, 4]), st.randoms()
)
def test_twins_bind_the_same(blocks: list[int], d: int, random: Random):
    others = random.choice([blocks, random.sample(range(13), len(blocks))])
    source, destination = layouts(4, 2)[0], layouts(4, d)[0]
    for layers in ((0, 3), (1, 2)):
        plan = plan_block(source, destination, layers)
        assert bind_blocks(plan, blocks, others) == bind_blocks_pure(plan, blocks, others)


def test_runs_are_arrays_that_c_code_can_read():
    (rank,) = layouts(2, 1)
    runs = bind_blocks(plan_block(rank, rank, (0, 3)), [1, 3], [0, 1])
    for column in (runs.source, runs.destination, runs.length):
        view = memoryview(column)
        assert (view.format, view.itemsize, len(view)) == ("q", 8, 2)


@given(st.lists(st.integers(0, 30), unique=True, max_size=20), st.integers(1, 500), st.randoms())
def test_splitting_keeps_the_bytes(blocks: list[int], limit: int, random: Random):
    (rank,) = layouts(2, 1)
    others = random.sample(range(31), len(blocks))
    runs = bind_blocks(plan_block(rank, rank, (0, 3)), blocks, others)
    cut = split_runs(runs, limit)
    assert max(cut.length, default=0) <= max(limit, 1)

    def single(of: CopyRuns) -> list[tuple[int, int]]:
        return [(s + at, d + at) for s, d, n in of for at in range(n)]

    assert single(cut) == single(runs)


# ------------------------------------------------------------------------------ tokens


@pytest.mark.parametrize(
    ("start", "count", "skip", "place"),
    [(64, 4, 0, 0), (0, 6, 2, 0), (96, 3, 0, 1), (0, 2, 2, 0), (0, 0, 0, 0), (160, 1, 0, 3)],
)
def test_both_ends_count_from_the_same_token(start: int, count: int, skip: int, place: int):
    assert align_blocks(64, 100, 32, start, count) == (
        skip,
        place,
    )  # 4 blocks, the last with 4 tokens


@pytest.mark.parametrize(
    ("first", "start", "count"), [(64, 10, 1), (10, 64, 1), (64, 64, 5), (64, 192, 1), (0, -32, 1)]
)
def test_what_cannot_be_aligned_is_refused(first: int, start: int, count: int):
    with pytest.raises(PlanError):
        align_blocks(first, 100, 32, start, count)


def test_the_last_block_knows_its_tokens():
    assert blocks_for(100, 32) == 4
    assert [valid_tokens(100, 32, place) for place in range(4)] == [32, 32, 32, 4]
    assert valid_tokens(64, 32, 1) == 32
    for place in (-1, 4):
        with pytest.raises(PlanError):
            valid_tokens(100, 32, place)


def test_groups_cover_the_layers():
    assert layer_groups((0, 7), 3) == [(0, 2), (2, 4), (4, 7)]
    assert layer_groups((2, 4), 9) == [(2, 3), (3, 4)]
    for layers, count in (((3, 3), 1), ((0, 3), 0)):
        with pytest.raises(PlanError):
            layer_groups(layers, count)


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("field", ["content", "heads", "tokens", "dim", "itemsize"])
def test_other_bytes_are_refused_by_name(field: str):
    (rank,) = layouts(2, 1)
    value = "other" if field == "content" else getattr(rank, field) * 2
    with pytest.raises(PlanError, match=field):
        plan_block(rank, msgspec.structs.replace(rank, **{field: value}), (0, 3))


@pytest.mark.parametrize(("heads", "p"), [(6, 4), (4, 6), (3, 2), (8, 3)])
def test_heads_that_do_not_divide_are_refused(heads: int, p: int):
    with pytest.raises(PlanError, match=f"{heads} heads"):
        plan_block(layouts(heads, p)[0], layouts(heads, 1)[0], (0, 3))


def test_no_such_rank():
    (rank,) = layouts(2, 1)
    with pytest.raises(PlanError, match="no rank 1"):
        heads_of(msgspec.structs.replace(rank, rank=1))


def test_lists_of_other_lengths_and_endless_ones_are_refused():
    (whole,), halves = layouts(4, 1, layers=256), layouts(4, 2, layers=256)
    plan = plan_block(whole, halves[0], (0, 256))
    with pytest.raises(PlanError, match="cannot fill"):
        bind_blocks(plan, [0, 1], [0])
    with pytest.raises(PlanError, match="more than"):
        bind_blocks(plan, range(8193), range(8193))


def test_the_pattern_is_nobodys():
    assert set(pattern(3)) == {0xA5}
