from __future__ import annotations

import itertools

import pytest

from pdserve.planner.changes.ids import change_id, model_tag, read_change_id


def test_an_id_says_model_and_mode():
    for mode in ("aggregated", "prefill", "decode", "both", ""):
        name = read_change_id(change_id("org/model", mode, 7, 3, 0))
        assert name == (model_tag("org/model"), mode)


def test_the_same_order_has_the_same_id_and_no_other_has():
    assert change_id("m", "decode", 7, 3, 1) == change_id("m", "decode", 7, 3, 1)
    orders = itertools.product(("m", "n"), ("decode", "prefill"), (1, 11), (1, 2), (0, 1, 11))
    ids = [change_id(*order) for order in orders]
    assert len({*ids}) == len(ids) == 48


def test_an_id_fits_units_comments_and_labels():
    name = change_id("Qwen/Qwen3 Ω:latest", "both", 1 << 60, 10**9, 99)
    assert len(name) == 27
    assert set(name) <= set("0123456789abcdef-pdbx")


@pytest.mark.parametrize("name", ["", "mine", "a-b-c", "3f2a91c0-q-00", "3f2a91cg-a-00", "a-a"])
def test_other_names_are_no_planners(name):
    assert read_change_id(name) is None
