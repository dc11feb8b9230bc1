"""MXFP4 against `transformers`, to the bit, and what rounding to it loses."""

from __future__ import annotations

import pytest
import torch

from pdserve_engines.torch.model_loader.mxfp4 import BLOCK, BLOCK_BYTES, dequantise
from tests.engines.torch.mxfp4 import quantise


def reference(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Of `transformers`, which wants a dimension for the experts and swaps the other two."""
    # Imports torch's compiler, which collecting the tests would take a second longer for.
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    made: torch.Tensor = _convert_moe_packed_tensors(blocks[None].clone(), scales[None].clone())
    return made[0].T


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int16)


def test_every_byte_at_every_scale_is_that_of_transformers() -> None:
    """Scale 255 is no number: neither is what it gives."""
    blocks = torch.arange(256, dtype=torch.uint8).repeat(255).view(255, -1, BLOCK_BYTES)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].repeat(1, blocks.shape[1])
    found = dequantise(blocks, scales)
    assert found.dtype == torch.bfloat16
    assert found.shape == (255, 512)
    assert torch.equal(bits(found), bits(reference(blocks, scales)))
    over = dequantise(blocks[:1], torch.full_like(scales[:1], 255))
    assert not torch.isfinite(over).any()


@pytest.mark.parametrize("shape", [(1, 32), (3, 64), (90, 160)])
def test_random_weights_are_those_of_transformers(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(shape[0])
    weights = torch.randn(shape, generator=generator) * 0.3
    blocks, scales = quantise(weights)
    assert blocks.shape == (shape[0], shape[1] // BLOCK, BLOCK_BYTES)
    found = dequantise(blocks, scales)
    assert torch.equal(bits(found), bits(reference(blocks, scales)))
    # The coarsest step, from 4 to 6, is a quarter of the block's power of two; values above 6 of
    # them are cut.
    largest = weights.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK).view(shape)
    assert ((found.float() - weights).abs() <= largest / 4 + 1e-9).all()


def test_what_mxfp4_can_say_comes_back_to_the_bit() -> None:
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    row = torch.cat((values, -values)).repeat(2)
    weights = torch.stack((row * 2**-20, row, row * 2**30))
    assert torch.equal(dequantise(*quantise(weights)).float(), weights)
