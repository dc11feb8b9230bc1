"""The suite of engines over the real vLLM, and what ends with its process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

import pdserve
from pdserve.engine.client import CoreClient
from pdserve.errors import ConfigError
from pdserve.testing.sinks import CheckingSink
from pdserve.testing.thread_launcher import ThreadLauncher
from tests.engines.vllm import real
from tests.engines.vllm.suite import VllmConformance

if TYPE_CHECKING:
    from pdserve.engine.port import Engine

real.require_vllm()
pytestmark = real.MARKS
engines_of_this_file = real.keeps(real.MAIN)


def test_the_checkout_is_what_is_tested() -> None:
    assert Path(pdserve.__file__).parents[1] == Path(__file__).parents[3]


class TestVllm(VllmConformance):
    prompt = (17, 42, 8)

    def make_engine(self) -> Engine:
        return CoreClient(real.MAIN, make_launcher=ThreadLauncher)


# ------------------------------------------------------------------ in a process of its own


LATER = [pytest.mark.slow, pytest.mark.long]


def in_a_process(**options: str) -> CoreClient:
    """The engine as a worker runs it."""
    spec = msgspec.structs.replace(real.MAIN, engine="vllm", options=real.MAIN.options | options)
    return CoreClient(spec)


async def test_a_process_of_its_own_answers_alike() -> None:
    """vLLM, its worker process and its shared memory end with it; the leak checks see to that."""
    engine = in_a_process()
    await engine.start()
    try:
        ledger = await CheckingSink(engine, real.request(max_tokens=12)).wait()
        assert ledger.error is None
    finally:
        await engine.stop()
    with real.inline() as inline:
        assert real.answer(inline, max_tokens=12) == ledger.tokens


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("tensor_paralel_size", "1", "did you mean 'tensor_parallel_size'"),
        pytest.param("max_model_len", "64", "--max-model-len", marks=LATER),
        pytest.param("quantization", "no-such-kind", "no-such-kind", marks=LATER),
    ],
)
async def test_an_option_that_vllm_does_not_have_ends_the_start(
    name: str, value: str, said: str
) -> None:
    engine = in_a_process(**{name: value})
    with pytest.raises(ConfigError) as refusal:
        await engine.start()
    assert said in str(refusal.value)
    await engine.stop()


@pytest.mark.slow
@pytest.mark.long
async def test_a_block_size_that_the_device_cannot_compute_says_so() -> None:
    """The error comes from vLLM's worker process."""
    spec = msgspec.structs.replace(real.MAIN, engine="vllm", block_size=16)
    engine = CoreClient(spec)
    with pytest.raises(ConfigError, match="block size"):
        await engine.start()
    await engine.stop()
