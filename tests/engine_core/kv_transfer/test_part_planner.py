"""Each block goes out once in each layer, whatever chunks a prompt is computed in."""

from __future__ import annotations

import random

import pytest

from pdserve.engine_core.kv_transfer.part_planner import MAX_LAYER_GROUPS, PartPlanner, PartSpan
from pdserve.transfer.copy_plan import blocks_for


def test_full_blocks_go_out_when_they_are_computed_and_the_rest_at_the_end():
    parts = PartPlanner(first_token=0, tokens=10, block_size=4, layers=2)
    assert parts.computed(3) is None
    assert parts.computed(6) == PartSpan(0, 0, 1, (0, 2))
    assert parts.computed(6) is None
    assert not parts.done
    assert parts.computed(10) == PartSpan(1, 1, 3, (0, 2))
    assert parts.done
    assert parts.computed(10) is None


def test_what_the_destination_has_stays_here():
    parts = PartPlanner(first_token=8, tokens=17, block_size=4, layers=1)
    assert parts.computed(8) is None
    assert parts.computed(13) == PartSpan(0, 2, 3, (0, 1))
    assert parts.computed(17) == PartSpan(1, 3, 5, (0, 1))


def test_the_last_chunk_goes_out_in_groups_of_layers():
    parts = PartPlanner(first_token=0, tokens=5, block_size=4, layers=3)
    assert parts.edges == {1, 2, 3}
    assert parts.layered(1) == PartSpan(0, 0, 2, (0, 1))
    assert parts.layered(1) is None
    assert parts.computed(5) == PartSpan(1, 0, 2, (1, 3))
    assert parts.done


@pytest.mark.parametrize("layers", [1, 7, 8, 9, 32, 80])
def test_there_are_never_more_groups_than_that(layers: int):
    assert len(PartPlanner(0, 1, 4, layers).edges) == min(layers, MAX_LAYER_GROUPS)


def test_recomputing_sends_nothing_twice():
    parts = PartPlanner(first_token=0, tokens=20, block_size=4, layers=2)
    assert parts.computed(12) is not None
    for tokens in (0, 4, 8, 12):
        assert parts.computed(tokens) is None
    assert parts.computed(16) == PartSpan(1, 3, 4, (0, 2))


def test_when_numbers_run_short_the_rest_waits_for_the_end():
    parts = PartPlanner(first_token=0, tokens=4000, block_size=1, layers=2, limit=6)
    for tokens in range(3999):
        parts.computed(tokens)
    assert parts.count == 4
    parts.layered(1)
    parts.computed(4000)
    assert parts.count == 6
    assert parts.done


def test_every_block_goes_out_once_in_every_layer(seed: int):
    rng = random.Random(seed)
    for _ in range(200):
        size, layers = rng.randint(1, 9), rng.randint(1, 12)
        tokens = rng.randint(1, 60)
        first = rng.randrange(tokens) // size * size
        parts = PartPlanner(first, tokens, size, layers)
        sent: list[tuple[int, int]] = []

        def take(piece: PartSpan | None, sent: list[tuple[int, int]] = sent) -> None:
            if piece is not None:
                blocks = range(piece.first, piece.last)
                sent += [(block, layer) for block in blocks for layer in range(*piece.layers)]

        done = 0
        while done < tokens:
            take(parts.computed(done))
            done = min(tokens, done + rng.randint(1, 20))
            if done == tokens:
                for layer in range(1, layers):
                    if rng.random() < 0.5:
                        take(parts.layered(layer))
            take(parts.computed(done))
        wanted = range(first // size, blocks_for(tokens, size))
        assert sorted(sent) == [(block, layer) for block in wanted for layer in range(layers)]
        assert parts.done
