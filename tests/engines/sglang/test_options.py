"""The spec as SGLang's arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.errors import ConfigError
from pdserve.messages.engine import EngineSpec
from pdserve.messages.lora import LoraAdapter
from pdserve_engines.engine_options import parse_value
from pdserve_engines.sglang.options import OURS, event_endpoints, server_arguments
from tests.contracts.contract import load

(ENTRY,) = [entry for entry in load("sglang").entries if entry.at.endswith(":ServerArgs")]
FIELDS = tuple(ENTRY.fields or ())
"""Fields of `ServerArgs` that the data file lists."""


def arguments(events: str = "", **changes: Any) -> dict[str, Any]:
    return server_arguments(EngineSpec(engine="sglang", model="/m", **changes), FIELDS, events)


def test_flags_become_arguments():
    found = arguments(block_size=16, max_sequences=9, max_batch_tokens=64, prefix_cache=False)
    assert found["model_path"] == "/m"
    assert (found["page_size"], found["max_running_requests"]) == (16, 9)
    assert found["chunked_prefill_size"] == 64
    assert found["disable_radix_cache"] is True
    assert "context_length" not in found
    assert arguments(max_model_len=77)["context_length"] == 77
    assert arguments(kv_share=0.5)["mem_fraction_static"] == pytest.approx(0.45)


def test_what_the_adapter_relies_on_is_set():
    found = arguments()
    assert found["incremental_streaming_output"] is True
    assert found["stream_interval"] == 1
    assert found["grammar_backend"] == "llguidance"
    assert found["enable_priority_scheduling"] is True


def test_kv_events_go_through_a_folder():
    config = json.loads(arguments(events="/tmp/x")["kv_events_config"])
    assert (config["endpoint"], config["replay_endpoint"]) == event_endpoints("/tmp/x")
    assert config["publisher"] == "zmq"
    assert "kv_events_config" not in arguments()


@pytest.mark.parametrize(
    ("device", "found"),
    [("auto", {}), ("cuda", {"device": "cuda"}), ("cuda:2", {"device": "cuda", "base_gpu_id": 2})],
)
def test_devices(device: str, found: dict[str, Any]):
    given = arguments(device=device)
    assert {name: given[name] for name in ("device", "base_gpu_id") if name in given} == found


def test_adapters_are_named_by_their_id():
    adapter = LoraAdapter(name="law", path="/adapters/law", revision="ab12", rank=8)
    found = arguments(loras=(adapter,))
    assert found["lora_paths"] == {adapter.id: "/adapters/law"}
    assert found["max_loras_per_batch"] == 2


def test_options_are_fields_of_server_args():
    found = arguments(options={"tp-size": "4", "quantization": "fp8", "attention_backend": "fa3"})
    assert (found["tp_size"], found["quantization"]) == (4, "fp8")
    assert found["attention_backend"] == "fa3"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tpsize", "did you mean 'tp_size'"),
        ("zzz", r"has no option 'zzz'\. Options are"),
        ("page_size", "is set by --block-size"),
        ("skip-tokenizer-init", "need the tokenizer"),
    ],
)
def test_other_options_are_refused_with_a_hint(name: str, message: str):
    with pytest.raises(ConfigError, match=message):
        arguments(options={name: "1"})


def test_bytes_for_kv_are_refused():
    with pytest.raises(ConfigError, match="max_total_tokens"):
        arguments(kv_memory=1 << 30)


def test_a_release_without_a_needed_argument_is_refused():
    spec = EngineSpec(engine="sglang", model="/m")
    fields = [field for field in FIELDS if field != "incremental_streaming_output"]
    with pytest.raises(ConfigError, match="no argument incremental_streaming_output"):
        server_arguments(spec, fields, "")


def test_all_names_are_known_to_the_data_file():
    """So that a release that renames one is noticed."""
    assert OURS.keys() <= set(FIELDS)


def test_values_are_json_or_text():
    assert [parse_value(text) for text in ("1", "true", "True", "None", "fa3", '{"a": 1}')] == [
        1, True, True, None, "fa3", {"a": 1},
    ]  # fmt: skip
