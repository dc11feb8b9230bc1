"""Decides who inherits the blocks of a worker that leaves.

Only workers with the same compatibility hash and hash secret can use them. Chains with a common
beginning go to the same heir, which is drawn by rendezvous hashing, so that no two heirs pull the
same block. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.ids import NodeLife
from pdserve.messages.kv_pull import HASH_BYTES, KvChains
from pdserve.runtime.rendezvous import key_of, score

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from pdserve.messages.kv_pull import OfferedChain
    from pdserve.runtime.registry import Member

__all__ = ["divided", "heirs"]


def heirs(
    members: Iterable[Member], compat_hash: str, names_id: bytes, transfers: Collection[str]
) -> list[NodeLife]:
    """The workers that could use the blocks, sorted by name. `transfers`: the back ends by which
    KV leaves this worker."""
    found = [
        NodeLife(member.node, member.epoch)
        for member in members
        if _can_use(member, compat_hash, names_id, transfers)
    ]
    return sorted(found)


def _can_use(member: Member, compat_hash: str, names_id: bytes, transfers: Collection[str]) -> bool:
    card = member.card
    if card is None or member.role != "worker" or member.suspect or not member.reachable:
        return False
    if card.going or card.names_id != names_id or not {*card.transfers} & {*transfers}:
        return False
    return any(model.compat_hash == compat_hash for model in card.models)


def divided(listed: KvChains, to: Sequence[NodeLife]) -> dict[NodeLife, KvChains]:
    """Each heir's chains, in the given order. A chain whose beginning is in no other one is left
    out: no heir could use it."""
    shares: dict[NodeLife, list[OfferedChain]] = {}
    trees: dict[bytes, NodeLife] = {}
    """Heir of the chain to which a hash belongs."""
    for chain in listed.chains:
        first = chain.hashes[:HASH_BYTES]
        heir = trees.get(chain.parent) if chain.first else _drawn(first, to)
        if heir is None:
            continue
        shares.setdefault(heir, []).append(chain)
        for at in range(0, len(chain.hashes), HASH_BYTES):
            trees[chain.hashes[at : at + HASH_BYTES]] = heir
    return {heir: KvChains(tuple(chains)) for heir, chains in shares.items()}


def _drawn(name: bytes, to: Sequence[NodeLife]) -> NodeLife | None:
    key = key_of(name)
    return max(to, key=lambda life: (score(key, life.node), life.node), default=None)
