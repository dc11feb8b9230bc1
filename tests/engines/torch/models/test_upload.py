"""Index arrays arrive unchanged; the CPU copies nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pdserve_engines.torch.models.upload import upload, upload_packed


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


def test_packed_arrays_keep_their_shapes_and_are_aligned() -> None:
    shapes: list[tuple[int, ...]] = [(3,), (0,), (8,), (1,), (3, 2)]
    arrays = [np.arange(np.prod(shape), dtype=np.int32).reshape(shape) for shape in shapes]
    found = upload_packed(arrays, torch.device("cpu"))
    assert [tensor.tolist() for tensor in found] == [array.tolist() for array in arrays]
    assert all(tensor.storage_offset() % 4 == 0 for tensor in found)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1
