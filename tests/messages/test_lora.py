from __future__ import annotations

from pdserve.messages.lora import LoraAdapter, LoraSummary


def test_an_adapter_and_its_line_in_a_card_have_one_id() -> None:
    adapter = LoraAdapter(name="poet", path="/adapters/poet", revision="1f", rank=8)
    assert adapter.id == LoraSummary(name="poet", revision="1f").id


def test_other_files_under_one_name_have_another_id() -> None:
    ids = {LoraSummary(name="poet", revision=each).id for each in ("1f", "2e")}
    assert len(ids) == 2
