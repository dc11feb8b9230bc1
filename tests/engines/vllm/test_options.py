"""What of a spec and of `--engine-option` reaches vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.messages.engine import EngineSpec
from pdserve.messages.lora import LoraAdapter
from pdserve_engines.engine_options import parse_value
from pdserve_engines.vllm.options import OURS, engine_arguments, rank_for

FIELDS = frozenset(OURS) | {
    "enforce_eager",
    "max_logprobs",
    "max_loras",
    "max_lora_rank",
    "quantization",
    "rope_scaling",
    "tensor_parallel_size",
    "_private",
}


def arguments(kv_memory: int = 0, **changes: Any) -> dict[str, Any]:
    spec = EngineSpec(engine="vllm", model="/models/m", **changes)
    return engine_arguments(spec, FIELDS, kv_memory)


def adapter(name: str, rank: int) -> LoraAdapter:
    return LoraAdapter(name=name, path=f"/adapters/{name}", revision="1", rank=rank)


def test_the_spec_reaches_vllm() -> None:
    found = arguments(
        dtype="bfloat16",
        seed=3,
        block_size=16,
        max_batch_tokens=512,
        max_sequences=7,
        prefix_cache=False,
        gpu_memory_utilization=0.8,
        kv_share=0.5,
    )
    expected = {
        "model": "/models/m",
        "dtype": "bfloat16",
        "seed": 3,
        "block_size": 16,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 7,
        "gpu_memory_utilization": 0.4,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["scheduling_policy"] == "priority", "requests have priorities"
    assert found["max_logprobs"] == -1, "the API's limit is the frontend's"
    assert found["disable_log_stats"] is False, "times of requests come with the statistics"


def test_what_is_not_set_is_left_to_vllm() -> None:
    bare = arguments()
    assert not {"max_model_len", "kv_cache_memory_bytes", "enable_lora"} & bare.keys()
    assert arguments(max_model_len=99)["max_model_len"] == 99
    assert arguments(kv_memory=1 << 20)["kv_cache_memory_bytes"] == 1 << 20


def test_options_are_fields_of_vllm() -> None:
    options = {"tensor-parallel-size": "2", "enforce_eager": "true", "quantization": "fp8"}
    found = arguments(options=options)
    assert found["tensor_parallel_size"] == 2
    assert found["enforce_eager"] is True
    assert found["quantization"] == "fp8"


def test_an_option_of_vllm_that_no_flag_sets_wins() -> None:
    assert arguments(options={"max_logprobs": "5"})["max_logprobs"] == 5


@pytest.mark.parametrize("name", OURS)
def test_what_a_flag_sets_is_refused_with_the_flag(name: str) -> None:
    for spelled in (name, name.replace("_", "-")):
        with pytest.raises(ConfigError) as refusal:
            arguments(options={spelled: "1"})
        assert OURS[name].removeprefix("nothing: ") in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("tensor_paralel_size", "'tensor_parallel_size'"),
        ("quantisation", "'quantization'"),
        ("max_model_length", "'max_model_len'"),
    ],
)
def test_a_misspelled_option_is_refused_with_the_right_one(name: str, close: str) -> None:
    with pytest.raises(ConfigError, match="did you mean") as refusal:
        arguments(options={name: "1"})
    assert close in str(refusal.value)


@pytest.mark.parametrize("name", ["zzzzzz", "", "_private"])
def test_what_is_no_option_at_all_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="EngineArgs"):
        arguments(options={name: "1"})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        ("0.5", 0.5),
        ("true", True),
        ("True", True),
        ("False", False),
        ("null", None),
        ("None", None),
        ('{"factor": 2.0}', {"factor": 2.0}),
        ("[1, 2]", [1, 2]),
        ('"8"', "8"),
        ("fp8", "fp8"),
        ("{factor: 2}", "{factor: 2}"),
        ("", ""),
    ],
)
def test_values_are_json_or_text(text: str, value: object) -> None:
    found = parse_value(text)
    assert (type(found), found) == (type(value), value)


@given(st.text())
def test_every_text_has_a_value(text: str) -> None:
    parse_value(text)


def test_adapters_are_loaded_with_room_for_the_largest() -> None:
    found = arguments(loras=(adapter("a", 5), adapter("b", 17)))
    assert (found["enable_lora"], found["max_loras"], found["max_lora_rank"]) == (True, 3, 32)


@pytest.mark.parametrize(
    ("rank", "most"), [(0, 16), (1, 1), (2, 8), (8, 8), (9, 16), (257, 320), (512, 512)]
)
def test_ranks_are_rounded_up_to_what_vllm_takes(rank: int, most: int) -> None:
    assert rank_for(rank) == most


def test_a_rank_beyond_vllms_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="513"):
        rank_for(513)
