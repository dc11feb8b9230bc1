"""The card of a model without files says what the engine can do."""

from __future__ import annotations

from pdserve.sim.virtual_model import VirtualModel
from tests.worker.test_card import CAPABILITIES


async def test_the_card_is_made_of_the_capabilities() -> None:
    source = VirtualModel("virtual", b"tokens")
    model = await source.find(lambda stage, fraction: None)
    assert not model.path.exists()
    card = await source.describe(model, CAPABILITIES)
    assert (card.name, card.tokenizer_json) == ("virtual", b"tokens")
    assert (card.max_model_len, card.vocab_size, card.block_size) == (512, 100, 32)
    assert (card.eos_token_ids, card.compat_hash) == ((7,), "c0ffee")
