"""Sources of randomness are apart from each other and the same again."""

from __future__ import annotations

from pdserve.sim.rng_tree import RngTree


def test_a_label_names_a_source() -> None:
    dice = RngTree(7)
    assert dice.fork("a").random() == RngTree(7).fork("a").random()
    assert dice.fork("a").random() != dice.fork("b").random()
    assert dice.fork("a").random() != RngTree(8).fork("a").random()
    assert dice.below("a").fork("b").random() == RngTree(7).below("a").fork("b").random()
    assert dice.below("a").fork("b").random() != dice.fork("b").random()


def test_a_draw_more_changes_nothing_for_others() -> None:
    dice = RngTree(7)
    first = dice.fork("a")
    first.random()
    assert dice.fork("b").random() == RngTree(7).fork("b").random()
