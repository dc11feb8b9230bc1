"""Tests that a policy keeps to the rules of `pdserve.router.policies`: a suite to inherit.

    class TestMyPolicy(PolicyConformance):
        policy = staticmethod(choose)

It needs only pytest. A policy never sees ineligible workers, so the suite does not test them.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from random import Random
from typing import TYPE_CHECKING, ClassVar

from pdserve.ids import NodeId
from pdserve.messages.routing import RouteRequest
from pdserve.router.policies.base import RoutingState, WorkerView

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdserve.router.policies.base import Policy

__all__ = ["PolicyConformance", "some_states", "state_of", "view"]

ROUTE_REQUEST = RouteRequest(request_id="r", model="m", prompt_tokens=100, max_tokens=10)


def view(node: str, sequences: int = 0, max_sequences: int = 8) -> WorkerView:
    """A worker with this much load, all of it prompts that no step has begun."""
    return WorkerView(
        NodeId(node),
        1,
        sequences,
        max_sequences,
        sequences / max_sequences,
        prefills=sequences,
        prefill_tokens=sequences * 100,
        work=sequences * 0.1,
        kv_tokens=sequences * 100,
        window_work=sequences * 0.1,
    )


def state_of(workers: Sequence[WorkerView], last: str = "", count: int = 0) -> RoutingState:
    """A snapshot of these workers, in the promised order."""
    return RoutingState(tuple(sorted(workers, key=lambda worker: worker.node)), NodeId(last), count)


def some_states(count: int = 200) -> Iterator[RoutingState]:
    """Snapshots of all kinds, the same every time: up to twelve workers of different size and load,
    some of them equal; the worker chosen last may have left."""
    for number in range(count):
        random = Random(number)
        nodes = random.sample("abcdefghijklmnop", random.randint(1, 12))
        most = random.choice((0, 1, 20))
        workers = [view(n, random.randint(0, most), random.choice((1, 4, 8))) for n in nodes]
        yield state_of(workers, last=random.choice(("", *nodes, "k")))


class _Counting(WorkerView, frozen=True):
    """Counts how often a policy looks at a worker."""

    looks: ClassVar[int] = 0

    def __getattribute__(self, name: str) -> object:
        _Counting.looks += 1
        return super().__getattribute__(name)


class PolicyConformance:
    """Subclass it as `Test…` with the policy, wrapped in `staticmethod`."""

    policy: Policy
    heeds_load: ClassVar[bool] = True
    """True if the policy never prefers the busier of two workers of equal size."""

    def test_it_chooses_one_of_the_offered(self) -> None:
        for state in some_states():
            chosen = self.policy(ROUTE_REQUEST, state, Random(1))
            assert any(chosen is worker for worker in state.workers)

    def test_the_same_inputs_give_the_same_choice(self) -> None:
        for state in some_states():
            first = self.policy(ROUTE_REQUEST, state, Random(7))
            self.policy(ROUTE_REQUEST, state_of([view("other", 3)]), Random(8))
            assert self.policy(ROUTE_REQUEST, state, Random(7)) is first

    def test_the_busier_of_two_is_left_alone(self) -> None:
        if not self.heeds_load:
            return
        for less, more in product(range(9), range(1, 9)):
            for idle, busy in (("a", "b"), ("b", "a")):
                state = state_of([view(idle, less), view(busy, less + more)], last=busy)
                assert self.policy(ROUTE_REQUEST, state, Random(more)).node == idle

    def test_equal_workers_get_equal_shares(self) -> None:
        """No request ends; with the fixed seed the result is the same every time."""
        random, last = Random(1), ""
        placed = Counter({f"w{i}": 0 for i in range(8)})
        for done in range(80 * len(placed)):
            state = state_of([view(node, count) for node, count in placed.items()], last, done)
            last = self.policy(ROUTE_REQUEST, state, random).node
            placed[last] += 1
        assert all(60 <= count <= 100 for count in placed.values()), placed

    def test_a_decision_costs_no_more_than_a_few_looks_at_each_worker(self) -> None:
        for size in (8, 512):
            workers = tuple(_Counting(NodeId(f"w{i:03}"), 1, 1, 8, 0.125) for i in range(size))
            _Counting.looks = 0
            self.policy(ROUTE_REQUEST, RoutingState(workers, NodeId("w004")), Random(1))
            assert _Counting.looks <= 16 * size
