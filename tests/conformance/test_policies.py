"""One suite over every policy that is registered here."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import pytest

from pdserve.router.policies import (
    least_loaded,
    power_of_two,
    random,
    round_robin,
    session,
    weighted_round_robin,
)
from pdserve.router.policies.approx_prefix import ApproxPrefix
from pdserve.router.policies.kv_load import KvLoad
from pdserve.router.policies.loader import GROUP, load_policy
from pdserve.router.policies.mooncake import Mooncake
from pdserve.router.policies.preble import Preble
from pdserve.router.policies.prefix_hash import PrefixHash
from pdserve.router.policies.sticky import Sticky
from pdserve.router.policies.ttft import Ttft
from pdserve.router.policies.weighted import Weighted
from pdserve.testing.policy_conformance import PolicyConformance
from tests.support.records import replace

if TYPE_CHECKING:
    from random import Random

    from pdserve.messages.routing import RouteRequest
    from pdserve.router.policies.base import RoutingState, WorkerView


class TestRoundRobin(PolicyConformance):
    policy = staticmethod(round_robin.choose)
    heeds_load = False


class TestLeastLoaded(PolicyConformance):
    policy = staticmethod(least_loaded.choose)


class TestPowerOfTwo(PolicyConformance):
    policy = staticmethod(power_of_two.choose)


class TestRandom(PolicyConformance):
    policy = staticmethod(random.choose)
    heeds_load = False


class TestWeightedRoundRobin(PolicyConformance):
    policy = staticmethod(weighted_round_robin.choose)
    heeds_load = False


class TestSession(PolicyConformance):
    policy = staticmethod(session.choose)


class TestPrefixHash(PolicyConformance):
    policy = staticmethod(PrefixHash())


class TestApproxPrefix(PolicyConformance):
    policy = staticmethod(ApproxPrefix(miss="least_loaded"))


class TestApproxPrefixAsItComes(PolicyConformance):
    policy = staticmethod(ApproxPrefix())
    heeds_load = False


class TestWeighted(PolicyConformance):
    policy = staticmethod(Weighted())


class TestKvLoad(PolicyConformance):
    policy = staticmethod(KvLoad())


class TestMooncake(PolicyConformance):
    policy = staticmethod(Mooncake())


class TestSticky(PolicyConformance):
    policy = staticmethod(Sticky())


class TestPreble(PolicyConformance):
    policy = staticmethod(Preble())


class TestTtft(PolicyConformance):
    policy = staticmethod(Ttft())


class TestTtftWhenItHasLearnt(PolicyConformance):
    @staticmethod
    def policy(request: RouteRequest, state: RoutingState, random: Random) -> WorkerView:
        return Ttft()(request, replace(state, model=replace(state.model, fitted=True)), random)


COVERED = {suite.policy for suite in PolicyConformance.__subclasses__()}


@pytest.mark.parametrize("name", sorted({point.name for point in entry_points(group=GROUP)}))
def test_every_policy_of_pdserve_is_covered(name: str):
    policy = load_policy(name)
    assert policy in COVERED or not policy.__module__.startswith("pdserve.")
