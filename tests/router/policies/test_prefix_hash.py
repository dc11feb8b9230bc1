"""Beginnings go together, within a bound."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from pdserve.router.policies.prefix_hash import PrefixHash
from tests.router.policies.support import ask, snapshot, worker

IDLE = snapshot([worker(node, 2) for node in "abcd"])


def test_only_the_beginning_counts():
    policy = PrefixHash(prefix_tokens=64)
    for first in range(20):
        long, short = ask(50, first=first), ask(2, first=first)
        assert policy(long, IDLE, Random()) is policy(short, IDLE, Random())


def test_other_beginnings_have_other_homes():
    assert len({PrefixHash()(ask(first=i), IDLE, Random()).node for i in range(40)}) == 4


def test_a_crowded_home_is_passed_over():
    home = PrefixHash()(ask(), IDLE, Random()).node
    just = snapshot([worker(node, 2 + (node == home)) for node in "abcd"])  # 3 > 1.25 * 2.25
    assert PrefixHash()(ask(), just, Random()).node != home
    assert PrefixHash(load_factor=2)(ask(), just, Random()).node == home


def test_a_prompt_without_a_full_block_goes_to_the_least_busy():
    state = snapshot([worker("a", 3), worker("b", 1)])
    assert PrefixHash()(ask(0, prompt_tokens=20), state, Random()).node == "b"


@pytest.mark.parametrize("options", [{"prefix_tokens": 0}, {"load_factor": 0.5}])
def test_options_that_cannot_work_are_refused(options: dict[str, Any]):
    with pytest.raises(ValueError, match="at least 1"):
        PrefixHash(**options)
