"""Whose blocks they are goes with them, and what a request shares with nobody stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.blocks.hashing import split_hashes
from pdserve.engine_core.kv_fetch.chains import worth_most
from pdserve.engine_core.kv_fetch.uses import DeviceUses
from pdserve.kv.block_pool import BlockPool
from pdserve.kv.tiers.cleaner import BlockUse
from pdserve.messages.engine import AbsorbKv, KvChainsListed, ListKvChains
from pdserve.messages.kv_events import BlockRemoved, BlockStored, PoolCleared
from pdserve.messages.tiers import TierSpec
from tests.engine_core.kv_fetch.pair import BLOCK, FetchPair, evict, fetch_pair, names_of, root_of
from tests.engine_core.kv_fetch.test_fetches import check_reused
from tests.engine_core.kv_transfer.test_handoff import prompt_of, request

if TYPE_CHECKING:
    from pdserve.messages.kv_pull import KvChains, OfferedChain

PLAIN = BlockUse()


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def use_chain(pool: BlockPool, numbers: list[int]) -> None:
    """A sequence with these blocks comes and goes."""
    hashes = [name(number) for number in numbers]
    shared = pool.match(hashes)
    blocks = pool.reserve(len(numbers) - len(shared), shared=shared)
    assert blocks is not None
    pool.release(pool.commit_run([*shared, *blocks], hashes, name(0)))


def numbers_of(chain: OfferedChain) -> list[int]:
    return [int.from_bytes(one, "little") for one in split_hashes(chain.hashes)]


def test_the_last_used_chain_is_worth_most() -> None:
    pool = BlockPool(20, 4)
    use_chain(pool, [1, 2, 3])
    use_chain(pool, [7, 8])
    use_chain(pool, [1, 2, 9])
    chains = worth_most(pool, 20, plain)
    assert [numbers_of(chain) for chain in chains] == [[1, 2, 9], [7, 8], [3]]
    assert [(chain.first, chain.parent) for chain in chains] == [
        (0, name(0)),
        (0, name(0)),
        (2, name(2)),
    ]
    assert [numbers_of(chain) for chain in worth_most(pool, 4, plain)] == [[1, 2, 9], [7]]


def plain(block_hash: bytes) -> BlockUse:
    return PLAIN


def test_private_chains_are_not_given_away() -> None:
    pool = BlockPool(20, 4)
    use_chain(pool, [1, 2])
    use_chain(pool, [5, 6])
    private = {name(5), name(6)}
    chains = worth_most(pool, 20, lambda one: BlockUse(private=one in private))
    assert [chain.hashes for chain in chains] == [name(1) + name(2)]


def test_only_uses_that_matter_are_remembered() -> None:
    uses = DeviceUses(lambda salt: salt.encode())
    uses.absorbed([name(1), name(2)], PLAIN)
    assert uses._uses == {}
    marked = BlockUse(root=b"tenant")
    uses.absorbed([name(1), name(2), name(3), name(4)], marked)
    assert uses.use(name(1)) == marked
    uses.absorbed([name(2)], PLAIN)
    assert uses.use(name(2)) == PLAIN
    uses.follow([BlockStored([name(3)], name(2)), BlockRemoved([name(3), name(8)])])
    assert uses.use(name(3)) == PLAIN
    assert uses.use(name(4)) == marked
    uses.follow([PoolCleared()])
    assert uses._uses == {}


def listed(both: FetchPair) -> KvChains:
    both.o.core.handle(ListKvChains(7, 100))
    (answer,) = [event for event in both.step_o() if isinstance(event, KvChainsListed)]
    return answer.listed


def test_marks_travel_and_private_blocks_stay() -> None:
    both = fetch_pair()
    prompt = prompt_of(17)
    salted = replace(request(prompt, max_tokens=1), cache_salt="tenant")
    secret = replace(request(prompt_of(17, seed=2), max_tokens=1), cache_scope="never")
    for wanted in (salted, secret):
        both.generate(both.o, wanted)
        both.run()
    (chain,) = listed(both).chains
    mark = both.o.core.scheduler.owner_mark("tenant")
    assert (chain.first, len(chain.hashes), chain.mark) == (0, 4 * 16, mark)
    both.r.core.handle(
        AbsorbKv(
            number=1,
            node="p",
            epoch=1,
            first=0,
            parent=chain.parent,
            hashes=chain.hashes,
            timeout=5.0,
            mark=chain.mark,
            turns=chain.turns,
        )
    )
    both.run()
    assert both.r.core._uses is not None
    assert both.r.core._uses.use(chain.hashes[:16]).root == mark
    evict(both.r, 4)
    both.r.step()
    assert both.r.core._uses._uses == {}
    both.close()


def test_a_block_that_is_used_openly_again_is_given_away() -> None:
    both = fetch_pair()
    prompt = prompt_of(17)
    both.generate(both.o, replace(request(prompt, max_tokens=1), cache_scope="never"))
    both.run()
    assert listed(both).chains == ()
    both.generate(both.o, request(prompt, max_tokens=1))
    both.run()
    (chain,) = listed(both).chains
    assert chain.parent == root_of(both.o)
    assert chain.hashes == b"".join(names_of(both.o, prompt))
    both.absorb(prompt[: 4 * BLOCK])
    both.run()
    check_reused(both, request(prompt), 4 * BLOCK)
    both.run()
    both.close()


def test_lower_tiers_know_whose_the_absorbed_blocks_are() -> None:
    both = fetch_pair(r={"tiers": TierSpec(host_bytes=1 << 16)})
    prompt = prompt_of(17)
    salted = replace(request(prompt, max_tokens=1), cache_salt="tenant")
    both.generate(both.o, salted)
    both.run()
    (chain,) = listed(both).chains
    order = AbsorbKv(
        number=1,
        node="p",
        epoch=1,
        first=0,
        parent=chain.parent,
        hashes=chain.hashes,
        timeout=5.0,
        mark=chain.mark,
        turns=3,
    )
    both.r.core.handle(order)
    while not both.absorbed:
        both.turn()
    tiers = both.r.core._tiers
    assert tiers is not None
    use = tiers.use(chain.hashes[:16])
    assert (use.root, use.turns) == (chain.mark, 3)
    both.close()
