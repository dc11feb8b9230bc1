"""When staging blocks go to vLLM's device, and how much room vLLM leaves there. Needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.errors import ConfigError
from pdserve.messages.transfer import RankKvLayout
from pdserve.transfer.copy_plan import block_bytes
from pdserve_engines.vllm.kv_transfer import device_staging
from pdserve_engines.vllm.kv_transfer.device_staging import (
    device_pool,
    keeping_room,
    kept_for_staging,
    room_for_staging,
    stages_on_device,
    tensor_of,
)

LAYOUT = RankKvLayout(content="c", layers=2, heads=4, tokens=4, dim=8, itemsize=2)


@pytest.mark.parametrize(
    ("device", "ranks", "executor", "backends", "there"),
    [
        ("cuda", 1, "uni", (), False),
        ("cuda", 1, "uni", ("tcp", "cuda_ipc"), True),
        ("cuda", 1, "uni", ("rdma", "shm"), False),
        ("cuda", 1, "mp", ("cuda_ipc",), False),
        ("cuda", 2, "mp", ("cuda_ipc",), False),
        ("cpu", 1, "uni", ("cuda_ipc",), False),
    ],
)
def test_one_rank_in_this_process_stages_on_its_device_if_asked_to(
    device: str, ranks: int, executor: str, backends: tuple[str, ...], there: bool
):
    parallel = SimpleNamespace(world_size=ranks, distributed_executor_backend=executor)
    config = SimpleNamespace(
        parallel_config=parallel, device_config=SimpleNamespace(device_type=device)
    )
    assert stages_on_device(config, backends) is there


@pytest.mark.parametrize(
    ("free", "whole", "unfilled", "room"),
    [
        (1300, 10, 0.3, 300),
        (1300, 200, 0.3, 400),
        (1300, 1000, 0.3, 433),
        (1300, 10, 0.0, 20),
        (0, 10, 0.3, 0),
    ],
)
def test_room_is_a_share_and_two_sequences_within_a_third(
    free: int, whole: int, unfilled: float, room: int
):
    assert room_for_staging(free, whole, unfilled) == room


class Executor:
    """vLLM's, as far as it is asked for memory."""

    def __init__(self, config: Any) -> None:
        self.vllm_config = config

    def determine_available_memory(self) -> list[int]:
        return [13_000]

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        spec = SimpleNamespace(page_size_bytes=100, block_size=16)
        return [{"one": spec, "two": spec}]


@pytest.mark.parametrize(("tokens", "kept"), [(16, 3000), (129, 3600), (10_000, 4333)])
def test_vllm_is_told_of_less_memory(tokens: int, kept: int):
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=tokens))
    executor = keeping_room(Executor, 0.3)(config)
    assert executor.determine_available_memory() == [13_000 - kept]
    assert kept_for_staging(SimpleNamespace(model_executor=executor)) == kept


def test_others_have_kept_nothing():
    assert kept_for_staging(SimpleNamespace(model_executor=Executor(None))) == 0


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its CPU stands for the device."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(device_staging, "_device", lambda: torch.device("cpu"))
    return torch


def test_memory_is_zeroed_and_forgotten_when_it_is_closed(
    torch: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(device_staging, "_unsupported", lambda region: "")
    pool = device_pool(LAYOUT, 6)
    tensor = tensor_of(pool.handle())
    assert tensor.nbytes == pool.region.size
    assert not tensor.any()
    pool.close()
    assert not device_staging._TENSORS


def test_memory_that_no_peer_can_open_is_freed(torch: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_staging, "_unsupported", lambda region: "not exported")
    with pytest.raises(ConfigError, match="not exported"):
        device_pool(LAYOUT, 6)
    assert not device_staging._TENSORS


def test_a_full_device_is_told_in_blocks(torch: Any, monkeypatch: pytest.MonkeyPatch):
    def zeros(size: int, **kwargs: Any) -> Any:
        assert size == 6 * block_bytes(LAYOUT)
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(ConfigError, match="no room for 6 staging blocks"):
        device_pool(LAYOUT, 6)
