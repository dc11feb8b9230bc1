"""Index arrays arrive unchanged; the CPU copies nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pdserve_engines.torch.models.upload import upload


def test_the_cpu_shares_the_memory() -> None:
    array = np.arange(5, dtype=np.int32)
    tensor = upload(array, torch.device("cpu"))
    array[0] = 9
    assert tensor.tolist() == [9, 1, 2, 3, 4]
    assert tensor.dtype == torch.int32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_a_device_gets_the_numbers_though_the_array_goes_at_once(count: int) -> None:
    device = torch.device("cuda")
    tensors = [upload(np.full(count, number, np.int64), device) for number in range(20)]
    assert [set(tensor.tolist()) for tensor in tensors] == [
        {number} if count else set() for number in range(20)
    ]
    assert all(tensor.device.type == "cuda" for tensor in tensors)
