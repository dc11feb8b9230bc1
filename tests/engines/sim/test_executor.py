"""What workers compare before they serve one model."""

from __future__ import annotations

from pdserve.engine_core.executor import KvBlockShape
from pdserve_engines.sim.executor import _compat_text


def test_workers_of_the_release_before_find_the_same_text():
    text = _compat_text(KvBlockShape(1, 1, 16, 2, 4))
    assert text == "KvLayout(num_layers=1, kv_heads=1, block_size=16, head_dim=2, itemsize=4)"
