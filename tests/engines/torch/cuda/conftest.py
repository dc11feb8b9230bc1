"""Where kernels run in tests: by Triton's interpreter, and compiled on a GPU if there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("triton", reason="no Triton here")

from tests.engines.torch.cuda.interpreted import interpreted

ON_GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ],
)


@pytest.fixture(params=["cpu", ON_GPU])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Kernels run on this device's tensors."""
    if request.param == "cuda":
        yield torch.device("cuda")
        return
    with interpreted():
        yield torch.device("cpu")
