"""A batch begins where kernels expect it, and is copied only if it does not."""

from __future__ import annotations

import torch

from pdserve_engines.torch.cuda.invariant.alignment import aligned


def test_only_what_is_elsewhere_is_copied() -> None:
    x = torch.arange(64, dtype=torch.float32)
    assert aligned(x).data_ptr() == x.data_ptr()
    assert aligned(x[4:]).data_ptr() == x[4:].data_ptr()
    for moved in (x[1:], x.view(8, 8)[:, 3], x.view(8, 8).T):
        found = aligned(moved)
        assert torch.equal(found, moved)
        assert found.is_contiguous()
        assert found.data_ptr() % 16 == 0
