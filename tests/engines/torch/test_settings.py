"""Decisions about device, dtype, threads and limits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from pdserve.errors import ConfigError
from pdserve_engines.torch.model_loader.config import parse_config
from pdserve_engines.torch.settings import (
    async_option,
    choose_device,
    choose_dtype,
    choose_threads,
    resolve_settings,
)
from tests.engines.torch.driver import spec
from tests.engines.torch.model_loader.test_config import LLAMA, MISTRAL

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("name", "stored", "device", "expected"),
    [
        ("auto", "bfloat16", CPU, torch.float32),
        ("auto", "bfloat16", CUDA, torch.bfloat16),
        ("auto", "float16", CUDA, torch.bfloat16),
        ("auto", None, CUDA, torch.bfloat16),
        ("auto", "float32", CUDA, torch.float32),
        ("bfloat16", "float32", CPU, torch.bfloat16),
        ("float32", "bfloat16", CUDA, torch.float32),
    ],
)
def test_auto_dtype_is_float32_on_the_cpu_and_the_checkpoints_elsewhere(
    name: str, stored: str | None, device: torch.device, expected: torch.dtype
) -> None:
    assert choose_dtype(name, stored, device) == expected


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="'float16' is not supported"):
        choose_dtype("float16", None, CPU)


def test_auto_takes_cuda_exactly_if_it_works() -> None:
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["cuda:99", "mps", "abacus"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"device '{name}'"):
        choose_device(name)


def test_few_threads_compute_beside_a_gpu() -> None:
    assert choose_threads(16, torch.device("cpu")) == 16
    assert choose_threads(16, torch.device("cuda")) == 2
    assert choose_threads(1, torch.device("cuda")) == 1


def test_a_spec_without_wishes_gets_the_machines_threads_and_the_checkpoints_limit() -> None:
    settings = resolve_settings(spec(Path("x"), threads=0), parse_config(LLAMA))
    assert settings.threads == len(os.sched_getaffinity(0))
    assert settings.max_model_len == 512


def test_a_length_over_the_checkpoints_is_refused() -> None:
    with pytest.raises(ConfigError, match="600 is over the checkpoint's limit of 512"):
        resolve_settings(spec(Path("x"), max_model_len=600), parse_config(LLAMA))


def test_a_window_does_not_limit_the_length() -> None:
    config = parse_config(MISTRAL | {"sliding_window": 64})
    assert resolve_settings(spec(Path("x")), config).max_model_len == 512


@pytest.mark.parametrize(
    ("value", "device", "ranks", "expected"),
    [
        ("auto", CPU, 1, False),
        ("auto", CUDA, 1, True),
        ("auto", CPU, 2, False),
        ("on", CPU, 1, True),
        ("off", CUDA, 1, False),
    ],
)
def test_steps_are_begun_ahead_where_a_device_computes_beside_the_host(
    value: str, device: torch.device, ranks: int, expected: bool
) -> None:
    assert async_option({"async_scheduling": value}, device, ranks) == expected


def test_steps_cannot_be_begun_ahead_by_ranks_or_by_words_of_ones_own() -> None:
    with pytest.raises(ConfigError, match="--tp 2: ranks take one step at a time"):
        async_option({"async_scheduling": "on"}, CPU, 2)
    with pytest.raises(ConfigError, match="give auto, on or off"):
        async_option({"async_scheduling": "maybe"}, CPU, 1)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ("auto", torch.bfloat16),
        ("fp8_e4m3", torch.float8_e4m3fn),
        ("fp8", torch.float8_e4m3fn),  # vLLM's other name for it
    ],
)
def test_kv_may_have_a_dtype_of_its_own(value: str, dtype: torch.dtype) -> None:
    wanted = spec(Path("m"), dtype="bfloat16", options={"kv_cache_dtype": value})
    settings = resolve_settings(wanted, parse_config(LLAMA))
    assert (settings.dtype, settings.kv_dtype) == (torch.bfloat16, dtype)


def test_other_kinds_of_kv_are_refused_by_name() -> None:
    config = parse_config(LLAMA)
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8_e5m2': give auto or fp8_e4m3"):
        resolve_settings(spec(Path("m"), options={"kv_cache_dtype": "fp8_e5m2"}), config)
    ranks = spec(Path("m"), options={"kv_cache_dtype": "fp8"}, tensor_parallel=2)
    with pytest.raises(ConfigError, match="--tp 2: KV in FP8 works with one rank only"):
        resolve_settings(ranks, config)


def test_ranks_have_no_cuda_graphs() -> None:
    wanted = spec(Path("m"), options={"cuda_graphs": "on"}, tensor_parallel=2)
    with pytest.raises(ConfigError, match="--tp 2: CUDA graphs do not hold what ranks add up"):
        resolve_settings(wanted, parse_config(LLAMA))


def test_ranks_on_gpus_begin_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    config = parse_config(LLAMA)
    settings = resolve_settings(spec(Path("m"), device="cuda", tensor_parallel=2), config)
    assert (settings.device, settings.async_scheduling) == (torch.device("cuda:0"), False)
    with pytest.raises(ConfigError, match=r"2 are visible .CUDA_VISIBLE_DEVICES=3,5"):
        resolve_settings(spec(Path("m"), device="cuda", tensor_parallel=4), config)
