"""What workers promise for their tokens, and that ranks and torch's kernels keep it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import pdserve
from pdserve import accel
from pdserve.messages.request import SamplingParams
from pdserve_engines.torch.exactness import LOGITS_WITHIN, NEAR_TIE, token_promises
from pdserve_engines.torch.tensor_parallel.rank_model import RankModel
from tests.engines.torch.checkpoints import VOCAB, checkpoint
from tests.engines.torch.driver import Driver, loaded
from tests.engines.torch.tensor_parallel.thread_ranks import ranks_as_threads

if TYPE_CHECKING:
    from pdserve_engines.torch.executor import TorchExecutor

BUNDLED = Path(pdserve.__file__).parent / "bundled"
EVERY_ROW = SamplingParams(max_tokens=9, temperature=0.0, prompt_logprobs=0)
TORCH: dict[str, Any] = {"options": {"kernels": "torch"}}
PLAIN: dict[str, Any] = {
    "row_kernels": "",
    "dtype": "float32",
    "kv_cache_dtype": "auto",
    "experts": False,
    "ranks": 1,
    "matmul_precision": "highest",
}
NATIVE: dict[str, Any] = {"row_kernels": "native avx2"}
INVARIANT: dict[str, Any] = {"row_kernels": "invariant sm_90 triton 3.6.0 bfloat16"}


@pytest.mark.parametrize(
    ("changes", "promises"),
    [
        ({}, ["close:float32"]),
        ({"ranks": 2}, ["close:float32"]),
        ({"dtype": "bfloat16"}, []),
        ({"kv_cache_dtype": "fp8_e4m3"}, []),
        ({"matmul_precision": "high"}, []),
        ({"experts": True}, []),
        (NATIVE, ["exact:native avx2", "close:float32"]),
        (NATIVE | {"ranks": 2}, ["close:float32"]),
        (INVARIANT | {"dtype": "bfloat16"}, ["exact:invariant sm_90 triton 3.6.0 bfloat16"]),
        (
            INVARIANT | {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"},
            ["exact:invariant sm_90 triton 3.6.0 bfloat16"],
        ),
        (INVARIANT | {"dtype": "bfloat16", "ranks": 2}, []),
        (NATIVE | {"matmul_precision": "high"}, ["exact:native avx2", "close:float32"]),
        (NATIVE | {"experts": True}, ["exact:native avx2"]),
    ],
)
def test_a_promise_follows_from_how_a_worker_computes(
    changes: dict[str, Any], promises: list[str]
) -> None:
    assert list(token_promises(**PLAIN | changes)) == promises


def prompts_of(vocab: int) -> list[list[int]]:
    draw = random.Random(5)
    return [draw.choices(range(vocab), k=length) for length in (40, 23, 9)]


def logits(
    executor: TorchExecutor, prompts: list[list[int]], chunk: int = 11
) -> list[torch.Tensor]:
    """Logits after each token of prompts that are computed together, in the order in which they are
    computed."""
    model = executor._model
    assert model is not None
    found: list[torch.Tensor] = []
    compute = model.logits

    def note(hidden: torch.Tensor) -> torch.Tensor:
        rows = compute(hidden)
        if len(rows):
            found.append(rows.clone())
        return rows

    with mock.patch.object(model, "logits", note):
        driver = Driver(executor)
        driver.finish([driver.add(prompt, EVERY_ROW) for prompt in prompts], 1, chunk)
    executor.close()
    return found


def check_close(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    """What `CLOSE_PREFIX` says."""
    found, wanted = torch.cat(one), torch.cat(other)
    assert (found - wanted).abs().amax() <= LOGITS_WITHIN
    best = wanted.topk(2).values
    clear = best[:, 0] - best[:, 1] > NEAR_TIE
    assert clear.sum() > len(clear) // 2
    assert found.argmax(-1)[clear].equal(wanted.argmax(-1)[clear])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", ["bundled", "llama_biased"])
def test_ranks_are_close_to_one_rank(model: str, ranks: int) -> None:
    directory, vocab = (BUNDLED, 400) if model == "bundled" else (checkpoint(model)[0], VOCAB)
    wanted = logits(loaded(directory, **TORCH), prompts_of(vocab))
    with ranks_as_threads():
        found = logits(loaded(directory, tensor_parallel=ranks), prompts_of(vocab))
    check_close(found, wanted)


def test_a_rank_with_a_rougher_sum_is_found() -> None:
    """Sums in bfloat16 would be faster, and are not close any more."""
    project = RankModel._project

    def rough(self: RankModel, *arguments: Any) -> torch.Tensor:
        return project(self, *arguments).bfloat16().float()

    wanted = logits(loaded(BUNDLED, **TORCH), prompts_of(400))
    with ranks_as_threads(), mock.patch.object(RankModel, "_project", rough):
        found = logits(loaded(BUNDLED, tensor_parallel=2), prompts_of(400))
    with pytest.raises(AssertionError):
        check_close(found, wanted)


@pytest.mark.skipif(not accel.NATIVE, reason=accel.REASON)
def test_native_kernels_are_exact_and_close_to_those_of_torch() -> None:
    """Each prompt alone, and all in one step."""
    native: dict[str, Any] = {"options": {"kernels": "native"}}
    prompts = prompts_of(400)
    _, *together = logits(loaded(BUNDLED, **native), prompts, chunk=40)
    for prompt, rows in zip(prompts, together, strict=True):
        _, alone = logits(loaded(BUNDLED, **native), [prompt], chunk=40)
        assert alone.equal(rows)
    _, *others = logits(loaded(BUNDLED, **TORCH), prompts, chunk=40)
    check_close(together, others)
