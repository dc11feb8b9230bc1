"""What ranks add up: through host memory where tensors are on a GPU, and never without a deadline.

NCCL is played here; gloo is real."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch import distributed

from pdserve.errors import ConfigError
from pdserve_engines.torch.tensor_parallel import collectives
from pdserve_engines.torch.tensor_parallel.collectives import GlooGroup, NcclGroup, join_group
from pdserve_engines.torch.tensor_parallel.placement import place_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

RANKS = 2
CPU = torch.device("cpu")


@pytest.fixture
def store() -> Iterator[int]:
    fd = os.memfd_create("store", os.MFD_CLOEXEC)
    yield fd
    os.close(fd)


def in_threads(work: Any) -> list[Any]:
    """The results of all ranks."""
    results: list[Any] = [None] * RANKS

    def run(rank: int) -> None:
        results[rank] = work(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


@pytest.mark.parametrize("elsewhere", [False, True])
def test_operations_change_the_callers_tensor(store: int, elsewhere: bool) -> None:
    """`elsewhere`: as on a GPU, gloo gets a copy."""

    def work(rank: int) -> tuple[list[float], list[float], list[list[float]]]:
        group = join_group(place_ranks(CPU, RANKS, 0), store, rank, 10.0)
        total, told = torch.full((3,), rank + 1.0), torch.full((2,), float(rank))
        group.all_reduce(total)
        group.broadcast(told)
        parts = [part.tolist() for part in group.gather(torch.full((1,), float(rank)))]
        group.barrier()
        group.close()
        group.close()
        return total.tolist(), told.tolist(), parts

    copied = torch.Tensor.clone if elsewhere else collectives._in_host_memory
    with mock.patch.object(collectives, "_in_host_memory", copied):
        first, second = in_threads(work)
    assert first == ([3.0] * 3, [0.0] * 2, [[0.0], [1.0]])
    assert second == ([3.0] * 3, [0.0] * 2, [])


def test_a_rank_that_does_not_come_is_not_waited_for(store: int) -> None:
    with pytest.raises(RuntimeError):
        GlooGroup(store, 0, RANKS, 0.3)


class PlayedNccl:
    """A `ProcessGroupNCCL`; the first `waits` looks at an operation find it under way."""

    waits = 0

    class Options:
        _timeout: Any = None

    def __init__(self, _store: Any, rank: int, ranks: int, options: Any) -> None:
        self.place, self.options = (rank, ranks), options
        self.aborted = 0
        type(self).last = self

    last: PlayedNccl

    def allreduce(self, tensors: list[torch.Tensor]) -> PlayedNccl:
        tensors[0].mul_(2)
        return self

    def is_completed(self) -> bool:
        type(self).waits -= 1
        return self.waits < 0

    def wait(self) -> None:
        return

    def abort(self) -> None:
        self.aborted += 1


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[PlayedNccl]:
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", PlayedNccl, raising=False)
    monkeypatch.setattr(PlayedNccl, "waits", 2)
    return PlayedNccl


def test_nccl_waits_for_no_rank_longer_than_the_patience(
    store: int, nccl: type[PlayedNccl]
) -> None:
    group = NcclGroup(store, 1, RANKS, 4.0, CPU)
    assert nccl.last.place == (1, RANKS)
    assert nccl.last.options._timeout.total_seconds() == 4.0
    number = torch.ones(1)
    group.all_reduce(number)
    assert number.item() == 2.0
    group.close()
    group.close()
    assert nccl.last.aborted == 1


def test_ranks_that_nccl_cannot_connect_are_given_up(
    store: int, nccl: type[PlayedNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "_CONNECT", 0.05)
    monkeypatch.setattr(nccl, "waits", 1_000_000)
    with pytest.raises(RuntimeError, match=r"not connected all ranks within 0\.05 s"):
        NcclGroup(store, 0, RANKS, 0.01, CPU)
    assert nccl.last.aborted == 1


def test_a_torch_without_nccl_is_named(store: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(distributed, "ProcessGroupNCCL", raising=False)
    with pytest.raises(ConfigError, match="needs NCCL, which this torch does not have"):
        join_group(place_ranks(torch.device("cuda"), RANKS, RANKS), store, 0, 1.0)
