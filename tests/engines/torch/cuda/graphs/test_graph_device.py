"""Real CUDA graphs where there is a GPU; elsewhere what torch is told when a capture breaks."""

from __future__ import annotations

import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdserve.messages.request import SamplingParams
from pdserve_engines.torch.cuda.graphs import graph_device
from pdserve_engines.torch.cuda.graphs.graph_device import CudaGraphDevice
from tests.engines.torch.checkpoints import VOCAB, checkpoint
from tests.engines.torch.driver import Driver, loaded


def on_gpu(test: Any) -> Any:
    skips = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    # A model's kernels are compiled at its first load.
    return pytest.mark.gpu(pytest.mark.timeout(240)(skips(test)))


class PlayedTorch:
    """What torch does around a capture. It counts captures that it does not see end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way = 0
        self.pools = 0
        self.graphs: list[PlayedGraph] = []
        self.breaks = False
        monkeypatch.setattr(graph_device, "_BROKEN", [])
        stream = SimpleNamespace(
            device_index=0, wait_stream=lambda other: None, synchronize=lambda: None
        )
        for name, value in {
            "Stream": lambda device: stream,
            "current_stream": lambda device: stream,
            "stream": lambda stream: nullcontext(),
            "graph_pool_handle": lambda: (0, 1),
            "CUDAGraph": lambda: PlayedGraph(self),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        for name, value in {
            "_cuda_endAllocateToPool": self.end,
            "_cuda_releasePool": self.release,
        }.items():
            monkeypatch.setattr(torch._C, name, value, raising=False)

    def end(self, device: int, pool: tuple[int, int]) -> None:
        if not self.under_way:
            raise RuntimeError("not currently recording to mempool_id")
        self.under_way -= 1

    def release(self, device: int, pool: tuple[int, int]) -> None:
        self.pools -= 1


class PlayedGraph:
    """As in torch, a capture that CUDA has broken off neither ends nor frees its pool."""

    def __init__(self, torch: PlayedTorch) -> None:
        self._torch = torch
        self.ended = False
        torch.graphs.append(self)

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self._torch.under_way += 1
        self._torch.pools += 1

    def capture_end(self) -> None:
        if self._torch.breaks:
            raise RuntimeError("CUDA error: operation failed due to a previous error")
        self._torch.under_way -= 1
        self.ended = True

    def reset(self) -> None:
        self._torch.pools -= self.ended
        self.ended = False


def test_a_capture_that_cuda_breaks_off_is_over_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedTorch(monkeypatch)
    graphs = CudaGraphDevice(torch.device("cuda"))
    given = torch.ones(2)
    graphs.capture(lambda: given)

    def breaks() -> torch.Tensor:
        if played.under_way:
            played.breaks = True
            raise RuntimeError("not permitted when stream is capturing")
        return given

    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.capture(breaks)
    assert played.under_way == 0
    kept: list[Any] = list(graph_device._BROKEN)
    assert kept == [played.graphs[1]], "torch has kept a pointer to it"
    graphs.close()
    assert played.pools == 0


def test_a_capture_that_cannot_be_instantiated_frees_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = PlayedTorch(monkeypatch)
    whole = PlayedGraph.capture_end

    def ends(graph: PlayedGraph) -> None:
        whole(graph)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(PlayedGraph, "capture_end", ends)
    graphs = CudaGraphDevice(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="out of memory"):
        graphs.capture(lambda: torch.ones(2))
    assert (played.under_way, played.pools) == (0, 0)


@on_gpu
def test_a_replay_reads_what_is_in_its_inputs_now() -> None:
    device = torch.device("cuda")
    graphs = CudaGraphDevice(device)
    given = torch.ones(3, device=device)
    first = graphs.capture(lambda: given * 2 + 1)
    second = graphs.capture(lambda: given * given)
    given.fill_(5)
    first.replay()
    assert first.result.tolist() == [11] * 3
    second.replay()
    assert second.result.tolist() == [25] * 3
    graphs.close()
    graphs.close()


@on_gpu
def test_an_error_within_a_capture_leaves_the_stream_usable() -> None:
    device = torch.device("cuda")
    graphs = CudaGraphDevice(device)
    given = torch.ones(3, device=device)
    with pytest.raises(RuntimeError):
        graphs.capture(lambda: torch.full((1,), given.sum().item(), device=device))
    assert (given * 2).tolist() == [2] * 3
    graphs.close()
    # Torch gives memory back again, which it does not while it counts a capture as under way.
    held = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    before = torch.cuda.memory_reserved(device)
    del held
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(device) <= before - (64 << 20)


@on_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ahead", ["off", "on"])
def test_tokens_with_graphs_are_those_without(dtype: str, ahead: str) -> None:
    """Batches of every size up to twelve, since the sequences end one after the other."""
    found: list[Any] = []
    for mode in ("off", "on"):
        executor = loaded(
            checkpoint("llama")[0],
            device="cuda",
            dtype=dtype,
            max_sequences=12,
            options={"cuda_graphs": mode, "kernels": "triton", "async_scheduling": ahead},
        )
        driver = Driver(executor)
        ways = (
            SamplingParams(max_tokens=99, temperature=0.0),
            SamplingParams(max_tokens=99, seed=3, top_k=9),
        )
        sequences = [
            driver.add(random.Random(row).choices(range(VOCAB), k=9), ways[row % 2])
            for row in range(12)
        ]
        for row, one in enumerate(sequences):
            driver.finish(sequences[row:], one.num_output + 2)
        found.append([one.output for one in sequences])
        if mode == "on":
            assert executor._graphs is not None
            assert executor._graphs.replays > 12
        executor.close()
    # Rounded to bfloat16, a product of another number of rows may choose another of two near ties.
    same = sum(a == b for a, b in zip(*found, strict=True))
    assert same == 12 if dtype == "float32" else same >= 9
