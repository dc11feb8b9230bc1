from __future__ import annotations

import random
from typing import Any

import pytest

from pdserve.messages.handoff import ClaimCancelled, CreditOffer, ItemClaimed, ItemRefused
from pdserve.router.prefill_queue.queue import PrefillQueueConfig
from tests.router.prefill_queue.queues import BLOCK, Queue, item, peer

AGEING = PrefillQueueConfig().ageing


# ------------------------------------------------------------------------ who is next


def test_an_item_waits_for_a_worker() -> None:
    q = Queue()
    q.enqueue(item(1))
    assert (q.queued, q.claims, len(q.queue)) == ([1], [], 1)
    q.offer("p", 1)
    assert q.claims == [("p", 1)]
    assert (len(q.queue), q.queue.state().claimed) == (0, 1)
    q.queue.check()


def test_a_worker_waits_for_an_item() -> None:
    q = Queue()
    q.offer("p", 2)
    for request in (1, 2, 3):
        q.enqueue(item(request))
    assert q.claims == [("p", 1), ("p", 2)]
    assert len(q.queue) == 1


def test_the_shortest_is_first() -> None:
    q = Queue()
    for request, tokens in enumerate((300, 100, 200)):
        q.enqueue(item(request, tokens))
    assert q.drained() == [1, 2, 0]


def test_only_uncached_tokens_count() -> None:
    q = Queue()
    q.offer("p", 0)
    q.holds(2, p=50)
    for request, tokens in ((1, 500), (2, 1000)):
        q.enqueue(item(request, tokens))
    assert q.queue.state().waiting_tokens == 500 + 1000 - 50 * BLOCK
    assert q.drained() == [2, 1]


def test_what_the_decode_worker_has_is_to_be_computed() -> None:
    """A router expects every prompt that it has placed to be cached where it went. If that counted,
    a long prompt would be as short as a short one."""
    q = Queue()
    q.offer("p", 0)
    q.holds(1, d=59)
    for request, tokens in ((1, 1000), (2, 300)):
        q.enqueue(item(request, tokens))
    assert q.queue.state().waiting_tokens == 1300
    assert q.drained() == [2, 1]


def test_priority_comes_before_length() -> None:
    q = Queue()
    for request, (tokens, priority) in enumerate(((10, 0), (5000, 1), (10, -1), (50, 1))):
        q.enqueue(item(request, tokens, priority=priority))
    assert q.drained() == [3, 1, 0, 2]


def test_waiting_counts() -> None:
    q = Queue()
    q.enqueue(item(1, 1000))
    q.now = 1000 / AGEING
    q.enqueue(item(2, 1))
    assert q.drained() == [1, 2]
    q.enqueue(item(3, 1000))
    q.now += 999 / AGEING - 0.01
    q.enqueue(item(4, 1))
    assert q.drained() == [4, 3]


def test_waiting_elsewhere_counts() -> None:
    q = Queue()
    q.enqueue(item(1, 100))
    q.enqueue(item(2, 1000, waited=1.0))
    assert q.drained() == [2, 1]
    waited = [m.item.waited for _, m in q.said if isinstance(m, ItemClaimed)]
    assert waited == [pytest.approx(1.0), 0.0]


def test_nobody_is_overtaken_for_ever(seed: int) -> None:
    """Not by what came more than `uncached / ageing` after it, whatever else comes."""
    dice = random.Random(seed)
    q = Queue(no_worker_after=1e9)
    arrived: dict[int, tuple[float, int]] = {}
    for request in range(3000):
        q.now += dice.expovariate(100)
        tokens = int(dice.lognormvariate(6, 1.5)) + 1
        arrived[request] = (q.now, tokens)
        q.enqueue(item(request, tokens))
        while dice.random() < 0.48:
            q.offer("p", 1)
    q.drained()
    order = [request for _, request in q.claims]
    assert sorted(order) == sorted(arrived)
    latest = float("-inf")
    for request in order:
        since, tokens = arrived[request]
        assert latest <= since + tokens / AGEING + 1e-6
        latest = max(latest, since)


# ------------------------------------------------------------------------ who gets it


def test_the_worker_with_the_prefix_gets_it() -> None:
    q = Queue()
    for node in ("a", "b", "c"):
        q.offer(node, 1)
    q.holds(1, b=40)
    q.enqueue(item(1, 1000))
    assert q.claims == [("b", 1)]


def test_the_one_with_least_to_do_gets_it() -> None:
    q = Queue()
    q.offer("a", 4, 500)
    q.offer("b", 4, 300)
    for request in (1, 2, 3):
        q.enqueue(item(request, 150))
    assert q.claims == [("b", 1), ("b", 2), ("a", 3)]


def test_a_prefix_is_not_worth_more_than_it_saves() -> None:
    q = Queue()
    q.offer("a", 1, 2000)
    q.offer("b", 1, 0)
    q.holds(1, a=60)
    q.enqueue(item(1, 1000))
    assert q.claims == [("b", 1)]


def test_it_waits_for_a_busy_holder_if_that_pays() -> None:
    q = Queue()
    q.offer("a", 0, 500)
    q.offer("b", 1, 0)
    q.holds(1, a=600)
    q.enqueue(item(1, 10_000))
    assert q.claims == []
    q.now = 0.3
    q.offer("a", 1, 0)
    assert q.claims == [("a", 1)]
    assert q.queue.counters["held"] == 1


def test_it_does_not_wait_if_that_does_not_pay() -> None:
    q = Queue()
    q.offer("a", 0, 9000)
    q.offer("b", 1, 0)
    q.holds(1, a=600)
    q.enqueue(item(1, 10_000))
    assert q.claims == [("b", 1)]


def test_it_never_waits_for_a_holder_beyond_the_bound() -> None:
    q = Queue(hold_most=0.5)
    q.offer("a", 0, 100)
    q.offer("b", 1, 0)
    q.holds(1, a=600)
    q.enqueue(item(1, 10_000))
    q.at(0.49)
    assert q.claims == []
    q.at(0.5)
    assert q.claims == [("b", 1)]


def test_it_waits_no_longer_when_the_holder_gets_busier() -> None:
    q = Queue()
    q.offer("a", 0, 100)
    q.offer("b", 1, 0)
    q.holds(1, a=600)
    q.enqueue(item(1, 10_000))
    assert q.claims == []
    q.offer("a", 0, 20_000)
    q.at(0.06)
    assert q.claims == [("b", 1)]


def test_not_all_wait_for_the_same_holder() -> None:
    q = Queue()
    q.offer("a", 0, 1)
    q.offer("b", 20, 0)
    for request in range(20):
        q.holds(request, a=300)
        q.enqueue(item(request, 10_000))
    assert 0 < len(q.queue) < 20
    assert {node for node, _ in q.claims} == {"b"}


def test_nobody_waits_for_a_holder_that_takes_nothing() -> None:
    q = Queue()
    q.offer("a", 0, 0)
    q.offer("b", 1, 0)
    q.holds(1, a=600)
    q.enqueue(item(1, 10_000))
    assert q.claims == [("b", 1)]


def test_several_that_wait_are_thought_over_in_time() -> None:
    q = Queue(hold_most=0.2)
    q.offer("a", 0, 10)
    q.offer("b", 9, 0)
    for request, at in ((1, 0.0), (2, 0.03), (3, 0.07)):
        q.at(at)
        q.holds(request, a=600)
        q.enqueue(item(request, 10_000))
        assert q.claims == []
    q.at(0.2)
    assert q.claims == [("b", 1)]
    q.at(0.27)
    assert [request for _, request in q.claims] == [1, 2, 3]
    assert q.queue.next_look() is None


def test_excluded_workers_do_not_get_it() -> None:
    q = Queue()
    q.offer("a", 1, 0)
    q.offer("b", 1, 5000)
    q.enqueue(item(1, excluded=("a",)))
    q.enqueue(item(2, excluded=("a",)))
    assert q.claims == [("b", 1)]
    q.enqueue(item(3))
    assert q.claims[1:] == [("a", 3)]


def test_compatibility_is_exact() -> None:
    q = Queue()
    q.offer("a", 1, compat="x")
    q.enqueue(item(1, compat_hash="y"))
    assert q.claims == []
    q.offer("b", 1, compat="y")
    assert q.claims == [("b", 1)]
    q.enqueue(item(2, compat_hash="x"))
    assert q.claims[1:] == [("a", 2)]


def test_a_worker_may_get_another_model_under_the_name() -> None:
    q = Queue()
    q.offer("a", 1, compat="x")
    q.enqueue(item(1, compat_hash="x"))
    q.offer("a", 1, compat="y")
    assert q.queue.state().claimed == 0
    q.enqueue(item(2, compat_hash="y"))
    assert q.claims == [("a", 1), ("a", 2)]
    q.queue.check()


# ------------------------------------------------------------------------ credits


def test_claims_under_way_count_against_credits() -> None:
    """An offer that was made before a claim came does not promise anew."""
    q = Queue()
    q.offer("a", 1)
    q.enqueue(item(1))
    q.enqueue(item(2))
    q.offer("a", 1, 0, claims=0)
    assert q.claims == [("a", 1)]
    assert q.queue.state().uncomputed_tokens == 1000
    q.offer("a", 0, 1000, claims=1)
    assert q.claims == [("a", 1)]
    assert q.queue.state().uncomputed_tokens == 1000
    q.offer("a", 1, 0, claims=1)
    assert q.claims == [("a", 1), ("a", 2)]


def test_what_is_given_back_goes_to_another_at_once() -> None:
    q = Queue()
    q.offer("a", 2)
    q.offer("b", 1, 5000)
    q.enqueue(item(1))
    assert q.claims == [("a", 1)]
    assert q.queue.ended(0.0, peer("a"), q.claim(1), "returned")
    assert q.claims == [("a", 1), ("b", 1)]
    assert q.queue.state().credits == 0  # of `a` too, until it offers anew
    q.queue.check()


def test_what_is_given_back_for_ever_is_refused() -> None:
    q = Queue(most_returns=3)
    q.enqueue(item(1))
    for _ in range(4):
        q.offer("a", 1)
        assert q.queue.ended(0.0, peer("a"), q.claim(1), "returned")
    assert q.refusals == [(1, "returned")]
    assert not len(q.queue)
    q.queue.check()


def test_a_worker_that_drains_keeps_what_it_has_and_gets_no_more() -> None:
    q = Queue()
    q.offer("a", 2)
    q.enqueue(item(1))
    q.queue.leaving(0.0, *peer("a")[:2])
    q.enqueue(item(2))
    q.offer("a", 2)
    assert q.claims == [("a", 1)]
    assert q.queue.state().workers == 0
    q.at(2.0)
    assert q.refusals == [(2, "no_worker")]
    assert q.queue.ended(2.0, peer("a"), q.claim(1), "done")
    q.queue.check()


def test_a_worker_whose_drain_is_undone_gets_what_waits() -> None:
    q = Queue()
    q.offer("a", 2)
    q.queue.leaving(0.0, *peer("a")[:2])
    q.enqueue(item(1))
    assert q.claims == []
    q.queue.staying(0.5, *peer("b")[:2])  # another one
    assert q.claims == []
    q.queue.staying(0.5, *peer("a")[:2])
    assert q.claims == [("a", 1)]
    assert q.queue.state().workers == 1
    q.at(2.0)
    assert q.refusals == []
    q.queue.check()


# ------------------------------------------------------------------------ ends


@pytest.mark.parametrize("outcome", ["done", "refused", "failed", "cancelled"])
def test_an_end_is_an_end(outcome: str) -> None:
    q = Queue()
    q.offer("a", 1)
    q.enqueue(item(1))
    assert not q.queue.ended(0.0, peer("b"), q.claim(1), outcome)
    assert q.queue.ended(0.0, peer("a"), q.claim(1), outcome)
    assert not q.queue.ended(0.0, peer("a"), q.claim(1), outcome)
    assert q.queue.counters[f"ended_{outcome}"] == 1
    assert (q.unclaimed, q.refusals, q.queue.state().claimed) == ([], [], 0)


def test_the_deadline_is_an_end() -> None:
    q = Queue()
    q.offer("a", 0)
    q.enqueue(item(1, deadline=1.0))
    q.enqueue(item(2, deadline=0.5))
    q.enqueue(item(3))
    assert q.queue.next_look() == 0.5
    q.at(0.7)
    assert q.refusals == [(2, "deadline")]
    q.offer("a", 1)
    (claimed,) = [m for _, m in q.said if isinstance(m, ItemClaimed)]
    assert claimed.item.deadline == pytest.approx(0.3)
    q.at(5.0)
    assert q.refusals == [(2, "deadline")]


def test_without_a_worker_it_is_refused_soon_but_not_at_once() -> None:
    """Workers that have lost their streams come back."""
    q = Queue()
    q.enqueue(item(1))
    q.at(1.9)
    q.enqueue(item(2))
    q.at(2.1)
    assert q.refusals == [(1, "no_worker")]
    q.offer("a", 0)
    q.at(100.0)
    assert (q.refusals, len(q.queue)) == ([(1, "no_worker")], 1)
    q.gone("a")
    q.at(101.9)
    assert len(q.queue) == 1
    q.at(102.0)
    assert q.refusals[1:] == [(2, "no_worker")]


def test_whom_all_workers_are_excluded_from_is_refused() -> None:
    q = Queue()
    q.offer("a", 1)
    q.enqueue(item(1, excluded=("a",)))
    q.at(2.0)
    assert q.refusals == [(1, "no_worker")]


def test_the_bound_holds() -> None:
    q = Queue(most_items=2)
    for request in (1, 2, 3):
        q.enqueue(item(request))
    assert q.refusals == [(3, "queue_full")]
    q.enqueue(item(4, priority=1))
    assert q.refusals[1:] == [(2, "displaced")]
    assert q.drained() == [4, 1]
    q.queue.check()


def test_the_bound_on_names_holds() -> None:
    q = Queue(most_bytes=100)
    q.enqueue(item(1, names=b"x" * 64))
    q.enqueue(item(2, names=b"x" * 64))
    assert q.refusals == [(2, "queue_full")]
    q.drained()
    q.enqueue(item(3, names=b"x" * 64))
    assert q.refusals == [(2, "queue_full")]


def test_names_do_not_travel_on() -> None:
    q = Queue()
    q.enqueue(item(1, names=b"x" * 64))
    q.drained()
    (claimed,) = [m for _, m in q.said if isinstance(m, ItemClaimed)]
    assert claimed.item.names == b""


def test_a_later_round_takes_the_place_of_an_earlier_one() -> None:
    q = Queue()
    q.enqueue(item(1))
    q.enqueue(item(1, round=2))
    assert len(q.queue) == 1
    q.enqueue(item(1, round=1))  # late
    q.offer("a", 1)
    first = q.claim(1)
    assert [m.item.round for _, m in q.said if isinstance(m, ItemClaimed)] == [2]
    q.enqueue(item(1, round=3))
    assert q.unclaimed == [("a", first)]
    assert (len(q.queue), q.queue.state().claimed) == (1, 0)
    q.queue.check()


def test_what_waits_can_be_cancelled() -> None:
    q = Queue()
    q.enqueue(item(1, round=1, deadline=5.0))
    assert not q.queue.cancel(peer("d"), 1, 0)
    assert not q.queue.cancel(peer("other"), 1, 1)
    assert q.queue.cancel(peer("d"), 1, 1)
    assert not q.queue.cancel(peer("d"), 1, 1)
    assert q.queue.idle
    assert q.queue.next_look() is None
    q.queue.check()


def test_what_is_claimed_can_be_cancelled() -> None:
    q = Queue()
    q.offer("a", 1)
    q.enqueue(item(1))
    assert q.queue.cancel(peer("d"), 1, 0)
    assert q.unclaimed == [("a", q.claim(1))]
    assert not q.queue.ended(0.0, peer("a"), q.claim(1), "cancelled")
    q.queue.check()


# ------------------------------------------------------------------------ who is lost


def test_claims_of_a_lost_worker_go_to_the_head() -> None:
    q = Queue()
    q.offer("a", 1)
    q.enqueue(item(1, 9000))
    q.enqueue(item(2, 10))
    q.gone("a")
    assert q.queue.counters["redelivered"] == 1
    numbers = [q.claim(1)]
    assert q.drained() == [1, 2]
    assert q.claim(1) not in numbers
    q.queue.check()


def test_a_claim_is_redelivered_once_for_a_loss() -> None:
    q = Queue()
    q.offer("a", 1)
    q.enqueue(item(1))
    q.gone("a")
    q.gone("a")
    assert q.queue.counters["redelivered"] == 1
    assert len(q.queue) == 1


def test_what_its_workers_do_not_survive_is_refused() -> None:
    q = Queue(most_losses=3)
    q.enqueue(item(1))
    for node in ("a", "b", "c"):
        q.offer(node, 1)
        q.gone(node)
    assert q.refusals == [(1, "lost")]
    assert q.queue.counters["redelivered"] == 2
    assert q.queue.idle
    q.queue.check()


def test_with_its_decode_worker_an_item_goes() -> None:
    q = Queue()
    q.offer("a", 1)
    q.enqueue(item(1))
    q.enqueue(item(2))
    q.enqueue(item(3), by="e")
    q.gone("d")
    assert q.unclaimed == [("a", q.claim(1))]
    assert (len(q.queue), q.queue.state().claimed) == (1, 0)
    q.offer("a", 1)
    assert q.claims == [("a", 1), ("a", 3)]
    q.queue.check()


def test_requests_of_two_decode_workers_may_have_one_number() -> None:
    q = Queue()
    q.enqueue(item(1), by="d")
    q.enqueue(item(1), by="e")
    assert q.queue.cancel(peer("e"), 1, 0)
    assert len(q.queue) == 1


def test_a_worker_that_is_back_before_its_loss_was_seen_is_one_worker() -> None:
    q = Queue()
    q.offer("a", 1)
    q.enqueue(item(1))
    q.queue.offer(0.0, peer("a", stream=2), CreditOffer(model="m", credits=1))
    assert q.queue.state().workers == 1
    assert q.claims == [("a", 1), ("a", 1)]
    assert not q.queue.ended(0.0, peer("a"), 1, "done")
    q.gone("a")  # the end of the first stream
    assert q.queue.state().claimed == 1
    q.queue.check()


def test_refusing_all_leaves_what_is_claimed() -> None:
    q = Queue()
    q.offer("a", 1)
    for request in (1, 2, 3):
        q.enqueue(item(request))
    q.queue.refuse_all("draining")
    assert q.refusals == [(2, "draining"), (3, "draining")]
    assert q.queue.state().claimed == 1


# ------------------------------------------------------------------------ random lives


class Life:
    """A queue among peers that do whatever they may, and what each of them believes."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.q = Queue(most_items=30, hold_most=0.3)
        self.read = 0
        self.waiting: set[tuple[str, int, int]] = set()
        """(decode worker, request, round) that is in the queue, claimed or not."""
        self.held: dict[int, tuple[str, tuple[str, int, int]]] = {}
        """Claims in hands: worker and item."""
        self.workers: set[str] = set()
        self.requests = 0

    def hear(self) -> None:
        """What the queue has said since."""
        for to, message in self.q.said[self.read :]:
            if isinstance(message, ItemClaimed):
                key = (str(message.decode), message.item.request, message.item.round)
                assert key in self.waiting
                assert key not in [held for _, held in self.held.values()], "claimed twice"
                assert to.node not in message.item.excluded
                assert to.node in self.workers
                self.held[message.claim] = (to.node, key)
            elif isinstance(message, ClaimCancelled):
                worker, key = self.held.pop(message.claim)
                assert worker == to.node
                self.waiting.discard(key)
            elif isinstance(message, ItemRefused):
                self.waiting.discard((to.node, message.request, message.round))
        self.read = len(self.q.said)

    def enqueue(self) -> None:
        dice, q = self.dice, self.q
        by = dice.choice(("d", "e"))
        old = [key for key in self.waiting if key[0] == by]
        again = dice.random() < 0.2 and bool(old)
        _, request, round = dice.choice(sorted(old)) if again else (by, self.requests, -1)
        self.requests += not again
        if dice.random() < 0.5:
            q.holds(request, **{dice.choice("abc"): dice.randrange(1, 60)})
        fields: dict[str, Any] = {"priority": dice.choice((0, 0, 0, 1))}
        if dice.random() < 0.3:
            fields["deadline"] = dice.uniform(0.1, 3.0)
        if dice.random() < 0.2:
            fields["excluded"] = tuple(dice.sample("abc", dice.randrange(1, 4)))
        key = (by, request, round + 1)
        if again:
            self.waiting.discard((by, request, round))
        self.waiting.add(key)
        q.enqueue(item(request, dice.randrange(1, 1000), round=round + 1, **fields), by)

    def offer(self) -> None:
        node = self.dice.choice("abc")
        self.workers.add(node)
        self.q.offer(node, self.dice.randrange(4), self.dice.randrange(2000))

    def end(self) -> None:
        if not self.held:
            return
        number = self.dice.choice(sorted(self.held))
        worker, key = self.held.pop(number)
        outcome = self.dice.choice(("done", "done", "refused", "failed", "returned"))
        if outcome != "returned":
            self.waiting.discard(key)
        assert self.q.queue.ended(self.q.now, peer(worker), number, outcome)

    def cancel(self) -> None:
        if self.waiting:
            by, request, round = key = self.dice.choice(sorted(self.waiting))
            assert self.q.queue.cancel(peer(by), request, round)
            self.hear()  # whoever has it is told
            self.waiting.discard(key)

    def lose_worker(self) -> None:
        node = self.dice.choice("abc")
        self.held = {n: held for n, held in self.held.items() if held[0] != node}
        self.workers.discard(node)
        self.q.gone(node)

    def lose_decoder(self) -> None:
        by = self.dice.choice(("d", "e"))
        self.q.gone(by)
        self.hear()
        self.waiting = {key for key in self.waiting if key[0] != by}
        assert by not in {key[0] for _, key in self.held.values()}

    def wait(self) -> None:
        self.q.at(self.q.now + self.dice.uniform(0, 0.5))

    def step(self) -> None:
        deeds = (
            [self.enqueue] * 8 + [self.offer] * 4 + [self.end] * 4 + [self.cancel, self.wait] * 2
        )
        deeds += [self.lose_worker]
        if self.dice.random() < 0.1:
            deeds += [self.lose_decoder]
        self.dice.choice(deeds)()
        self.hear()
        q = self.q.queue
        q.check()
        state = q.state()
        assert state.claimed == len(self.held)
        assert state.waiting == len(self.waiting) - len(self.held)
        assert set(self.workers) == {p.node for p in q._workers}


def test_random_lives_lose_nothing(seed: int, long: bool) -> None:
    """Every item waits, is claimed by one worker at a time, or has ended; at the end all sums are
    zero."""
    for life in (Life(seed + n) for n in range(300 if long else 12)):
        for _ in range(400):
            life.step()
        for node in "abcde":
            life.q.gone(node)
        q = life.q.queue
        assert q.idle
        assert q.next_look() is None
        state = q.state()
        assert (state.waiting, state.waiting_tokens, state.claimed, state.credits) == (0, 0, 0, 0)
        q.check()
        assert not q._groups
        assert life.q.looked_up > 0
