"""`bench/gpu/run.sh` runs where there is no accelerator, and its numbers follow from what they say.

Its measurements are not looked at: only that they are made, and of what.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu import engine, limits, needs, shapes

ROOT = Path(__file__).parents[2]


def run(out: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The script as a person calls it."""
    environment = os.environ | {"OUT": str(out), "PYTHON": sys.executable} | environ
    return subprocess.run(
        [ROOT / "bench/gpu/run.sh", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.timeout(300)
def test_a_dry_run_measures_everything_and_writes_it_down(tmp_path: Path) -> None:
    done = run(tmp_path, "--dry")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    plan = engine.DRY
    decodes = [f"decode {b} × {c}" for c in plan.contexts for b in plan.batches]
    assert [row["what"] for row in report["rows"]] == [
        *decodes,
        *(f"prefill {tokens}" for tokens in plan.prompts),
    ]
    assert all(row["seconds"] > 0 and row["rate"] > 0 and row["used"] > 0 for row in report["rows"])
    assert report["left_out"] == []
    assert report["limits"]["bandwidth"] > 0
    assert report["limits"]["matmul"] > 0
    assert "the numbers mean nothing" in (tmp_path / "gpu.md").read_text()
    assert "tests/engines/torch/test_cuda.py" in done.stdout


@pytest.mark.long
@pytest.mark.timeout(300)
def test_what_is_missing_is_named_and_the_rest_is_measured(tmp_path: Path) -> None:
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub/msgspec.py").write_text("raise ImportError('not here')")
    done = run(tmp_path / "out", "--dry", PYTHONPATH=str(tmp_path / "stub"))
    assert done.returncode == 1
    assert "missing for the engine: msgspec (ImportError: not here)" in done.stdout
    report = json.loads((tmp_path / "out/gpu.json").read_text())
    assert report["limits"]["bandwidth"] > 0


def test_an_unknown_word_explains_the_script(tmp_path: Path) -> None:
    done = run(tmp_path, "--fast")
    assert done.returncode == 2
    assert "--dry" in done.stderr


def test_everything_that_the_engine_imports_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert needs.missing("engine") == {}
    monkeypatch.setitem(needs.NEEDS, "engine", ("torch", "no_such_package"))
    assert list(needs.missing("engine")) == ["no_such_package"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_models_have_the_sizes_of_their_namesakes(name: str, parameters: int) -> None:
    shape = shapes.SHAPES[name]
    sizes = dict(shapes._tensors(shape))
    assert sum(map(math.prod, sizes.values())) == parameters
    norms = sum(math.prod(size) for size in sizes.values() if len(size) == 1)
    table = 0 if shape.tied else shape.vocab * shape.hidden
    assert shape.step_parameters == parameters - norms - table


def test_a_large_models_file_takes_no_room(tmp_path: Path) -> None:
    shapes.write(shapes.SHAPES["llama-3.1-8b"], tmp_path)
    size = (tmp_path / "model.safetensors").stat()
    assert size.st_size > 16 * 10**9
    assert size.st_blocks * 512 < 10**6


def test_a_prefill_does_what_its_tokens_need() -> None:
    shape = shapes.SHAPES["tiny"]
    one, two = shape.prefill_operations(1), shape.prefill_operations(2)
    head = 2 * shape.hidden * shape.vocab
    attention = 4 * shape.heads * shape.head_dim * shape.layers
    assert one == 2 * shape.layers * shape.layer_parameters + attention + head
    assert two - one == one - head + attention


def test_what_there_is_no_time_for_is_named() -> None:
    budget = limits.Budget(-1.0)
    report = engine.Report({}, limits.Limits(1.0, 1.0, {1: 1.0}, {1: 1.0}))
    report.rows.append(engine.Row("m", "w", 1.0, 1.0, 0.5))
    engine._measure_model("tiny", engine.DRY, torch.device("cpu"), budget, report)
    report.left_out = budget.left_out
    assert report.left_out == ["tiny: no time was left"]
    assert "- tiny: no time was left" in engine.markdown(report)
    assert "| m | w | 1000.00 | 1 | 50.0% |" in engine.markdown(report)
