"""Who inherits what of a worker that leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.ids import NodeId, NodeLife
from pdserve.messages.card import ModelCard
from pdserve.messages.kv_pull import HASH_BYTES, KvChains, OfferedChain
from pdserve.messages.node import NodeCard, summarize_card
from pdserve.runtime.registry import Member
from pdserve.worker.kv_fetch.heirs import divided, heirs

if TYPE_CHECKING:
    from collections.abc import Sequence

MODEL, _ = summarize_card(
    ModelCard(
        name="m",
        max_model_len=256,
        vocab_size=97,
        block_size=4,
        eos_token_ids=(2,),
        tokenizer_json=b"{}",
        tokenizer_config_json=b"{}",
        engine="scripted",
        dtype="none",
        compat_hash="same",
        created=0,
    )
)
CARD = NodeCard(role="worker", models=(MODEL,), transfers=("tcp",), names_id=b"secret")


def member(name: str, **changes: Any) -> Member:
    card = msgspec.structs.replace(CARD, **changes)
    return Member(NodeId(name), 1, f"{name}:1", "worker", card)


def test_every_worker_that_could_use_the_blocks_is_an_heir() -> None:
    members = [member("b"), member("a")]
    assert heirs(members, "same", b"secret", ("tcp",)) == [
        NodeLife(NodeId("a"), 1),
        NodeLife(NodeId("b"), 1),
    ]
    assert heirs(members, "other", b"secret", ("tcp",)) == []


@pytest.mark.parametrize(
    "one",
    [
        member("a", draining=True),
        member("a", transfers=()),
        member("a", transfers=("shm",)),
        member("a", names_id=b"another"),
        member("a", models=()),
        replace(member("a"), role="frontend"),
        replace(member("a"), suspect=True),
        replace(member("a"), reachable=False),
        replace(member("a"), card=None),
    ],
)
def test_others_are_not(one: Member) -> None:
    assert heirs([one], "same", b"secret", ("tcp",)) == []


def name(number: int) -> bytes:
    return number.to_bytes(HASH_BYTES, "little")


def chain(first: int, parent: int, numbers: Sequence[int]) -> OfferedChain:
    return OfferedChain(first, name(parent), b"".join(map(name, numbers)))


TO = [NodeLife(NodeId(f"w{number}"), 1) for number in range(4)]


def test_what_belongs_together_goes_to_one_heir() -> None:
    trees = [
        [chain(0, 0, [10 * tree + 1, 10 * tree + 2]), chain(2, 10 * tree + 2, [10 * tree + 3])]
        for tree in range(1, 30)
    ]
    branches = [chain(1, 10 * tree + 1, [10 * tree + 5]) for tree in range(1, 30)]
    listed = KvChains((*(one for tree in trees for one in tree), *branches))
    shares = divided(listed, TO)
    assert set(shares) == set(TO)
    assert sum(len(share.chains) for share in shares.values()) == 29 * 3
    for share in shares.values():
        known = {name(0)}
        for one in share.chains:
            assert one.parent in known
            known |= {one.hashes[at : at + 16] for at in range(0, len(one.hashes), 16)}


def test_the_order_stays() -> None:
    listed = KvChains(tuple(chain(0, 0, [number]) for number in range(1, 40)))
    for share in divided(listed, TO).values():
        assert list(share.chains) == [one for one in listed.chains if one in share.chains]


def test_a_chain_without_its_beginning_is_left_out() -> None:
    assert divided(KvChains((chain(3, 7, [8]),)), TO) == {}
    assert divided(KvChains((chain(0, 0, [8]),)), []) == {}
