"""KV events: pdserve's names for TensorRT-LLM's blocks, whatever is lost in between."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.blocks.hashing import block_hashes, prompt_root
from pdserve.messages.kv_events import BlockRemoved, BlockStored, KvEvent, PoolCleared
from pdserve_engines.tensorrt_llm.events import KvNames

SECRET, MODEL, SIZE = b"secret", "model", 4


class Feed:
    """Numbers events and keeps what a router would know."""

    def __init__(self) -> None:
        self.names = KvNames(SIZE, SECRET, MODEL)
        self.number = 0
        self.known: set[tuple[str, bytes]] = set()

    def __call__(self, data: dict[str, Any], *, window: int = 100, rank: int = 0) -> list[KvEvent]:
        event: dict[str, Any] = {"event_id": self.number, "data": data, "window_size": window}
        if rank:
            event["attention_dp_rank"] = rank
        self.number += 1
        return self.note(list(self.names.translate(event)))

    def note(self, events: list[KvEvent]) -> list[KvEvent]:
        for event in events:
            match event:
                case BlockStored(hashes=hashes, tier=tier):
                    for name in hashes:
                        assert (tier, name) not in self.known, "stored twice"
                        self.known.add((tier, name))
                case BlockRemoved(hashes=hashes, tier=tier):
                    for name in hashes:
                        assert (tier, name) in self.known, "removed and not there"
                        self.known.remove((tier, name))
                case PoolCleared(tier=tier):
                    self.known = {each for each in self.known if each[0] != tier}
        return events


def block(key: int, tokens: list[int], level: int = 0) -> dict[str, Any]:
    return {
        "block_hash": key,
        "tokens": [{"token_id": token} for token in tokens],
        "cache_level": level,
    }


def stored(parent: int | None, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"type": "stored", "parent_hash": parent, "blocks": list(blocks)}


def removed(*keys: int) -> dict[str, Any]:
    return {"type": "removed", "block_hashes": list(keys)}


def moved(key: int, level: int) -> dict[str, Any]:
    return {"type": "updated", "block_hash": key, "cache_level": {"new_value": level}}


def names(tokens: list[int], salt: str = "") -> list[bytes]:
    root = prompt_root(SECRET, MODEL, salt)
    return list(block_hashes(tokens, SIZE, parent=root, secret=SECRET))


@pytest.fixture
def feed() -> Feed:
    return Feed()


def test_blocks_get_the_names_that_a_prompt_has(feed) -> None:
    tokens = list(range(12))
    events = feed(stored(None, block(11, tokens[:4]), block(12, tokens[4:8])))
    events += feed(stored(12, block(13, tokens[8:])))
    assert [event.hashes[0] for event in events] == names(tokens)
    assert events[1].parent == names(tokens)[0]
    (gone,) = feed(removed(13))
    assert gone == BlockRemoved(hashes=[names(tokens)[2]])


def test_partial_blocks_and_what_hangs_on_them_are_not_announced(feed) -> None:
    assert feed(stored(None, block(11, [1, 2, 3]), block(12, [4, 5, 6, 7]))) == []
    assert feed(stored(11, block(13, [4, 5, 6, 7]))) == []
    assert feed(removed(11, 12, 13)) == []


def test_empty_events_are_nothing(feed) -> None:
    assert list(feed.names.translate({})) == []


def test_unknown_parents_are_not_announced(feed) -> None:
    assert feed(stored(99, block(11, [1, 2, 3, 4]))) == []


def test_a_gap_clears_the_pool_and_later_chains_are_learned_again(feed) -> None:
    feed(stored(None, block(11, [1, 2, 3, 4])))
    feed.number += 1
    events = feed(stored(11, block(12, [5, 6, 7, 8])))
    assert events == [PoolCleared(tier="device"), PoolCleared(tier="host")]
    assert feed.names.gaps == 1
    assert feed(stored(None, block(11, [1, 2, 3, 4])))
    assert feed.names.gaps == 1


def test_ranks_have_numbers_of_their_own(feed) -> None:
    feed(stored(None, block(11, [1, 2, 3, 4])))
    other = {"event_id": 0, "data": removed(5), "attention_dp_rank": 1}
    assert list(feed.names.translate(other)) == []
    assert feed.names.gaps == 0


def test_copies_on_several_ranks_are_one_block_for_routers(feed) -> None:
    assert len(feed(stored(None, block(11, [1, 2, 3, 4])))) == 1
    first = {"event_id": 0, "data": stored(None, block(11, [1, 2, 3, 4])), "attention_dp_rank": 1}
    assert feed.note(list(feed.names.translate(first))) == []
    assert feed(removed(11)) == []
    last = {"event_id": 1, "data": removed(11), "attention_dp_rank": 1}
    assert len(feed.note(list(feed.names.translate(last)))) == 1


def test_a_block_that_moves_to_the_host_changes_its_tier(feed) -> None:
    feed(stored(None, block(11, [1, 2, 3, 4])))
    (name,) = names([1, 2, 3, 4])
    there, gone = feed(moved(11, 1))
    assert there == BlockStored(hashes=[name], parent=prompt_root(SECRET, MODEL, ""), tier="host")
    assert gone == BlockRemoved(hashes=[name], tier="device")
    assert feed(moved(11, 1)) == []
    assert feed(removed(11)) == [BlockRemoved(hashes=[name], tier="host")]


def test_salted_prompts_are_announced_under_their_salt(feed) -> None:
    feed.names.note_prompt([1, 2, 3, 4, 5], "tenant")
    (event,) = feed(stored(None, block(11, [1, 2, 3, 4])))
    assert event.hashes == names([1, 2, 3, 4], "tenant")


def test_a_block_of_several_salts_is_not_announced(feed) -> None:
    feed.names.note_prompt([1, 2, 3, 4], "a")
    feed.names.note_prompt([1, 2, 3, 4], "")
    assert feed(stored(None, block(11, [1, 2, 3, 4]))) == []
    assert feed.names.ambiguous == 1
    # One that was not noted cannot be told either, since salts are in use.
    assert feed(stored(None, block(12, [9, 9, 9, 9]))) == []


def test_another_secret_clears_what_routers_know(feed) -> None:
    feed(stored(None, block(11, [1, 2, 3, 4])))
    assert feed.note(feed.names.rekey(b"other")) == [
        PoolCleared(tier="device"),
        PoolCleared(tier="host"),
    ]
    (event,) = feed(stored(None, block(14, [1, 2, 3, 4])))
    root = prompt_root(b"other", MODEL, "")
    assert event.hashes == list(block_hashes([1, 2, 3, 4], SIZE, parent=root, secret=b"other"))


OPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "remove", "move", "lose"]),
        st.integers(0, 9),
        st.integers(0, 2),
        st.integers(0, 1),
    ),
    max_size=60,
)


@given(OPS)
def test_routers_never_hear_anything_twice_or_of_what_is_not_there(operations) -> None:
    """Random histories with losses; the feed checks each event."""
    feed = Feed()
    for kind, key, parent, level in operations:
        match kind:
            case "store":
                before = None if parent == 0 else key - parent
                feed(stored(before, block(key, [key, key, key, key], level)))
            case "remove":
                feed(removed(key, (key + 1) % 10))
            case "move":
                feed(moved(key, level))
            case "lose":
                feed.number += 1
    feed(removed(*range(10)))
    assert not feed.known
    assert len(feed.names) == 0
