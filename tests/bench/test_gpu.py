"""`bench/gpu/run.sh` runs where there is no accelerator, and its numbers follow from what they say.

Its measurements are not looked at: only that they are made, and of what.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest
import torch

from bench.gpu import engine, limits, needs, probe, servers, shapes
from bench.gpu.probes import decoding
from bench.gpu.probes.base import Probe, Row, Unavailable, guarded
from pdserve.ids import NodeId, NodeLife
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.support.fake_cuda import FakeCuda

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    report = json.loads((tmp_path / "gpu_engine.json").read_text())
    plan = engine.DRY
    sizes = [f"{b} × {c}" for c in plan.contexts for b in plan.batches]
    assert [row["what"] for row in report["rows"]] == [
        *(
            f"decode {size}{way}"
            for size in (*sizes, "3 × 10 to 40")
            for way in ("", ", one step ahead")  # graphs need a GPU
        ),
        *(f"prefill {tokens}" for tokens in plan.prompts),
        "2 × 24 beside a prompt of 200, 99th percentile",
    ]
    assert all(row["seconds"] > 0 and row["rate"] > 0 and row["used"] > 0 for row in report["rows"])
    assert report["left_out"] == []
    assert report["limits"]["bandwidth"] > 0
    assert report["limits"]["matmul"] > 0
    assert "the numbers mean nothing" in (tmp_path / "gpu_engine.md").read_text()
    assert "tests/engines/torch/test_cuda.py" in done.stdout
    moved = json.loads((tmp_path / "gpu_handoff.json").read_text())
    assert [row["mode"] for row in moved["rows"]] == ["shm/off"]
    assert all(row["seconds"] > 0 and row["used"] > 0 for row in moved["rows"])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_what_is_missing_is_named_and_the_rest_is_measured(tmp_path: Path) -> None:
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub/msgspec.py").write_text("raise ImportError('not here')")
    done = run(tmp_path / "out", "--dry", PYTHONPATH=str(tmp_path / "stub"))
    assert done.returncode == 1
    assert "missing for the engine: msgspec (ImportError: not here)" in done.stdout
    report = json.loads((tmp_path / "out/gpu_engine.json").read_text())
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
    assert "| m | w | 1000.000 | 1 | 50.0% | 0 |" in engine.markdown(report)


class PlayedEngine:
    """An engine whose steps take no time."""

    kernels = "played; no graphs: the device is imagined"
    ends: ClassVar[list[str]] = []

    def __init__(self, *args: object) -> None:
        self.ends.append("made")

    def close(self) -> None:
        self.ends.append("closed")


def test_what_fails_is_named_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(error: Exception) -> engine.Row:
        raise error

    def quantities(name: str, *_: object) -> Iterator[tuple[str, Any]]:
        yield "first", lambda: engine.Row(name, "first", 1.0, 1.0, 0.5)
        yield "second", lambda: fails(RuntimeError("CUDA error: no such kernel\nat line 7"))
        yield "third", lambda: fails(torch.OutOfMemoryError("too large"))
        yield "last", lambda: engine.Row(name, "last", 1.0, 1.0, 0.5)

    monkeypatch.setattr(engine, "Engine", PlayedEngine)
    monkeypatch.setattr(engine, "_quantities", quantities)
    report, kept = engine.Report({}, limits.Limits(1.0, 1.0, {}, {})), list[int]()
    engine._measure_model(
        *("tiny", engine.DRY, torch.device("cpu"), limits.Budget(9.0), report),
        lambda: kept.append(len(report.rows)),
    )
    assert [row.what for row in report.rows] == ["first", "last"]
    assert kept == [1, 1, 1, 2], "results are kept after every row"
    assert report.failures == ["tiny, second: RuntimeError: CUDA error: no such kernel"]
    assert report.left_out == ["tiny, third: too large"]
    assert PlayedEngine.ends == ["made", "closed"]
    text = engine.markdown(report)
    assert "- tiny: played; no graphs: the device is imagined" in text
    assert "Failed:\n\n- tiny, second: RuntimeError" in text


def test_an_engine_that_does_not_load_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(engine, "Engine", broken)
    report = engine.Report({}, limits.Limits(1.0, 1.0, {}, {}))
    engine._measure_model("tiny", engine.DRY, torch.device("cpu"), limits.Budget(9.0), report)
    assert report.failures == ["tiny: RuntimeError: CUDA error: unspecified launch failure"]


STUB = """#!/bin/bash
case "$1 $2" in
  "-m pytest") trap 'echo "1 failed so far"; kill $!; exit 2' INT; echo "$@"; sleep 30 & wait ;;
  "bench/gpu/"*) echo "part $@" ;;
  "-c import xdist") exit $NO_XDIST ;;
esac
"""
"""Stands for Python: tests that hang, and an engine that measures."""


@pytest.mark.parametrize(
    ("no_xdist", "words"), [("0", "-n 3 --dist loadfile"), ("1", "-p no:xdist")]
)
def test_tests_that_take_too_long_say_what_failed_and_the_engine_is_measured(
    tmp_path: Path, no_xdist: str, words: str
) -> None:
    python = tmp_path / "python"
    python.write_text(STUB)
    python.chmod(0o755)
    done = run(
        tmp_path / "out", PYTHON=str(python), NO_XDIST=no_xdist, TESTS="1", PROCESSES="3", LIMIT="9"
    )
    assert done.returncode == 1
    assert words in done.stdout
    assert "1 failed so far" in (tmp_path / "out/gpu_tests.txt").read_text()
    assert "the tests took more than 1 s: stopped" in done.stdout
    parts = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("part ")]
    assert [part for part in parts if part != "bench/gpu/needs.py"] == [
        "bench/gpu/engine.py",
        "bench/gpu/handoff.py",
    ]


def test_one_call_measures_everything_that_there_is(tmp_path: Path) -> None:
    """Every script of the folder that can be called is a part of it."""
    python = tmp_path / "python"
    python.write_text(STUB.replace("sleep 30 & wait", "exit 0"))
    python.chmod(0o755)
    done = run(tmp_path / "out", "--all", PYTHON=str(python), NO_XDIST="0")
    assert done.returncode == 0, done.stdout
    folder = ROOT / "bench/gpu"
    scripts = {str(path.relative_to(ROOT)) for path in folder.glob("*.py") if is_script(path)}
    inner = {"bench/gpu/limits.py"}  # engine.py measures them
    assert {path for path in scripts if f"part {path}" in done.stdout} == scripts - inner


def is_script(path: Path) -> bool:
    return '__name__ == "__main__"' in path.read_text()


def test_each_kernel_is_launched_alone_and_moves_what_it_says() -> None:
    """By Triton's interpreter: only that it computes, and on which bytes."""
    from bench.gpu import kernels
    from tests.engines.torch.cuda.interpreted import interpreted

    shape = shapes.SHAPES["tiny"]
    with interpreted():
        runs = list(kernels.kernel_runs(shape, torch.device("cpu"), few=True))
        for one in runs:
            one.launch(kernels.LAYERS - 1)
    assert {one.what: one.moved for one in runs} == {
        "norm of 1": 4 * 2 * shape.hidden,
        "activation of 1": 3 * 2 * shape.inner,
        "rotating and storing 1": 2 * 2 * (shape.heads + 2 * shape.kv_heads) * shape.head_dim,
        "attention 2 × 40": 2 * 40 * shape.kv_bytes(2) // shape.layers,
    }


async def test_a_pool_on_a_device_is_marked_and_moved_by_cuda_ipc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from bench.transfer_arms import device

    class PlayedEnd(device.DeviceEnd):
        def make_driver(self) -> Any:
            return FakeCuda(random.Random(1), b"one", hidden=True)

    monkeypatch.setattr(device, "BLOCKS", 2)
    end = PlayedEnd(NodeLife(NodeId("source"), 1), 1, lambda mode: None)
    end.mark(1, b"here")
    assert end.head(1)[:4] == b"here"
    assert end.head(0)[:4] != b"here"
    assert list(end.transports) == list(device.OnDevice.modes)
    assert device.BLOCK == 32 * 2 * 8 * 32 * 128 * 2
    for transport in end.transports.values():
        await transport.close()
    end.driver.free(end.address)


def test_invariant_kernels_are_measured_beside_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[tuple[str, engine.Plan]] = []
    monkeypatch.setattr(
        engine, "_measure_kernels", lambda name, kernels, plan, *_: taken.append((kernels, plan))
    )
    plan, report = engine.Plan(steps=7), engine.Report({}, limits.Limits(1.0, 1.0, {}, {}))
    monkeypatch.setattr(engine, "_measure_alone", lambda name, *_: taken.append(("alone", plan)))
    engine._measure_model("tiny", plan, torch.device("cuda"), limits.Budget(9.0), report)
    (_, whole), (alone, _), (kernels, few) = taken
    assert (whole, alone, kernels) == (plan, "alone", "invariant")
    named = [
        what
        for what, _ in engine._quantities("m", few, cast("engine.Engine", _Ways), report.limits)
    ]
    assert named == [
        *(f"decode {batch} × 2048{way}" for batch in (1, 64) for way in engine.WAYS),
        "prefill 2048",
    ]
    assert engine._tokens(few) > 64 * 2048


class _Ways:
    ways = engine.WAYS


def test_sequences_of_different_lengths_share_no_block(tmp_path: Path) -> None:
    shape = shapes.SHAPES["tiny"]
    made = engine.Engine(shapes.write(shape, tmp_path), shape, torch.device("cpu"), 300)
    lengths = [10, 70, 33]
    sequences = made.sequences(lengths, room=5)
    blocks = [block for each in sequences for block in each.blocks]
    assert len(blocks) == len(set(blocks))
    assert all(
        len(each.blocks) * engine.BLOCK >= length + 5
        for each, length in zip(sequences, lengths, strict=True)
    )
    with pytest.raises(torch.OutOfMemoryError):
        made.sequences([1000], room=0)
    made.close()


# ---------------------------------------------------------------- the probe


@pytest.mark.long(one_in=3)
@pytest.mark.timeout(120)
def test_a_dry_probe_answers_what_a_cpu_can_and_says_what_it_cannot(tmp_path: Path) -> None:
    probe.main(["--dry", "--device", "cpu", "--out", str(tmp_path)])
    report = json.loads((tmp_path / "gpu_probe.json").read_text())
    answers = report["answers"]
    assert list(answers) == list(probe.QUESTIONS)
    asked = {name for name, answer in answers.items() if not answer["failure"]}
    assert asked == {
        *("default", "engine", "large_engine", "decode", "prefill"),
        *("products", "launches", "reading"),
    }
    assert all(answers[name]["rows"] for name in asked)
    assert {answers[name]["failure"] for name in set(answers) - asked} == {"needs CUDA"}
    assert all(row["value"] is not None or row["note"] for row in answers["decode"]["rows"])
    assert report["dry"]


def test_the_rows_before_a_failure_are_kept() -> None:
    def rows() -> Iterator[Row]:
        yield Row("first", 1.0)
        raise RuntimeError("no such kernel\nat line 7")

    assert list(guarded("second", rows)) == [
        Row("first", 1.0),
        Row("second", note="RuntimeError: no such kernel"),
    ]


def test_an_unusable_device_ends_the_question() -> None:
    def rows() -> Iterator[Row]:
        yield Row("first", 1.0)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError):
        list(guarded("second", rows))


def test_what_a_process_did_not_end_is_said_and_the_rest_is_kept() -> None:
    lines: list[dict[str, Any]] = [
        {"question": "a"},
        {"question": "a", "row": {"what": "x", "value": 2.0, "unit": "ms", "note": ""}},
        {"question": "a", "seconds": 1.5, "failure": ""},
        {"question": "b"},
        {"question": "b", "row": {"what": "y", "value": None, "unit": "", "note": "why"}},
    ]
    answers = probe.read_answers("\n".join(map(json.dumps, lines)), "exit status -9")
    assert answers["a"] == probe.Answer([Row("x", 2.0, "ms")], 1.5, "")
    assert answers["b"] == probe.Answer([Row("y", note="why")], None, "exit status -9")
    text = probe.table(answers)
    assert "| a | x | 2 ms |  |" in text
    assert "| b | | | exit status -9 |" in text


def test_another_process_asks_what_the_first_one_did_not_come_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[list[str]] = []

    def run(options: object, names: list[str], file: Path, seconds: float) -> str:
        told.append(list(names))
        lines: list[dict[str, Any]] = [{"question": names[0]}]
        if names[0] != "default":
            lines += [{"question": names[0], "seconds": 1.0, "failure": ""}]
        file.write_text("\n".join(map(json.dumps, lines)))
        return "exit status 1"

    monkeypatch.setattr(probe, "_run", run)
    options = probe._arguments(["--ask", "default", "engine", "ipc"])
    answers = probe._ask_all(options)
    assert told == [["default", "engine", "ipc"], ["engine", "ipc"], ["ipc"]]
    assert answers["default"].failure == "exit status 1"
    assert answers["ipc"].seconds == 1.0
    options.budget = 0.0
    assert {each.failure for each in probe._ask_all(options).values()} == {"no time was left"}


def test_idle_time_counts_for_the_kernel_that_ends_it() -> None:
    spans = [("c", 10.0, 11.0), ("a", 0.0, 4.0), ("b", 1.0, 2.0), ("c", 6.0, 7.0), ("a", 7.0, 9.0)]
    # Between 2 and 4 the first one still runs.
    assert decoding.idle_before(spans) == [("c", (3.0, 2))]
    assert decoding.idle_before([]) == []


def test_a_gpu_is_asked_for_where_one_is_needed() -> None:
    with pytest.raises(Unavailable):
        Probe(torch.device("cpu")).require_cuda()


# ---------------------------------------------------------------- the servers


def test_a_checkout_that_is_not_installed_has_its_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert servers.search_path(tmp_path) == {}, "it is installed here"
    monkeypatch.setattr(servers, "entry_points", lambda group: ())
    monkeypatch.setenv("PYTHONPATH", "wheels")
    places = servers.search_path(tmp_path / "site")["PYTHONPATH"].split(os.pathsep)
    assert places == [str(tmp_path / "site"), str(ROOT), str(ROOT / "engines"), "wheels"]
    (found,) = importlib.metadata.distributions(path=places[:1])
    registered = {(point.group, point.name): point.value for point in found.entry_points}
    assert registered["pdserve.engines", "torch"] == "pdserve_engines.torch:create"
    installed = importlib.metadata.distribution("pdserve").entry_points
    named = {point.name for point in installed if point.group.startswith("pdserve.")}
    assert named <= {name for _, name in registered}


def test_a_counter_is_summed_over_the_series_with_its_labels() -> None:
    page = """
# TYPE bytes_total counter
bytes_total{backend="shm",direction="received",peer="a"} 1.5e+03
bytes_total{backend="shm",direction="received",peer="b"} 500
bytes_total{backend="shm",direction="sent",peer="a"} 7
bytes_total{backend="tcp",direction="received",peer="a"} 9
bytes_total_created{backend="shm",direction="received"} 11
"""
    assert servers.total(page, "bytes_total", backend="shm", direction="received") == 2000.0
    assert servers.total(page, "bytes_total", backend="rdma") == 0.0


def test_a_filled_checkpoint_is_what_an_engine_loads(tmp_path: Path) -> None:
    shape = shapes.SHAPES["tiny"]
    made = engine.Engine(
        shapes.write_filled(shape, tmp_path, "cpu"), shape, torch.device("cpu"), 64
    )
    sequences = made.sequences([5], room=2)
    made.step(sequences)
    made.close()
    assert len(sequences[0].tokens) == 6


def test_every_token_of_a_large_vocabulary_has_text(tmp_path: Path) -> None:
    shape = shapes.SHAPES["small-llama"]
    shapes.write_tokenizer(shape, tmp_path)
    files = [(tmp_path / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")]
    tokenizer = Tokenizer.from_bytes(*files, model_vocab_size=shape.vocab)
    assert tokenizer.vocab_size == shape.vocab
    for token in random.Random(0).sample(range(1280, shape.vocab), 50):
        assert tokenizer.decode([token]).strip() == f"word{token}"
    bundled = Tokenizer.from_bytes((shapes.BUNDLED / "tokenizer.json").read_bytes())
    text = "A word1281 of this text is not encoded by the added words."
    assert tokenizer.encode(text) == bundled.encode(text)
