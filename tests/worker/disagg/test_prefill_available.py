"""Whether anybody else may prefill, by what members say they do."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pdserve.messages.lora import LoraSummary
from pdserve.messages.node import ModelSummary, NodeCard, summarize_card
from pdserve.worker.disagg.decode_handler import _may_prefill
from tests.worker.disagg.cluster import CARD


def offers(**changes: Any) -> tuple[ModelSummary, ...]:
    offered, _ = summarize_card(replace(CARD, **changes))
    return (offered,)


@pytest.mark.parametrize(
    ("card", "may"),
    [
        (None, True),
        (NodeCard(), True),
        (NodeCard(role="worker", mode="prefill"), True),
        (NodeCard(role="worker", mode="prefill", models=offers()), True),
        (NodeCard(role="worker", mode="prefill", models=offers(name="another")), False),
        (NodeCard(role="worker", mode="prefill", models=offers(compat_hash="other")), False),
        (NodeCard(role="worker", mode="decode"), False),
        (NodeCard(role="worker", mode="aggregated"), False),
        (NodeCard(role="router"), False),
        (NodeCard(role="frontend"), False),
    ],
)
def test_who_may_prefill(card, may):
    assert _may_prefill(card, CARD) is may
    assert not _may_prefill(card, CARD, "poet@1"), "it has no adapters"


@pytest.mark.parametrize(("lora", "may"), [("", True), ("poet@1", True), ("poet@2", False)])
def test_who_may_prefill_for_an_adapter(lora, may):
    loras = (LoraSummary(name="poet", revision="1"),)
    there = NodeCard(role="worker", mode="prefill", models=offers(loras=loras))
    assert _may_prefill(there, CARD, lora) is may
    assert not _may_prefill(replace(there, mode="decode"), CARD, lora)
