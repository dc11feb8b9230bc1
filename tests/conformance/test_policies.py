"""One suite over every policy that is registered here."""

from __future__ import annotations

import pytest

from pdserve.router.policies import least_loaded, power_of_two, round_robin
from pdserve.router.policies.load import installed_policies, load_policy
from pdserve.testing.policy_conformance import PolicyConformance


class TestRoundRobin(PolicyConformance):
    policy = staticmethod(round_robin.choose)
    heeds_load = False


class TestLeastLoaded(PolicyConformance):
    policy = staticmethod(least_loaded.choose)


class TestPowerOfTwo(PolicyConformance):
    policy = staticmethod(power_of_two.choose)


COVERED = {TestRoundRobin.policy, TestLeastLoaded.policy, TestPowerOfTwo.policy}


@pytest.mark.parametrize("name", installed_policies())
def test_every_policy_of_pdserve_is_covered(name: str):
    policy = load_policy(name)
    assert policy in COVERED or not policy.__module__.startswith("pdserve.")
