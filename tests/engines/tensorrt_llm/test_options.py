"""Arguments of `LLM`: what a release lacks, what an operator may set, and hints."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import ConfigError
from pdserve.messages.engine import EngineSpec, TransferSpec
from pdserve_engines.engine_options import parse_value
from pdserve_engines.tensorrt_llm.options import MINIMUM, OURS, llm_arguments
from pdserve_engines.tensorrt_llm.package import schema_of
from tests.engines.tensorrt_llm.fake_llm import TorchLlmArgs

SCHEMA = schema_of(TorchLlmArgs)


def made(options: dict[str, str] | None = None, schema: Any = SCHEMA, **changes: Any) -> Any:
    spec = EngineSpec(engine="tensorrt_llm", model="/m", options=options or {}, **changes)
    return llm_arguments(spec, 4096, schema)


def without(path: str) -> dict[str, Any]:
    outer, _, inner = path.partition(".")
    if not inner:
        return {name: kind for name, kind in SCHEMA.items() if name != outer}
    nested = {name: kind for name, kind in SCHEMA[outer].items() if name != inner}
    return {**SCHEMA, outer: nested}


def test_the_spec_becomes_arguments():
    arguments = made(kv_memory=0, block_size=16, max_sequences=7)
    assert arguments.missing == ()
    values = arguments.values
    assert values["max_seq_len"] == 4096
    assert values["max_batch_size"] == 7
    assert values["guided_decoding_backend"] == "llguidance"
    assert values["kv_cache_config"]["tokens_per_block"] == 16
    assert values["kv_cache_config"]["free_gpu_memory_fraction"] == 0.9
    assert values["scheduler_config"] == {"waiting_queue_policy": "priority"}
    assert "cache_transceiver_config" not in values
    assert made(kv_memory=5).values["kv_cache_config"]["max_gpu_total_bytes"] == 5
    assert not made(prefix_cache=False).has("kv_cache_config.event_buffer_max_size")
    transfer = made(transfer=TransferSpec()).values
    assert transfer["cache_transceiver_config"] == {"backend": "DEFAULT"}


@pytest.mark.parametrize("path", MINIMUM)
def test_a_field_that_a_release_lacks_is_left_out_or_refused(path):
    changes: dict[str, Any] = {"transfer": TransferSpec()}
    if path.endswith("max_gpu_total_bytes"):
        changes["kv_memory"] = 1
    if MINIMUM[path]:
        with pytest.raises(ConfigError, match=path.partition(".")[0]):
            made(schema=without(path), **changes)
    else:
        arguments = made(schema=without(path), **changes)
        assert arguments.missing == (path,)
        assert not arguments.has(path)


def test_a_value_that_a_releases_enum_lacks_is_left_out():
    schema = {**SCHEMA, "scheduler_config": {"waiting_queue_policy": frozenset({"fcfs"})}}
    assert made(schema=schema).missing == ("scheduler_config.waiting_queue_policy",)


def test_options_are_fields_and_objects_add_to_ours():
    values = made({"tensor-parallel-size": "2", "kv_cache_config": '{"dtype": "fp8"}'}).values
    assert values["tensor_parallel_size"] == 2
    assert values["kv_cache_config"]["dtype"] == "fp8"
    assert values["kv_cache_config"]["tokens_per_block"] == 32


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tensor_paralel_size": "2"}, "did you mean 'tensor_parallel_size'?"),
        ({"kv_cache_config": '{"dtyp": "fp8"}'}, "did you mean 'kv_cache_config.dtype'?"),
        ({"max_seq_len": "5"}, "is set by --max-model-len"),
        ({"kv_cache_config": '{"tokens_per_block": 64}'}, "is set by --block-size"),
        ({"zzz": "1"}, "has no option 'zzz'. Options are"),
    ],
)
def test_wrong_options_are_refused_with_a_hint(options, text):
    with pytest.raises(ConfigError) as caught:
        made(options)
    assert text in caught.value.message


def test_every_field_that_pdserve_sets_has_a_rule():
    set_by_us = {path for path in MINIMUM if path != "cache_transceiver_config"}
    free = {
        "kv_cache_config",
        "kv_cache_config.free_gpu_memory_fraction",
        "enable_chunked_prefill",
        "scheduler_config.waiting_queue_policy",
    }
    assert set_by_us - set(OURS) == free


def test_values_are_json_where_they_are_json():
    assert [parse_value(text) for text in ("1", "True", "None", "a", '{"b": 1}')] == [
        1, True, None, "a", {"b": 1},
    ]  # fmt: skip
