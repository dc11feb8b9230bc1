"""Which device each rank computes on."""

from __future__ import annotations

import pytest
import torch

from pdserve.errors import ConfigError
from pdserve_engines.torch.kv_budget import AvailableMemory
from pdserve_engines.torch.tensor_parallel.placement import place_ranks, smallest_room


def test_each_rank_has_a_gpu_of_its_own() -> None:
    found = place_ranks(torch.device("cuda"), 3, 4)
    assert [str(device) for device in found.devices] == ["cuda:0", "cuda:1", "cuda:2"]
    assert (found.collectives, found.sharers) == ("nccl", 1)


def test_a_gpu_that_is_named_is_shared_without_nccl() -> None:
    found = place_ranks(torch.device("cuda:1"), 2, 2)
    assert [str(device) for device in found.devices] == ["cuda:1", "cuda:1"]
    assert (found.collectives, found.sharers) == ("gloo", 2)


def test_ranks_on_cpus_share_the_host() -> None:
    found = place_ranks(torch.device("cpu"), 4, 0)
    assert {str(device) for device in found.devices} == {"cpu"}
    assert found.collectives == "gloo"


def test_one_rank_takes_the_device_as_it_was_given() -> None:
    assert place_ranks(torch.device("cuda"), 1, 8).devices == (torch.device("cuda"),)


def test_too_few_gpus_are_named() -> None:
    expected = r"--tp 4: .* 2 are visible \(CUDA_VISIBLE_DEVICES=4,5\); lower --tp"
    with pytest.raises(ConfigError, match=expected):
        place_ranks(torch.device("cuda"), 4, 2, "4,5")
    with pytest.raises(ConfigError, match="and 1 are visible; lower --tp"):
        place_ranks(torch.device("cuda"), 2, 1)


def test_the_fullest_gpu_limits_all_ranks() -> None:
    rooms = [AvailableMemory(free, f"cuda:{rank}", 100) for rank, free in enumerate((9, 5, 7))]
    assert smallest_room(rooms).limit == "cuda:1"
