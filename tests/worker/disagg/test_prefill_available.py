"""Whether anybody else may prefill, by what members say they do."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pdserve.messages.node import ModelSummary, NodeCard, summarize_card
from pdserve.worker.disagg.decode_handler import _may_prefill
from tests.worker.disagg.cluster import CARD


def offers(**changes: str) -> tuple[ModelSummary, ...]:
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
