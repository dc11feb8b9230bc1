from __future__ import annotations

import pytest

from pdserve.errors import ProtocolError
from pdserve.gossip import cards
from pdserve.messages.card import GenerationDefaults, ImagePlaceholder, ModelCard
from pdserve.messages.lora import LoraSummary
from pdserve.messages.node import ModelSummary, NodeCard, model_card, part_hash, summarize_card
from pdserve.wire.codec import decoder, encode

FULL = ModelCard(
    name="tiny",
    aliases=("default",),
    max_model_len=64,
    vocab_size=100,
    block_size=32,
    eos_token_ids=(1, 2),
    tokenizer_json=b"a tokenizer",
    tokenizer_config_json=b"its configuration",
    chat_template="ä {{ messages }}",
    defaults=GenerationDefaults(temperature=0.6),
    engine="torch",
    dtype="float32",
    compat_hash="x",
    created=7,
    tool_parser="hermes",
    reasoning_parser="think",
    pooling="mean",
    normalize=True,
    embedding_size=64,
    features=("grammar",),
    dimensions=(32, 16),
    loras=(LoraSummary(name="poet", revision="1f"),),
    num_labels=1,
    score_activation="sigmoid",
    image=ImagePlaceholder(token=5, text="<image>", most=4),
)
BARE = ModelCard(
    name="bare", max_model_len=1, vocab_size=1, block_size=1, tokenizer_json=b"", chat_template=None
)


@pytest.mark.parametrize("card", [FULL, BARE])
def test_a_card_is_whole_again_from_its_offer_and_its_parts(card: ModelCard) -> None:
    small, parts = summarize_card(card)
    assert set(small.parts) == set(parts)
    assert model_card(small, parts) == card
    assert decoder(ModelSummary)(encode(small)) == small


def test_every_field_of_a_card_travels() -> None:
    """A field that is added to a card must be added to what carries it."""
    large = {"tokenizer_json": "tokenizer", "tokenizer_config_json": "tokenizer_config"}
    fields = {large.get(name, name) for name in ModelCard.__struct_fields__}
    assert fields == set(ModelSummary.__struct_fields__)
    changed = [n for n in ModelCard.__struct_fields__ if getattr(FULL, n) == getattr(BARE, n)]
    assert changed == [], "the test's cards should differ in every field"


def test_equal_parts_have_one_name() -> None:
    """The one that membership calls them by."""
    small, parts = summarize_card(FULL)
    assert parts[small.tokenizer] == b"a tokenizer"
    assert part_hash(b"x") == cards.part_hash(b"x")
    assert len(set(small.parts)) == len(small.parts)


def test_a_missing_part_is_an_error() -> None:
    small, parts = summarize_card(FULL)
    del parts[small.tokenizer_config]
    with pytest.raises(KeyError):
        model_card(small, parts)


def test_names_of_parts_have_their_length() -> None:
    small, _ = summarize_card(FULL)
    raw = encode(small).replace(small.tokenizer, b"short")
    with pytest.raises(ProtocolError):
        decoder(ModelSummary)(raw)


def test_an_ordinary_card_is_small() -> None:
    small, _ = summarize_card(FULL)
    assert len(encode(NodeCard(role="worker", models=(small,) * 4, topics=("load",) * 4))) < 2048
