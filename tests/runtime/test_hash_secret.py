"""The agreement on one hash secret: the order as plain data, then nodes in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.blocks.hashing import HASH_SECRET_TEST, hash_secret_id
from pdserve.ids import NodeId
from pdserve.messages.hash_secret import HashSecretQuery
from pdserve.messages.node import NodeCard
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.runtime.hash_secret import (
    GIVEN,
    LEARNED,
    HashSecrets,
    SecretClaim,
    SecretOffers,
    held_by,
    offers_of,
)
from pdserve.runtime.registry import Member
from pdserve.runtime.rpc_methods import SECRET
from pdserve.testing import virtual_time
from tests.net.world import virtually
from tests.runtime.cluster import Cluster, cluster

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.net.base import IncomingCall
    from pdserve.runtime.node import Node

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
X, Y, Z = b"x" * 8, b"y" * 8, b"z" * 8


def offers(**claims: SecretClaim) -> SecretOffers:
    return SecretOffers({NodeId(node): claim for node, claim in claims.items()}, True)


# ---------------------------------------------------------------------- the decision


def test_nobody_offers_anything() -> None:
    assert offers().better(None, told=True) is None
    assert offers().better(SecretClaim(500, X), told=True) is None


def test_who_knows_none_takes_the_best() -> None:
    assert offers(a=SecretClaim(500, X), b=SecretClaim(400, Z)).better(
        None, told=True
    ) == SecretClaim(400, Z)


def test_the_earliest_birth_wins_and_the_id_decides_a_tie() -> None:
    own = SecretClaim(500, Y)
    assert offers(a=SecretClaim(499, Z)).better(own, told=True) == SecretClaim(499, Z)
    assert offers(a=SecretClaim(501, X)).better(own, told=True) is None
    assert offers(a=SecretClaim(500, X)).better(own, told=True) == SecretClaim(500, X)
    assert offers(a=SecretClaim(500, Z)).better(own, told=True) is None


def test_a_file_beats_whatever_was_drawn_and_never_gives_way() -> None:
    assert offers(a=SecretClaim(GIVEN, Z)).better(SecretClaim(2, X), told=True) == SecretClaim(
        GIVEN, Z
    )
    assert (
        offers(a=SecretClaim(GIVEN, X), b=SecretClaim(2, X)).better(
            SecretClaim(GIVEN, Z), told=True
        )
        is None
    )


def test_a_replaced_file_beats_the_memory_of_the_old_one() -> None:
    memory = SecretClaim(GIVEN, X).adopted
    assert memory == SecretClaim(LEARNED, X)
    assert offers(a=SecretClaim(GIVEN, Z), b=memory).better(memory, told=True) == SecretClaim(
        GIVEN, Z
    )


def test_what_nobody_was_told_gives_way_to_any() -> None:
    """A clock that runs behind must not cost the cluster its cache."""
    own = SecretClaim(2, X)
    assert offers(a=SecretClaim(900, Z)).better(own, told=False) == SecretClaim(900, Z)
    assert offers(a=SecretClaim(900, Z)).better(own, told=True) is None


def test_a_better_birth_of_the_same_secret_is_taken_over() -> None:
    own = SecretClaim(500, X)
    assert offers(a=SecretClaim(GIVEN, X)).better(own, told=True) == SecretClaim(GIVEN, X)
    assert offers(a=SecretClaim(GIVEN, X)).better(SecretClaim(LEARNED, X), told=True) is None
    assert offers(a=SecretClaim(600, X)).better(own, told=True) is None


def test_files_that_differ_are_noticed_by_everybody() -> None:
    three = offers(a=SecretClaim(GIVEN, X), b=SecretClaim(GIVEN, Y), c=SecretClaim(LEARNED, X))
    assert three.rivals(SecretClaim(GIVEN, X)) == [B]
    assert three.rivals(SecretClaim(GIVEN, Y)) == [A]
    assert three.rivals(SecretClaim(LEARNED, X)) == [B]
    assert three.rivals(None) == [B]
    assert offers(a=SecretClaim(GIVEN, X), b=SecretClaim(7, Y)).rivals(SecretClaim(8, Z)) == []


def test_a_card_says_what_its_node_holds() -> None:
    member = Member(A, 1, "a:1", "worker")
    assert held_by(member) is None
    assert not offers_of([member]).complete
    for card, claim in (
        (NodeCard(), None),
        (NodeCard(names_id=X, names_birth=5), SecretClaim(5, X)),
        (NodeCard(names_id=b"short", names_birth=5), None),
        (NodeCard(names_id=X, names_birth=-1), None),
    ):
        told = Member(A, 1, "a:1", "worker", card)
        assert held_by(told) == claim
        assert offers_of([told]) == SecretOffers({} if claim is None else {A: claim}, True)


claims = st.builds(
    SecretClaim, st.sampled_from([GIVEN, LEARNED, 2, 3, 500]), st.sampled_from([X, Y, Z, b"w" * 8])
)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(claims, st.booleans()), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_whatever_the_order_all_end_with_one_secret(
    start: list[tuple[SecretClaim, bool]], chance: random.Random
) -> None:
    """Nodes look at each other one at a time, in any order, until nobody turns to anything."""
    held = [SecretClaim(claim.birth, claim.id) for claim, _ in start]
    told = [drawn or claim.birth <= LEARNED for claim, drawn in start]
    if not any(told):
        told[0] = True
    for _ in range(200):
        moves = []
        for index, own in enumerate(held):
            others = {
                NodeId(str(other)): claim
                for other, claim in enumerate(held)
                if other != index and told[other]
            }
            best = SecretOffers(others, True).better(own, told=told[index])
            if best is not None:
                moves.append((index, best))
        if not moves:
            break
        index, best = chance.choice(moves)
        held[index], told[index] = best.adopted, True
    else:
        pytest.fail("they never come to rest")
    given_ids = {claim.id for claim in held if claim.birth == GIVEN}
    # Files stay; all others have one secret, a file's if there is one.
    free = {claim.id for claim in held if claim.birth != GIVEN}
    assert len(free) <= 1
    assert not (given_ids and free) or free == {min(given_ids)}
    assert {claim.id for claim, _ in start if claim.birth == GIVEN} == given_ids


# ---------------------------------------------------------------------- nodes


class Agreed:
    """Nodes of a cluster and what each names blocks with."""

    def __init__(self, nodes: Cluster) -> None:
        self.nodes = nodes
        self.secrets: dict[str, HashSecrets] = {}
        self.turns: dict[str, list[bytes]] = {}
        self.degraded: dict[str, Degradations] = {}
        self.random = random.Random(7)
        self.skew: dict[str, float] = {}
        self.kept: dict[str, tuple[bytes, int]] = {}
        self.deaf: dict[str, Callable[[IncomingCall], None]] = {}

    def watch(
        self,
        name: str,
        node: Node,
        file: bytes | None = None,
        kept: tuple[bytes, int] | None = None,
    ) -> HashSecrets:
        self.degraded[name] = Degradations(Metrics())
        made = HashSecrets(
            node,
            entropy=self.random.randbytes,
            wall=lambda: 1_700_000_000 + self.nodes.loop.time() + self.skew.get(name, 0.0),
            degradations=self.degraded[name],
            given=file,
            kept=kept,
        )
        made.on_claim(lambda secret, birth: self.kept.update({name: (secret, birth)}))
        self.turns[name] = []
        made.listen(self.turns[name].append)
        self.secrets[name] = made
        return made

    async def add(
        self,
        name: str,
        *,
        file: bytes | None = None,
        kept: tuple[bytes, int] | None = None,
        needs: bool = True,
        alone: bool = False,
        deaf: bool = False,
    ) -> HashSecrets:
        """`deaf`: it gives its secret to nobody, until `hear`."""
        node = self.nodes.make(name, join=() if alone else None)
        self.nodes.nodes[name] = node
        made = self.watch(name, node, file, kept)
        if deaf:
            self.deaf[name] = node.actors.answers.pop(SECRET.id)
        await node.start()
        node.publish_card(NodeCard(role="worker"), {})
        if needs:
            made.need()
        return made

    def hear(self, name: str) -> None:
        self.nodes.nodes[name].actors.answers[SECRET.id] = self.deaf.pop(name)

    async def end(self, name: str) -> None:
        node = self.nodes.nodes.pop(name)
        del self.secrets[name]
        await node.leave()
        await node.close()

    async def settle(self, timeout: float = 30.0) -> bytes:
        """Until all have one secret; returns it."""
        await self.nodes.until(lambda: len(self.held()) == 1 and b"" not in self.held(), timeout)
        return next(iter(self.held()))

    def held(self) -> set[bytes]:
        return {one.secret for one in self.secrets.values()}


@virtually
async def test_who_is_alone_draws_one_at_its_first_need() -> None:
    async with cluster() as nodes:
        agreed = Agreed(nodes)
        only = await agreed.add("a", needs=False)
        assert (only.secret, only.claim) == (b"", None)
        drawn = only.need()
        assert len(drawn) == 32
        assert only.need() == drawn
        card = nodes.nodes["a"].card
        assert card is not None
        assert card.names_id == hash_secret_id(drawn)
        assert card.names_birth == int((1_700_000_000 + nodes.loop.time()) * 1000)


@virtually
async def test_the_first_secret_becomes_everybodys() -> None:
    async with cluster() as nodes:
        agreed = Agreed(nodes)
        first = (await agreed.add("a")).need()
        await asyncio.sleep(5.0)
        for name in ("b", "c", "d"):
            await agreed.add(name, needs=name != "d")  # d only wants to know
        assert await agreed.settle(5.0) == first
        assert agreed.turns["a"] == []
        assert all(agreed.turns[name] == [first] for name in ("b", "c", "d"))


@virtually
async def test_any_order_of_needs_ends_with_one() -> None:
    for seed, order in enumerate(itertools.permutations("abc")):
        async with cluster(seed) as nodes:
            agreed = Agreed(nodes)
            for name in ("a", "b", "c"):
                await agreed.add(name, needs=False)
            for name in order:
                agreed.secrets[name].need()
                await asyncio.sleep(0.01)
            secret = await agreed.settle(5.0)
            await asyncio.sleep(20.0)
            assert agreed.held() == {secret}


@virtually
async def test_a_restarted_node_rejoins_the_secret_whatever_its_clock_says() -> None:
    async with cluster() as nodes:
        agreed = Agreed(nodes)
        for name in ("a", "b", "c"):
            await agreed.add(name)
        secret = await agreed.settle()
        for skew in (0.0, -1_700_000_000.0, 1e6):
            await agreed.end("b")
            agreed.skew["b"] = skew
            await agreed.add("b")
            assert await agreed.settle(5.0) == secret
        assert agreed.turns["a"] == []
        assert agreed.turns["c"] == [secret]


@virtually
async def test_the_secret_outlives_whoever_drew_it() -> None:
    async with cluster() as nodes:
        agreed = Agreed(nodes)
        for name in ("a", "b", "c"):
            await agreed.add(name)
        secret = await agreed.settle()
        await agreed.end("b")
        await agreed.end("c")
        await agreed.add("d")
        assert await agreed.settle(5.0) == secret


@virtually
async def test_a_kept_secret_outlives_all_nodes() -> None:
    """The node that kept it starts last, after others have drawn one of their own."""
    async with cluster() as nodes:
        agreed = Agreed(nodes)
        for name in ("a", "b", "c"):
            await agreed.add(name)
        secret = await agreed.settle()
        kept = agreed.kept["b"]
        assert kept[0] == secret
        for name in ("a", "b", "c"):
            await agreed.end(name)
        await agreed.add("d")
        await agreed.add("e")
        assert await agreed.settle() != secret
        await asyncio.sleep(5.0)
        again = await agreed.add("b", kept=kept)
        assert again.secret == secret
        assert await agreed.settle() == secret
        assert agreed.kept["d"] == kept


@virtually
async def test_of_two_kept_secrets_the_earlier_one_wins() -> None:
    async with cluster() as nodes:
        agreed = Agreed(nodes)
        await agreed.add("a", kept=(b"1" * 32, 500))
        await agreed.add("b", kept=(b"2" * 32, 400))
        assert await agreed.settle() == b"2" * 32
        assert agreed.kept["a"] == (b"2" * 32, 400)


@virtually
async def test_a_file_wins_over_what_was_kept_of_it() -> None:
    async with cluster() as nodes:
        agreed = Agreed(nodes)
        await agreed.add("a", file=b"1" * 32)
        # As learned from a file, not as one: another file must be able to replace it.
        assert agreed.kept["a"] == (b"1" * 32, LEARNED)
        await agreed.add("b", kept=agreed.kept["a"])
        assert await agreed.settle() == b"1" * 32
        await agreed.end("a")
        await agreed.add("a", file=b"2" * 32, kept=agreed.kept["a"])
        assert await agreed.settle() == b"2" * 32


@virtually
async def test_a_drawn_secret_is_kept_only_when_others_may_rely_on_it() -> None:
    async with cluster() as nodes:
        agreed = Agreed(nodes)
        await agreed.add("a")
        first = await agreed.settle()
        await asyncio.sleep(5.0)
        await agreed.add("b")
        assert await agreed.settle(5.0) == first
        assert agreed.kept["b"][0] == first


@virtually
async def test_two_halves_that_meet_take_the_earlier_one() -> None:
    async with cluster() as nodes:
        agreed = Agreed(nodes)
        earlier = (await agreed.add("a", alone=True)).need()
        await asyncio.sleep(1.0)
        later = (await agreed.add("b", alone=True)).need()
        node = nodes.make("c", join=("b:7000",))
        nodes.nodes["c"] = node
        agreed.watch("c", node)
        await node.start()
        node.publish_card(NodeCard(role="worker"), {})
        agreed.secrets["c"].need()
        await nodes.until(lambda: agreed.secrets["c"].secret == later)
        bridge = nodes.make("bridge", join=("a:7000", "b:7000"))
        nodes.nodes["bridge"] = bridge
        await bridge.start()
        assert await agreed.settle() == earlier
        assert agreed.turns["b"] == [earlier]


@virtually
async def test_a_file_wins_whenever_it_comes() -> None:
    async with cluster() as nodes:
        agreed = Agreed(nodes)
        for name in ("a", "b"):
            await agreed.add(name)
        await agreed.settle()
        await agreed.add("f", file=HASH_SECRET_TEST)
        assert await agreed.settle(5.0) == HASH_SECRET_TEST
        await agreed.end("f")
        await agreed.add("f", file=b"another file " * 3)
        assert await agreed.settle(5.0) == b"another file " * 3
        await agreed.end("f")
        await agreed.add("g")  # nobody has a file any more, and nobody forgets
        assert await agreed.settle(5.0) == b"another file " * 3


@virtually
async def test_files_that_differ_are_a_degradation_until_they_agree() -> None:
    async with cluster() as nodes:
        agreed = Agreed(nodes)
        await agreed.add("a", file=b"1" * 32)
        await agreed.add("b", file=b"2" * 32)
        await agreed.add("c")
        reason = "hash_secrets_differ"
        everywhere = agreed.degraded
        await nodes.until(lambda: all(reason in d.reasons() for d in everywhere.values()))
        assert agreed.secrets["a"].secret != agreed.secrets["b"].secret
        right = min((b"1" * 32, b"2" * 32), key=hash_secret_id)
        await nodes.until(lambda: agreed.secrets["c"].secret == right)
        assert "--hash-secret-file" in everywhere["c"].reasons()[reason]
        await agreed.end("b")
        await agreed.add("b", file=b"1" * 32)
        assert await agreed.settle(5.0) == b"1" * 32
        await nodes.until(lambda: not any(d.reasons() for d in everywhere.values()))


@virtually
async def test_who_cannot_get_the_secret_says_so_and_gets_it_later() -> None:
    async with cluster() as nodes:
        agreed = Agreed(nodes)
        await agreed.add("a", deaf=True)
        await agreed.add("b")
        reasons = agreed.degraded["b"].reasons()
        await nodes.until(lambda: "hash_secret_missing" in reasons)
        assert agreed.secrets["b"].secret  # its own, until then
        agreed.hear("a")
        assert await agreed.settle(5.0) == agreed.secrets["a"].secret
        assert not reasons


@virtually
async def test_a_better_secret_that_went_away_is_waited_for_no_longer() -> None:
    async with cluster() as nodes:
        agreed = Agreed(nodes)
        await agreed.add("a")
        await agreed.add("b")
        secret = await agreed.settle()
        await agreed.add("f", file=HASH_SECRET_TEST, deaf=True)
        reasons = agreed.degraded["a"].reasons()
        await nodes.until(lambda: "hash_secret_missing" in reasons)
        await agreed.end("f")
        await nodes.until(lambda: not reasons)
        assert agreed.held() == {secret}


@virtually
async def test_only_the_secret_that_was_asked_for_is_given() -> None:
    async with cluster() as nodes:
        agreed = Agreed(nodes)
        await agreed.add("a")
        await agreed.add("b")
        secret = await agreed.settle()
        link = await nodes.nodes["b"].link(A, timeout=1.0)
        right = await link.request(SECRET, HashSecretQuery(hash_secret_id(secret)), timeout=1.0)
        wrong = await link.request(SECRET, HashSecretQuery(b"w" * 8), timeout=1.0)
        assert (right.secret, wrong.secret) == (secret, b"")


@virtually
async def test_a_life_that_begins_anew_keeps_the_secret() -> None:
    async with cluster() as nodes:
        agreed = Agreed(nodes)
        for name in ("a", "b", "c", "d"):
            await agreed.add(name)
        secret = await agreed.settle()
        nodes.world.pause("d")
        await nodes.until(lambda: nodes.nodes["a"].registry.get(NodeId("d")) is None, 20.0)
        nodes.world.resume("d")
        await nodes.until(lambda: nodes.nodes["d"].lives == 2 and nodes.converged(), 30.0)
        assert agreed.held() == {secret}

        def told() -> bool:
            member = nodes.nodes["a"].registry.get(NodeId("d"))
            claim = None if member is None else held_by(member)
            return claim is not None and claim.id == hash_secret_id(secret)

        await nodes.until(told)


def test_an_end_in_the_middle_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with cluster() as nodes:
            agreed = Agreed(nodes)
            await agreed.add("a")
            await agreed.add("c")
            await agreed.settle()
            for name in ("a", "c"):
                nodes.nodes[name].actors.answers[SECRET.id] = lambda call: None  # it never answers
            await agreed.add("b", needs=False)
            node = nodes.nodes["b"]
            await nodes.until(lambda: len(offers_of(node.registry).claims) == 2)
            await nodes.until(lambda: "hash secret" in node.tasks.names())
            del nodes.nodes["b"]
            await node.close()
            assert len(node.tasks) == 0

    virtual_time.run(run())
    assert "failed" not in caplog.text
