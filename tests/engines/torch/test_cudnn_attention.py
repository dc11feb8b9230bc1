"""The process-wide switch is off exactly while an engine holds it off."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from torch.backends import cuda

from pdserve_engines.torch.cudnn_attention import CudnnAttentionOff

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True, params=[True, False])
def before(request: pytest.FixtureRequest) -> Iterator[bool]:
    """The switch as another part of the process has set it."""
    found = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(request.param)
    yield request.param
    cuda.enable_cudnn_sdp(found)


def test_it_is_off_until_the_last_engine_releases_it(before: bool) -> None:
    first, second = CudnnAttentionOff(), CudnnAttentionOff()
    assert cuda.cudnn_sdp_enabled() == before
    first.hold()
    second.hold()
    assert not cuda.cudnn_sdp_enabled()
    first.release()
    assert not cuda.cudnn_sdp_enabled()
    second.release()
    assert cuda.cudnn_sdp_enabled() == before


def test_an_engine_counts_once(before: bool) -> None:
    first, second = CudnnAttentionOff(), CudnnAttentionOff()
    for _ in range(2):
        first.hold()
    second.hold()
    for _ in range(3):
        second.release()
    assert not cuda.cudnn_sdp_enabled()
    first.release()
    assert cuda.cudnn_sdp_enabled() == before


def test_a_release_without_hold_changes_nothing(before: bool) -> None:
    CudnnAttentionOff().release()
    assert cuda.cudnn_sdp_enabled() == before


def test_other_kinds_of_attention_stay_as_they_are() -> None:
    held = CudnnAttentionOff()
    others = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled)
    found = [each() for each in others]
    held.hold()
    assert [each() for each in others] == found
    held.release()
