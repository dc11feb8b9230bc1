from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pdserve.errors import ConfigError
from pdserve_engines.torch.model_loader import weights
from pdserve_engines.torch.model_loader.config import read_config
from pdserve_engines.torch.tensor_parallel.shard import Shard, check_division
from tests.engines.torch.checkpoints import checkpoint

if TYPE_CHECKING:
    from pdserve_engines.torch.model_loader.config import ModelConfig
    from pdserve_engines.torch.model_loader.weights import Param


@pytest.fixture(scope="module")
def llama() -> ModelConfig:
    """4 heads, 2 KV heads of 12, an inner size of 72."""
    return read_config(checkpoint("llama_biased")[0])


def numbered(param: Param) -> list[torch.Tensor]:
    """Tensors of the parameter's parts in which every element differs."""
    tensors, first = [], 0
    for _, shape in param.parts:
        size = torch.Size(shape).numel()
        tensors.append(torch.arange(first, first + size).view(shape))
        first += size
    return tensors


def cut_all(config: ModelConfig, name: str, ranks: int) -> list[list[torch.Tensor]]:
    """The parts of each rank."""
    param = next(one for one in weights.params(config) if one.key.endswith(name))
    return [Shard(config, rank, ranks).cut(param, numbered(param))[1] for rank in range(ranks)]


@pytest.mark.parametrize("name", ["0.qkv", "0.qkv_bias", "0.gate_up", "0.gate_up_bias", "head"])
def test_rows_of_the_ranks_together_are_those_of_the_model(llama: ModelConfig, name: str) -> None:
    config = replace(llama, kv_heads=2, tied=False)
    param = next(one for one in weights.params(config) if one.key.endswith(name))
    for number, whole in enumerate(numbered(param)):
        assert torch.cat([parts[number] for parts in cut_all(config, name, 2)]).equal(whole)


@pytest.mark.parametrize("name", ["0.o", "0.down"])
def test_columns_of_the_ranks_together_are_those_of_the_model(
    llama: ModelConfig, name: str
) -> None:
    param = next(one for one in weights.params(llama) if one.key.endswith(name))
    (whole,) = numbered(param)
    assert torch.cat([part for (part,) in cut_all(llama, name, 4)], dim=1).equal(whole)


@pytest.mark.parametrize("name", ["embed", "0.attn_norm", "0.o_bias", "0.down_bias"])
def test_the_rest_is_whole_on_every_rank(llama: ModelConfig, name: str) -> None:
    param = next(one for one in weights.params(llama) if one.key.endswith(name))
    for (part,) in cut_all(llama, name, 2):
        assert part.equal(numbered(param)[0])


def test_a_fused_tensor_is_cut_like_separate_ones(llama: ModelConfig) -> None:
    config = replace(llama, kv_heads=2)
    fused = replace(config, fused_qkv=True, fused_gate_up=True)
    for name in ("0.qkv", "0.gate_up"):
        for ours, theirs in zip(cut_all(fused, name, 2), cut_all(config, name, 2), strict=True):
            assert all(one.equal(other) for one, other in zip(ours, theirs, strict=True))


def test_ranks_share_kv_heads_if_there_are_too_few(llama: ModelConfig) -> None:
    config = replace(llama, kv_heads=2)
    held = [Shard(config, rank, 4) for rank in range(4)]
    assert [list(shard.kv_heads) for shard in held] == [[0], [0], [1], [1]]
    assert all(shard.config.kv_heads == shard.config.num_heads == 1 for shard in held)
    # Two query heads use each KV head, and those of a rank use the one that it holds.
    assert all(shard.rank // config.groups == shard.kv_heads.start for shard in held)


def test_the_last_ranks_may_have_fewer_rows_of_the_vocabulary(llama: ModelConfig) -> None:
    config = replace(llama, vocab_size=9)
    found = [Shard(config, rank, 4).vocabulary for rank in range(4)]
    assert found == [range(3), range(3, 6), range(6, 9), range(9, 9)]


def test_parts_are_views_of_the_file(llama: ModelConfig) -> None:
    """So that only their pages are read."""
    for param in weights.params(llama):
        tensors = numbered(param)
        _, parts = Shard(llama, 1, 2).cut(param, tensors)
        homes = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        assert {part.untyped_storage().data_ptr() for part in parts} <= homes


@pytest.mark.parametrize(
    ("changes", "ranks", "reason"),
    [
        ({}, 3, "--tp 3: num_attention_heads 4 is no multiple of 3; possible for this model: 2, 4"),
        ({"intermediate_size": 70}, 4, "intermediate_size 70 is no multiple of 4"),
        (
            {"num_heads": 12, "kv_heads": 4},
            6,
            "6 ranks cannot hold num_key_value_heads 4 evenly; possible for this model: 2, 4, 12",
        ),
        ({"num_heads": 5, "kv_heads": 5}, 2, "possible for this model: none"),
        ({"whole_qk_norm": True}, 2, "models with a norm over all heads"),
        ({"sinks": True}, 2, "attention sinks"),
    ],
)
def test_an_impossible_division_is_refused_by_name(
    llama: ModelConfig, changes: dict[str, Any], ranks: int, reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_division(replace(llama, **changes), ranks)
    assert reason in caught.value.message
