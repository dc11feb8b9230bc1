"""Routers hear of vLLM's blocks by pdserve's names, each once, whatever vLLM does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.blocks.hashing import block_hashes, prompt_root
from pdserve.blocks.image_hashes import DIGEST_BYTES
from pdserve.messages.kv_events import BlockRemoved, BlockStored, PoolCleared
from pdserve_engines.vllm.block_names import BlockNames
from tests.engines.vllm.vllm_pool import Router, Sequence, VllmPool, cleared, removed, stored

if TYPE_CHECKING:
    import random

SIZE, SECRET, MODEL = 4, b"secret", "model"


def names_of(tokens: list[int], salt: str = "", lora: str = "", secret: bytes = SECRET) -> Any:
    root = prompt_root(secret, MODEL, salt, lora)
    return block_hashes(tokens, SIZE, parent=root, secret=secret)


def make(secret: bytes = SECRET) -> BlockNames:
    return BlockNames(secret, SIZE, MODEL)


def run_of(names: BlockNames, keys: list[Any], tokens: list[int], **fields: Any) -> Any:
    """An event of a chain's first blocks."""
    salt = names.salt(fields.pop("salt", ""), fields.pop("lora", ""))
    defaults = {"extra_keys": [(salt,)] + [None] * (len(keys) - 1)}
    return stored(block_hashes=keys, token_ids=tokens, block_size=SIZE, **(defaults | fields))


# ------------------------------------------------------------------ any traffic


@given(st.randoms(use_true_random=False))
def test_routers_know_exactly_what_vllm_holds(rng: random.Random) -> None:
    """Two tenants, adapters and prompts that share beginnings; blocks come twice, are evicted in
    any order and return; the pool is cleared; the secret changes while requests run."""
    secret, names, pool, router = SECRET, make(), VllmPool(rng, SIZE), Router()
    ours: dict[Any, bytes] = {}
    """vLLM's name -> ours."""
    running: list[Sequence] = []
    for step in range(rng.randrange(5, 60)):
        kind = rng.randrange(10)
        if kind < 3 or not running:
            salt, lora = rng.choice(["", "tenant"]), rng.choice(["", "a@1", "a@2"])
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 7 * SIZE))]
            sequence = Sequence(tokens, names.salt(salt, lora), lora or None)
            for number, name in enumerate(names_of(tokens, salt, lora, secret)):
                ours[pool.name(sequence, number)] = name
            pool.begin(sequence)
            running.append(sequence)
        elif kind < 6:
            pool.compute(rng.choice(running), rng.randrange(1, 4))
        elif kind == 6:
            pool.release(running.pop(rng.randrange(len(running))))
        elif kind == 7:
            pool.evict()
        elif kind == 8:
            pool.noise()
        elif rng.random() < 0.5:
            pool.reset()
        else:
            secret = b"secret %d" % step
            # What came before the new secret is translated first, as the core does.
            router.hear(names.translate(pool.take()))
            router.hear(names.rekey(secret))
            ours.clear()
            for sequence in running:
                pool.release(sequence)
            running.clear()
            assert pool.reset()
        if rng.random() < 0.5:
            router.hear(names.translate(pool.take()))
    router.hear(names.translate(pool.take()))
    assert router.device == {ours[name] for name in pool.names}
    assert len(names) == len(pool.names)
    for name in router.device:
        assert router.parents[name] != name


@pytest.mark.timeout(400)  # a long run has 2,000 examples: 20 s of an idle core
@given(st.randoms(use_true_random=False))
def test_nothing_is_kept_of_blocks_that_are_gone(rng: random.Random) -> None:
    names, pool, router = make(), VllmPool(rng, SIZE), Router()
    for _ in range(20):
        sequence = Sequence([rng.randrange(2) for _ in range(5 * SIZE)], names.salt("", ""))
        pool.begin(sequence)
        pool.compute(sequence, 5)
        pool.release(sequence)
    while pool.names:
        pool.evict()
    router.hear(names.translate(pool.take()))
    assert len(names) == 0
    assert router.device == set()


def test_requests_that_run_while_the_secret_changes_are_not_named() -> None:
    """vLLM keeps their blocks, and later blocks continue them; no router could ask for them."""
    names, router = make(), Router()
    router.hear(names.translate([run_of(names, ["x"], [1] * SIZE)]))
    router.hear(names.rekey(b"other"))
    later = stored(block_hashes=["y"], parent_block_hash="x", token_ids=[2] * SIZE, block_size=SIZE)
    assert names.translate([later, removed("y"), removed("x")]) == []
    assert router.device == set()
    router.hear(names.translate([run_of(names, ["z"], [1] * SIZE)]))
    assert router.device == set(names_of([1] * SIZE, secret=b"other"))


# ------------------------------------------------------------------ one by one


def test_a_block_has_the_name_that_the_frontend_gives_it() -> None:
    names, tokens = make(), list(range(3 * SIZE))
    (event,) = names.translate([run_of(names, ["a", "b", "c"], tokens, salt="s", lora="l@1")])
    root = prompt_root(SECRET, MODEL, "s", "l@1")
    assert event == BlockStored(hashes=names_of(tokens, "s", "l@1"), parent=root)


def test_salts_keep_tenants_adapters_and_secrets_apart() -> None:
    made = {
        names.salt(salt, lora)
        for names in (make(), make(b"other"), BlockNames(SECRET, SIZE, "another model"))
        for salt in ("", "tenant")
        for lora in ("", "a@1", "a@2")
    }
    assert len(made) == 18


def test_a_second_copy_is_not_reported_and_the_last_one_that_goes_is() -> None:
    names, tokens = make(), [1] * SIZE
    event = run_of(names, ["a"], tokens)
    assert len(names.translate([event])) == 1
    assert names.translate([event]) == []
    assert names.translate([removed("a")]) == []
    assert names.translate([removed("a")]) == [BlockRemoved(hashes=names_of(tokens))]
    assert names.translate([removed("a")]) == []


def test_new_blocks_between_known_ones_have_their_right_parents() -> None:
    names, tokens = make(), list(range(5 * SIZE))
    keys = ["a", "b", "c", "d", "e"]
    names.translate([run_of(names, keys, tokens), removed("b"), removed("d"), removed("e")])
    ours = names_of(tokens)
    first, second = names.translate([run_of(names, keys, tokens)])
    assert first == BlockStored(hashes=[ours[1]], parent=ours[0])
    assert second == BlockStored(hashes=ours[3:], parent=ours[2])


def test_tiers_are_counted_apart() -> None:
    names, tokens = make(), [1] * SIZE
    (name,) = names_of(tokens)
    events = names.translate([run_of(names, ["a"], tokens, medium=each) for each in ("GPU", "CPU")])
    assert [event.tier for event in events] == ["device", "host"]
    assert names.translate([removed("a", medium="CPU")]) == [BlockRemoved([name], "host")]
    assert names.translate([removed("a", medium="STORAGE")]) == []
    assert names.translate([removed("a", medium=None)]) == [BlockRemoved([name], "device")]
    assert len(names) == 0


def test_a_cleared_pool_is_cleared_in_every_tier_that_has_blocks() -> None:
    names, tokens = make(), [1] * SIZE
    names.translate([run_of(names, ["a"], tokens, medium=each) for each in ("GPU", "STORAGE")])
    assert names.translate([cleared()]) == [PoolCleared("device"), PoolCleared("disk")]
    assert names.translate([cleared()]) == [PoolCleared("device")]


@pytest.mark.parametrize(
    "changes",
    [
        {"group_idx": 1},
        {"block_size": SIZE // 2},
        {"extra_keys": [None]},
        {"extra_keys": None},
        {"extra_keys": [("another salt",)]},
        {"extra_keys": [(("image", 0), 7)]},
        {"parent_block_hash": "never seen"},
    ],
)
def test_blocks_that_no_frontend_can_name_are_passed_over(changes: dict[str, Any]) -> None:
    names = make()
    event = run_of(names, ["a"], [1] * SIZE)
    for name, value in changes.items():
        setattr(event, name, value)
    assert names.translate([event, removed("a", group_idx=changes.get("group_idx", 0))]) == []
    assert len(names) == 0


def test_the_group_that_is_named_need_not_be_the_first() -> None:
    """The first one may be of layers with a window."""
    names, tokens = BlockNames(SECRET, SIZE, MODEL, group=1), [1] * SIZE
    window, whole = (run_of(names, ["a"], tokens, group_idx=group) for group in (0, 1))
    assert names.translate([window]) == []
    assert [getattr(event, "hashes", None) for event in names.translate([whole])] == [
        names_of(tokens)
    ]
    assert names.translate([removed("a", group_idx=0)]) == []
    assert names.translate([removed("a", group_idx=1)]) == [BlockRemoved(names_of(tokens))]


def test_blocks_left_out_of_a_run_do_not_shift_the_names() -> None:
    """vLLM reports no hash for a block outside of a sliding window, though its tokens are there."""
    names, tokens = make(), list(range(3 * SIZE))
    names.translate([run_of(names, ["a"], tokens[:SIZE])])
    later = stored(
        block_hashes=["c"], parent_block_hash="a", token_ids=tokens[SIZE:], block_size=SIZE
    )
    assert names.translate([later, removed("c")]) == []


def test_the_chain_of_a_request_is_that_of_its_events() -> None:
    """With an image across two blocks, which vLLM's events tell by extra keys."""
    names, tokens = make(), list(range(3 * SIZE))
    image = f"{'ab' * DIGEST_BYTES}/{SIZE}"
    salt = names.salt("tenant", "")
    keys = [(salt, (image, 2)), ((image, 2 - SIZE),), None]
    event = run_of(names, ["a", "b", "c"], tokens, extra_keys=keys)
    (heard,) = names.translate([event])
    feature = SimpleNamespace(identifier=image, mm_position=SimpleNamespace(offset=2))
    chain = names.chain(tokens, salt, [feature])
    assert heard == BlockStored([*chain], prompt_root(SECRET, MODEL, "tenant", ""))
    assert names.chain(tokens, salt) != chain
    assert names.chain(tokens, "another salt") == []
    feature.identifier = "of vLLM"
    assert names.chain(tokens, salt, [feature]) == []
