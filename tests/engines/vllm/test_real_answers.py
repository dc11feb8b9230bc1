"""Greedy answers through pdserve equal those of vLLM alone, for random models of three families.

vLLM alone runs in a process of its own, by its class `LLM`. The weights are drawn until the two
best logits of every step differ enough for rounding to decide nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.engines.vllm import models, real

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.messages.engine import EngineSpec

real.require_vllm()
pytestmark = real.MARKS

COUNT, GAP, NEAR = 16, 1e-2, 1e-3
SEEDS = 400
"""Draws of weights at most; about one in twenty has no close step."""
PROMPTS = [list(range(20 + i, 40 + 3 * i)) for i in range(8)]
ALONE = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    wanted = json.load(sys.stdin)
    llm = LLM(wanted["model"], dtype="float32", max_model_len=192, enforce_eager=True,
              num_gpu_blocks_override=41, max_num_seqs=12, skip_tokenizer_init=True,
              kv_cache_memory_bytes=64 << 20)
    params = SamplingParams(max_tokens=wanted["count"], temperature=0, ignore_eos=True,
                            detokenize=False)
    answers = [list(llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
                    .outputs[0].token_ids) for prompt in wanted["prompts"]]
    json.dump(answers, open(sys.argv[1], "w"))
"""


@cache
def drawn(family: str) -> tuple[Path, list[list[int]], list[list[float]]]:
    """(directory, answers and gaps by transformers) of weights whose first answer is clear."""
    for seed in range(SEEDS):
        model = models.random_model(family, seed)
        output, gaps = models.greedy(model, PROMPTS[0], COUNT)
        if min(gaps) > GAP and len(set(output)) > COUNT // 2:
            directory, saved = models.checkpoint(family, seed)
            rest = [models.greedy(saved, prompt, COUNT) for prompt in PROMPTS[1:]]
            return directory, [output, *(o for o, _ in rest)], [gaps, *(g for _, g in rest)]
    raise AssertionError("no weights without a near tie")


def spec_of(family: str) -> EngineSpec:
    return msgspec.structs.replace(real.MAIN, model=str(drawn(family)[0]))


def until_near(gaps: list[float]) -> int:
    """Steps before the first one that rounding may decide."""
    return next((at for at, gap in enumerate(gaps) if gap < NEAR), len(gaps))


PARAMS = [
    pytest.param(name, marks=[pytest.mark.slow, pytest.mark.long] if name == "Qwen3" else [])
    for name in models.FAMILIES
]
"""Each family loads an engine; every run has the plainest and the one with windows."""


@pytest.fixture(scope="module", params=PARAMS)
def family(request: pytest.FixtureRequest, engines: None) -> str:
    """Its engine is loaded before the test looks for leaks."""
    real.loaded(spec_of(request.param))
    return str(request.param)


def answers_alone(family: str, tmp_path: Path) -> list[list[int]]:
    """Of vLLM without pdserve, one prompt at a time."""
    script, result = tmp_path / "alone.py", tmp_path / "answers.json"
    script.write_text(ALONE)
    wanted = {"model": str(drawn(family)[0]), "prompts": PROMPTS, "count": COUNT}
    done = subprocess.run(
        [sys.executable, script, result],
        input=json.dumps(wanted).encode(),
        capture_output=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr.decode()[-6000:]
    found: list[list[int]] = json.loads(result.read_text())
    return found


@pytest.mark.slow
@pytest.mark.long
def test_one_at_a_time_as_vllm_alone(family: str, tmp_path: Path) -> None:
    expected = answers_alone(family, tmp_path)
    _, theirs, gaps = drawn(family)
    assert expected[0] == theirs[0], "vLLM and transformers differ where nothing is close"
    with real.inline(spec_of(family)) as engine:
        for prompt, output, gap in zip(PROMPTS, expected, gaps, strict=True):
            ((found,),) = engine.generate([real.request(prompt, max_tokens=COUNT)])
            assert found[: until_near(gap)] == output[: until_near(gap)]


def test_as_transformers_alone_and_in_eight_streams(family: str) -> None:
    _, expected, gaps = drawn(family)
    requests = [real.request(prompt, max_tokens=COUNT) for prompt in PROMPTS]
    with real.inline(spec_of(family)) as engine:
        alone = engine.generate(requests[:1])
        assert alone[0][0] == expected[0]
        for _ in range(2):  # the second time with cached beginnings
            together: Any = engine.generate(requests)
            for (found,), output, gap in zip(together, expected, gaps, strict=True):
                assert found[: until_near(gap)] == output[: until_near(gap)]


def test_routers_hear_of_each_family(family: str) -> None:
    """Also of a model whose layers have several groups of blocks, some of them windows."""
    with real.inline(spec_of(family)) as engine:
        prompt = list(range(20, 20 + 4 * real.BLOCK + 1))
        for expected in (0, 4):
            ledger = engine.submit(real.request(prompt, max_tokens=1))
            engine.run()
            assert ledger.finishes[0] is not None
            assert ledger.finishes[0].cached_tokens == expected * real.BLOCK
        stored = [h for event in engine.kv_events for h in getattr(event, "hashes", [])]
        assert len(stored) == 4
