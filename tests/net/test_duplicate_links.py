"""Two connections to one node: both sides keep the same one, whatever they see first."""

from __future__ import annotations

import itertools

import pytest

from pdserve.ids import NodeId
from pdserve.net.duplicate_links import Contender, Verdict, resolve

SMALL, LARGE = NodeId("a"), NodeId("b")


def test_the_first_connection_is_taken() -> None:
    assert resolve(SMALL, LARGE, None, Contender(1, True)) is Verdict.TAKE_OVER


@pytest.mark.parametrize("directions", list(itertools.product((True, False), repeat=2)))
def test_a_later_life_wins_and_an_earlier_one_is_refused(directions) -> None:
    old, new = directions
    later = resolve(SMALL, LARGE, Contender(1, old), Contender(2, new))
    earlier = resolve(SMALL, LARGE, Contender(2, old), Contender(1, new))
    assert (later, earlier) == (Verdict.REPLACE, Verdict.REFUSE)


@pytest.mark.parametrize("us", [SMALL, LARGE])
@pytest.mark.parametrize("dialled", [True, False])
def test_a_dialler_that_dials_again_has_given_up_the_old_one(us, dialled) -> None:
    peer = LARGE if us == SMALL else SMALL
    verdict = resolve(us, peer, Contender(1, dialled), Contender(1, dialled))
    assert verdict is Verdict.TAKE_OVER


@pytest.mark.parametrize("directions", list(itertools.product((True, False), repeat=2)))
@pytest.mark.parametrize(("us", "peer"), [(SMALL, LARGE), (LARGE, SMALL)])
def test_one_that_retires_stands_in_nobodys_way(directions, us, peer) -> None:
    old, new = directions
    assert resolve(us, peer, Contender(1, old, True), Contender(1, new)) is Verdict.TAKE_OVER
    assert resolve(us, peer, Contender(2, old, True), Contender(1, new)) is Verdict.REFUSE


@pytest.mark.parametrize("small_sees", list(itertools.permutations(("by small", "by large"))))
@pytest.mark.parametrize("large_sees", list(itertools.permutations(("by small", "by large"))))
def test_simultaneous_dials_end_alike_in_every_order(small_sees, large_sees) -> None:
    """Each side is shown the two connections in some order; both end up with the same one."""

    def ends_with(us: NodeId, peer: NodeId, order: tuple[str, ...]) -> str:
        current: tuple[str, Contender] | None = None
        for name in order:
            new = Contender(1, (name == "by small") == (us == SMALL))
            verdict = resolve(us, peer, current and current[1], new)
            if verdict is not Verdict.YIELD:
                current = (name, new)
        assert current is not None
        return current[0]

    assert ends_with(SMALL, LARGE, small_sees) == "by small"
    assert ends_with(LARGE, SMALL, large_sees) == "by small"
