"""Plans of faults: drawn from the seed, for hosts that exist."""

from __future__ import annotations

import random

from tests.worlds.faults import GENTLE, KINDS, TIER_KINDS, draw_fault, draw_faults
from tests.worlds.plans import ROLES


def test_a_plan_is_in_time_and_about_hosts_that_exist(seed: int) -> None:
    plan = draw_faults(random.Random(seed), ROLES, 5.0, 25.0, 2.0)
    assert plan == draw_faults(random.Random(seed), ROLES, 5.0, 25.0, 2.0)
    assert [fault.at for fault in plan] == sorted(fault.at for fault in plan)
    for fault in plan:
        assert 5.0 < fault.at < 25.0
        assert fault.a in ROLES
        assert fault.b in ROLES.keys() - {fault.a}
        assert ROLES[fault.a] in KINDS[fault.kind].roles


def test_every_kind_can_be_drawn(seed: int) -> None:
    every = KINDS | TIER_KINDS
    for name in (name for name, kind in every.items() if kind.roles):
        assert draw_fault(random.Random(seed), name, ROLES, 1.0).kind == name
    assert every.keys() > GENTLE
