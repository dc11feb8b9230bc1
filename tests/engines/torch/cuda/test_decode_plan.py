"""The division of a batch, and the work items of decoding sequences."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pdserve_engines.torch.cuda.decode_plan import SEGMENT, list_items, split_batch
from pdserve_engines.torch.models.forward_batch import ForwardBatch, Int32s


def ints(*values: int) -> Int32s:
    return np.array(values, np.int32)


def test_a_sequence_has_an_item_for_each_segment() -> None:
    found = list_items(ints(1, SEGMENT, SEGMENT + 1), None)
    assert found.items.tolist() == [[0, 0], [1, 0], [2, 0], [2, SEGMENT]]
    assert found.first_items.tolist() == [0, 1, 2, 4]
    assert found.splits
    assert not list_items(ints(1, SEGMENT), None).splits


@pytest.mark.parametrize("window", [None, 1, 100, SEGMENT, SEGMENT + 1, 10**6])
def test_every_visible_key_is_in_exactly_one_item(window: int | None, seed: int) -> None:
    lengths = random.Random(seed).choices(range(1, 5 * SEGMENT), k=50)
    found = list_items(ints(*lengths), window)
    for sequence, length in enumerate(lengths):
        own = found.items[found.first_items[sequence] : found.first_items[sequence + 1]]
        assert (own[:, 0] == sequence).all()
        begins = own[:, 1].tolist()
        lowest = max(0, length - window) if window is not None else 0
        assert begins == list(range(lowest // SEGMENT * SEGMENT, length, SEGMENT))


def test_segments_do_not_depend_on_the_batch() -> None:
    """Or the order of a sum would."""
    alone = list_items(ints(700), 300).items[:, 1]
    beside = list_items(ints(5, 700, 2000), 300)
    own = beside.items[beside.first_items[1] : beside.first_items[2], 1]
    assert alone.tolist() == own.tolist()


def test_no_sequences_have_no_items() -> None:
    found = list_items(ints(), None)
    assert found.items.shape == (0, 2)
    assert not found.splits


def batch(*chunks: tuple[int, int, list[int]]) -> ForwardBatch:
    """Of chunks (start, count, blocks); a token's id says its chunk and its position."""
    tokens = [100 * index + s + i for index, (s, n, _) in enumerate(chunks) for i in range(n)]
    return ForwardBatch(
        tokens=ints(*tokens),
        positions=ints(*(s + i for s, n, _ in chunks for i in range(n))),
        offsets=ints(*np.cumsum([0, *(n for _, n, _ in chunks)])),
        starts=ints(*(s for s, _, _ in chunks)),
        tables=ints(*(block for _, _, blocks in chunks for block in blocks)),
        table_offsets=ints(*np.cumsum([0, *(len(blocks) for _, _, blocks in chunks)])),
        rows=ints(0),
    )


def test_chunks_of_one_token_decode_and_others_are_a_batch() -> None:
    whole = batch((9, 1, [1, 2]), (0, 3, [3]), (4, 1, [4]), (8, 2, [5, 6]))
    found = split_batch(whole)
    assert found.decodes.tolist() == [0, 2]
    assert found.prompts is not None
    assert found.prompt_rows.tolist() == [1, 2, 3, 5, 6]
    assert found.prompts.tokens.tolist() == [100, 101, 102, 308, 309]
    assert found.prompts.positions.tolist() == [0, 1, 2, 8, 9]
    assert found.prompts.offsets.tolist() == [0, 3, 5]
    assert found.prompts.starts.tolist() == [0, 8]
    assert found.prompts.tables.tolist() == [3, 5, 6]
    assert found.prompts.table_offsets.tolist() == [0, 1, 3]


def test_a_batch_of_one_kind_is_not_copied() -> None:
    prompts = batch((0, 3, [3]), (8, 2, [5, 6]))
    found = split_batch(prompts)
    assert found.prompts is prompts
    assert not len(found.decodes)
    assert found.prompt_rows.tolist() == [0, 1, 2, 3, 4]
    decodes = split_batch(batch((9, 1, [1, 2]), (4, 1, [4])))
    assert decodes.prompts is None
    assert not len(decodes.prompt_rows)
