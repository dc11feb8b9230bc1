"""The distribution of an engine's next token, over the whole vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pdserve.messages.request import SamplingParams
from tests.engines.torch.driver import Driver, loaded

if TYPE_CHECKING:
    from pathlib import Path


def full_logprobs(directory: Path, prompt: list[int], **fields: Any) -> torch.Tensor:
    """`[vocab]`: logprobs after `prompt`, computed in two chunks; `fields` are of the spec."""
    executor = loaded(directory, **fields)
    try:
        assert executor.info is not None
        size = executor.info.vocab_size
        sampling = SamplingParams(max_tokens=9, temperature=0.0, logprobs=size)
        driver = Driver(executor)
        record = driver.logprobs(driver.add(prompt, sampling), chunk=len(prompt) * 2 // 3)
        found = torch.zeros(size)
        for token, logprob in record.top:
            found[token] = logprob
        return found
    finally:
        executor.close()
