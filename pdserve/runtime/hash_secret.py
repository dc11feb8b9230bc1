"""Brings all nodes to hash blocks with one secret, without a node that hands it out.

Each node's card has the id of its secret, and the secret's *birth*: how the node got it. Of two
secrets, the one with the smaller (birth, id) is better. Each node adopts the best one in the cards
that it knows:

    0       the node's own --hash-secret-file: it never adopts another
    1       learned from such a node
    else    drawn by some node when it first needed one, at this time (Unix milliseconds)

So a file wins over drawn secrets, the earliest drawn one over later ones, and a replaced file over
what others remember of the old one. A node that keeps blocks on disk keeps their secret, too, and
offers it at its next start with its birth: so the cluster finds its blocks again after all of its
processes ended. The order is total: whatever the order of starts, partitions
and mergers, nodes that know each other end with the same secret. A secret that was just drawn is
not published before this node knows the others' cards, and yields to any of theirs: so a
restart, or a wrong clock, costs the cluster nothing.

The secret itself travels only on request, over authenticated links. It does not know what the
secret is used for; listeners do. One per node, for the process's lifetime.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from pdserve.blocks.hashing import SHORT_HASH_BYTES, hash_secret_id
from pdserve.errors import PdserveError
from pdserve.messages.hash_secret import HashSecret, HashSecretQuery
from pdserve.runtime.peers.handlers import answers
from pdserve.runtime.registry import MemberChanged
from pdserve.runtime.rpc_methods import SECRET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pdserve.ids import NodeId, Seconds
    from pdserve.net.base import IncomingCall
    from pdserve.observe.degraded import Degradations
    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import Member, MemberEvent

__all__ = [
    "GIVEN",
    "LEARNED",
    "FixedHashSecret",
    "HashSecretSource",
    "HashSecrets",
    "SecretClaim",
    "SecretOffers",
    "held_by",
    "offers_of",
]

_log = logging.getLogger(__name__)

GIVEN: Final = 0
LEARNED: Final = 1
_FIRST_DRAWN: Final = 2

SECRET_BYTES: Final = 32
"""Length of a drawn secret."""

_PATIENCE: Final[Seconds] = 2.0
"""Longest wait for one node to send its secret."""
_RETRY: Final[Seconds] = 1.0
"""Pause before the next node is asked."""
_HUSH: Final[Seconds] = 3.0
"""A drawn secret is published after this at the latest, even if some cards are missing."""
_COMPLAIN: Final = 3
"""Failures in a row after which the wait is a degradation."""

_DIFFER: Final = "hash_secrets_differ"
_MISSING: Final = "hash_secret_missing"


@dataclass(frozen=True, slots=True, order=True)
class SecretClaim:
    """A secret's id and birth; the smaller claim is better."""

    birth: int
    id: bytes

    @property
    def adopted(self) -> SecretClaim:
        """The claim of a node that learned this secret from another."""
        return SecretClaim(max(self.birth, LEARNED), self.id)


@dataclass(frozen=True, slots=True)
class SecretOffers:
    """The secrets that the other nodes hold, by node."""

    claims: Mapping[NodeId, SecretClaim]
    complete: bool
    """True if every member's card is known."""

    def better(self, own: SecretClaim | None, *, told: bool) -> SecretClaim | None:
        """The claim to adopt instead of `own`; None: none. `told`: `own` was published, so others
        may rely on it."""
        if own is not None and own.birth == GIVEN:
            return None
        best = min(self.claims.values(), default=None)
        if best is None or own is None:
            return best
        if best.id == own.id:
            # The same secret, but maybe a better birth: that of its first holder.
            return best if best.adopted < own else None
        return best if best < own or not told else None

    def holders(self, id: bytes) -> list[NodeId]:
        """Nodes that hold that secret."""
        return sorted(node for node, claim in self.claims.items() if claim.id == id)

    def rivals(self, own: SecretClaim | None) -> list[NodeId]:
        """Nodes whose file has another secret than the best file's; this node's own, if it has a
        file."""
        given = {node: claim for node, claim in self.claims.items() if claim.birth == GIVEN}
        right = own if own is not None and own.birth == GIVEN else min(given.values(), default=own)
        return sorted(node for node, c in given.items() if right is None or c.id != right.id)


def held_by(member: Member) -> SecretClaim | None:
    """The claim in a member's card."""
    card = member.card
    if card is None or len(card.names_id) != SHORT_HASH_BYTES or card.names_birth < GIVEN:
        return None
    return SecretClaim(card.names_birth, card.names_id)


def offers_of(members: Iterable[Member]) -> SecretOffers:
    """The claims in all members' cards."""
    known = list(members)
    claims = {member.node: held_by(member) for member in known}
    return SecretOffers(
        {node: claim for node, claim in claims.items() if claim is not None},
        all(member.card is not None for member in known),
    )


class HashSecretSource(Protocol):
    """The hash secret of a node, however it learns it."""

    @property
    def secret(self) -> bytes:
        """The secret in use; empty: none yet."""
        ...

    def need(self) -> bytes:
        """The secret; drawn now if this node knows none."""
        ...

    def listen(self, listener: Callable[[bytes], None]) -> None:
        """Call `listener` with every secret that this node adopts from now on."""
        ...


@dataclass(frozen=True, slots=True)
class FixedHashSecret:
    """A secret that all nodes of a simulation know from the start, so that none asks another."""

    secret: bytes

    def need(self) -> bytes:
        return self.secret

    def listen(self, listener: Callable[[bytes], None]) -> None:
        """Does nothing: the secret never changes."""


class HashSecrets:
    """The hash secret of one node, agreed on with the others."""

    def __init__(
        self,
        node: Node,
        *,
        entropy: Callable[[int], bytes],
        wall: Callable[[], Seconds],
        degradations: Degradations,
        given: bytes | None = None,
        kept: tuple[bytes, int] | None = None,
    ) -> None:
        """`given`: the content of this node's own file, if it has one. `kept`: a secret of an
        earlier life and its birth, as `on_claim` told them; `given` wins."""
        self._node = node
        self._entropy = entropy
        self._wall = wall
        self._degradations = degradations
        self._secret = b""
        self._claim: SecretClaim | None = None
        self._told = False
        self._drawn_at: Seconds = 0.0
        self._fetching = False
        self._failures = 0
        self._complaint: tuple[NodeId, ...] = ()
        self._listeners: list[Callable[[bytes], None]] = []
        self._claim_listeners: list[Callable[[bytes, int], None]] = []
        node.host(self)
        if given is not None:
            self._take(given, SecretClaim(GIVEN, hash_secret_id(given)))
        elif kept is not None:
            secret, birth = kept
            self._take(secret, SecretClaim(birth, hash_secret_id(secret)).adopted)
        node.on_member(self._on_member)

    # ------------------------------------------------------------------ reading

    @property
    def secret(self) -> bytes:
        """The secret in use; empty: none yet."""
        return self._secret

    @property
    def claim(self) -> SecretClaim | None:
        """The claim of the secret in use."""
        return self._claim

    def listen(self, listener: Callable[[bytes], None]) -> None:
        """Call `listener` with every secret that this node adopts from now on."""
        self._listeners.append(listener)

    def on_claim(self, listener: Callable[[bytes, int], None]) -> None:
        """Call `listener` with the secret that others may rely on, and with the birth that this
        node would offer it with after a restart: now, if there is one, and at each change."""
        self._claim_listeners.append(listener)
        if self._told and self._claim is not None:
            listener(self._secret, self._claim.adopted.birth)

    def need(self) -> bytes:
        """The secret; drawn now if this node knows none."""
        if not self._secret:
            drawn = self._entropy(SECRET_BYTES)
            birth = max(_FIRST_DRAWN, int(self._wall() * 1000))
            self._secret, self._claim = drawn, SecretClaim(birth, hash_secret_id(drawn))
            self._drawn_at = self._node.now()
            self._node.timers.call_later(_HUSH, self._look)
            self._look()
        return self._secret

    # ------------------------------------------------------------------ the others

    def _on_member(self, event: MemberEvent) -> None:
        """A change of cards: a new member has none yet, and a card that is gone offers nothing."""
        if not isinstance(event, MemberChanged) or event.member.card is not event.before.card:
            self._look()

    def _look(self) -> None:
        offers = offers_of(self._node.registry)
        self._judge(offers)
        best = offers.better(self._claim, told=self._told)
        if best is not None:
            self._turn_to(best, offers)
            return
        if self._failures:  # the holder of a better one is gone
            self._succeeded()
        if self._claim is not None and not self._told:
            heard = offers.complete or self._node.now() - self._drawn_at >= _HUSH
            if heard and self._node.joined:
                self._tell()

    def _turn_to(self, best: SecretClaim, offers: SecretOffers) -> None:
        if self._claim is not None and best.id == self._claim.id:
            self._take(self._secret, best.adopted)
        elif not self._fetching and not self._node.tasks.closed:
            self._fetching = True
            holders = offers.holders(best.id)
            holder = holders[self._failures % len(holders)]
            _ = self._node.tasks.spawn(self._fetch(holder, best), "hash secret")

    async def _fetch(self, holder: NodeId, claim: SecretClaim) -> None:
        """Ask one node, then reconsider whatever the result."""
        try:
            query = HashSecretQuery(claim.id)
            answer = await self._node.ref(holder).ask(SECRET, query, timeout=_PATIENCE)
        except PdserveError as error:
            self._failed(f"{holder} does not give it: {error.message}")
            return
        finally:
            self._fetching = False
        if answer.secret and hash_secret_id(answer.secret) == claim.id:
            self._succeeded()
            self._turn(answer.secret, claim)
        else:
            self._failed(f"{holder} holds another one by now")

    def _succeeded(self) -> None:
        self._failures = 0
        self._degradations.clear(_MISSING)

    def _failed(self, why: str) -> None:
        self._failures += 1
        if self._failures >= _COMPLAIN:
            self._degradations.add(
                _MISSING,
                f"this node does not have the cluster's hash secret: {why}; until it has, its "
                "blocks do not match those of other nodes. Check that the nodes reach each other",
            )
        self._node.timers.call_later(_RETRY, self._look)

    def _turn(self, secret: bytes, claim: SecretClaim) -> None:
        """A secret has arrived; adopt it if it is still the best."""
        offers = offers_of(self._node.registry)
        own = self._claim
        given = own is not None and own.birth == GIVEN
        if not given and (own is None or claim < own or not self._told):
            self._take(secret, claim.adopted)
        self._judge(offers)
        self._look()

    def _take(self, secret: bytes, claim: SecretClaim) -> None:
        renamed, changed = self._told, secret != self._secret
        self._secret, self._claim = secret, claim
        self._tell()
        if changed:
            # A drawn secret that was not published is used by no other node, so it can be replaced.
            level = logging.INFO if renamed else logging.DEBUG
            _log.log(level, "blocks are hashed with secret %s from now on", claim.id.hex())
            for listener in self._listeners:
                listener(secret)

    def _tell(self) -> None:
        assert self._claim is not None
        self._told = True
        self._node.publish_names(self._claim.id, self._claim.birth)
        for listener in self._claim_listeners:
            listener(self._secret, self._claim.adopted.birth)

    def _judge(self, offers: SecretOffers) -> None:
        """Report a degradation if files differ: this divides the cluster, and only an operator can
        mend it."""
        rivals = tuple(offers.rivals(self._claim))
        if rivals == self._complaint:
            return
        self._complaint = rivals
        self._degradations.clear(_DIFFER)
        if rivals:
            self._degradations.add(
                _DIFFER,
                f"{', '.join(rivals)} {'have' if len(rivals) > 1 else 'has'} another hash secret "
                "than the rest, so prefixes in their caches are not found: give all nodes the "
                "same --hash-secret-file",
            )

    # ------------------------------------------------------------------ for the others

    @answers(SECRET)
    def _give(self, query: HashSecretQuery, call: IncomingCall) -> HashSecret:
        own = self._claim
        held = own is not None and own.id == query.names_id
        return HashSecret(self._secret if held else b"")
