"""GPTQ's format: packed by hand from its description, and files that gptqmodel wrote."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.safetensors_reader import Checkpoint
from pdserve_engines.torch.model_loader.weight_formats.gptq import Gptq, dequantise, parse_gptq
from tests.engines.torch.checkpoints import Tiny, build, oracle_logprobs
from tests.engines.torch.full_logprobs import full_logprobs

PROMPT = [7 * n % 60 + 1 for n in range(30)]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2, "vocab_size": 64}
Tensors = dict[str, torch.Tensor]
WRITTEN = Path(__file__).parent / "gptqmodel.safetensors"


def packed(codes: list[list[int]], bits: int) -> torch.Tensor:
    """Words of 32 bits, each of several successive codes of a row, the first in the low bits."""
    words = []
    for row in codes:
        fields = [row[at : at + 32 // bits] for at in range(0, len(row), 32 // bits)]
        words.append([sum(code << bits * n for n, code in enumerate(part)) for part in fields])
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def less_one(words: torch.Tensor, bits: int) -> torch.Tensor:
    """What the format `gptq` stores of zero points: each word less a one in every field, by one
    subtraction, as gptqmodel does it."""
    ones = sum(1 << shift for shift in range(0, 32, bits))
    return (words.long() - ones).to(torch.int32)


def quantise(weight: torch.Tensor, bits: int, group: int, kind: str) -> tuple[Tensors, Any]:
    """The tensors of a matrix, and the matrix that they stand for. Inputs are dealt to the groups
    in turns, as no tool would do it by chance."""
    outputs, inputs = weight.shape
    groups = inputs // group
    g_idx = torch.arange(inputs) % groups
    zeros = torch.randint(0, 1 << bits, (groups, outputs))
    scales = (torch.rand(groups, outputs) / (1 << bits) + 0.01).half()
    wide_scales, wide_zeros = scales.float()[g_idx], zeros[g_idx]
    codes = (weight.T / wide_scales + wide_zeros).round().clamp(0, (1 << bits) - 1).long()
    made = wide_scales * (codes - wide_zeros)
    qzeros = packed(zeros.tolist(), bits)
    tensors = {
        "qweight": packed(codes.T.tolist(), bits).T.contiguous(),
        "qzeros": less_one(qzeros, bits) if kind == "gptq" else qzeros,
        "scales": scales,
        "g_idx": g_idx.int(),
    }
    return tensors, made.T


@pytest.mark.parametrize("kind", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_matrix_comes_back_as_it_was_packed(bits: int, kind: str) -> None:
    """Zero points of 0 and of the largest code are among them: a word then borrows."""
    torch.manual_seed(bits)
    tensors, made = quantise(torch.randn(16, 96) * 0.1, bits, 32, kind)
    found = dequantise(bits, *tensors.values(), one_less=kind == "gptq")
    assert found.dtype == torch.float32
    assert torch.equal(found, made)


@pytest.mark.parametrize("name", ["v1_4_sym", "v1_4_act", "v1_4_asym", "v2_4_asym", "v2_8_asym"])
def test_what_gptqmodel_wrote_is_what_it_reads(name: str) -> None:
    """`gptqmodel.safetensors` has a matrix of a small Llama as gptqmodel 7.7.0 quantised and saved
    it on a CPU, and what it dequantises that to itself: with the formats `gptq` (v1) and `gptq_v2`,
    4 and 8 bits in groups of 32, symmetric or not, in the order of activations (`act`) or not."""
    saved = load_file(WRITTEN)
    parts = [saved[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx")]
    found = dequantise(int(name[3]), *parts, one_less=name.startswith("v1"))
    torch.testing.assert_close(found, saved[f"{name}.dequantised"], atol=1e-6, rtol=1e-6)


def test_groups_follow_each_other_without_an_index() -> None:
    qweight, qzeros = packed([[1] * 8] * 16, 4), packed([[0] * 16] * 2, 4)
    scales = torch.tensor([[1.0] * 16, [2.0] * 16])
    found = dequantise(4, qweight.T.contiguous(), qzeros, scales, one_less=False)
    assert found.shape == (16, 8)
    assert found[0].tolist() == [1.0] * 4 + [2.0] * 4


def write(directory: Path, model: Any, kind: str, *, index: bool = True) -> None:
    """Write `model` in GPTQ's format with four bits, and eight for some; it gets the weights that
    the files stand for."""
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    parameters = dict(model.named_parameters())
    for name in [name for name in tensors if "_proj.weight" in name]:
        weight = tensors.pop(name)
        group = 32 if index else weight.shape[1]
        parts, made = quantise(weight, 8 if "down" in name else 4, group, kind)
        if not index:
            del parts["g_idx"]
        parameters[name].data.copy_(made)
        stem = name.removesuffix("weight")
        tensors |= {stem + part: tensor for part, tensor in parts.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    said = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": kind}
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": said}))


@pytest.mark.parametrize(
    ("family", "kind", "index"),
    [("Llama", "gptq", True), ("Llama", "gptq_v2", False), ("Qwen2", "gptq", False)],
)
def test_logits_are_those_of_the_weights_that_are_meant(
    tmp_path: Path, family: str, kind: str, index: bool
) -> None:
    model = build(Tiny(family, SIZES))
    write(tmp_path, model, kind, index=index)
    expected = oracle_logprobs(model, PROMPT)[-1]
    for kernels in ("auto", "torch"):
        found = full_logprobs(tmp_path, PROMPT, options={"kernels": kernels})
        assert (found - expected).abs().max() < 1e-3


# ------------------------------------------------------------------ gptqmodel itself

GPTQ_PYTHON = os.environ.get("PDSERVE_GPTQ_PYTHON", "")
"""An interpreter with gptqmodel, as `make gptq` makes one."""
CASES: list[dict[str, Any]] = [
    {"name": f"{kind}_{bits}_{group}_{'sym' if sym else 'asym'}{'_act' if act else ''}"}
    | {"bits": bits, "group_size": group, "desc_act": act, "sym": sym, "format": kind}
    # One group of all inputs takes desc_act: without it gptqmodel orders by groups, and has none.
    for bits, group, act, sym, kind in [
        (4, 32, False, True, "gptq"),
        (4, 32, True, True, "gptq"),
        (4, 64, False, False, "gptq_v2"),
        (4, 64, True, False, "gptq_v2"),
        (4, -1, True, True, "gptq"),
        (8, 32, True, True, "gptq"),
        (8, 64, False, False, "gptq_v2"),
        (8, -1, True, True, "gptq_v2"),
    ]
]


@pytest.fixture(scope="module")
def gptqmodel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `gptqmodel_writer.py` has written for all cases."""
    if not GPTQ_PYTHON:
        pytest.skip("needs gptqmodel: name an interpreter that has it in PDSERVE_GPTQ_PYTHON")
    folder = tmp_path_factory.mktemp("gptqmodel")
    cases = [case | {"prompt": PROMPT} for case in CASES]
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [GPTQ_PYTHON, str(Path(__file__).with_name("gptqmodel_writer.py")), str(folder)]
    # It writes logs where it stands.
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=3000, cwd=folder
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


@pytest.mark.timeout(3600)  # gptqmodel alone takes minutes to quantise
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_checkpoint_of_gptqmodel_has_the_logits_that_gptqmodel_computes(
    gptqmodel_folder: Path, case: dict[str, Any]
) -> None:
    said = json.loads((gptqmodel_folder / case["name"] / "config.json").read_text())
    assert said["quantization_config"]["bits"] == case["bits"]
    assert said["quantization_config"]["desc_act"] == case["desc_act"]
    written = (gptqmodel_folder / f"{case['name']}.logits.json").read_text()
    expected = torch.tensor(json.loads(written)).log_softmax(-1)
    assert expected.std() > 0.5
    for kernels in ("auto", "torch"):
        options = {"kernels": kernels}
        found = full_logprobs(
            gptqmodel_folder / case["name"], PROMPT, dtype="float32", options=options
        )
        assert (found - expected).abs().max() < 1e-3


def joined(directory: Path, **changed: torch.Tensor | None) -> Checkpoint:
    """A matrix of [16, 64] in four bits, with some tensors replaced or left out."""
    torch.manual_seed(0)
    tensors: dict[str, Any] = quantise(torch.randn(16, 64), 4, 32, "gptq")[0] | changed
    kept = {f"a.{name}": tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors")
    with Checkpoint(directory) as checkpoint:
        checkpoint.entries = Gptq(one_less=True).join(checkpoint.entries)
        return checkpoint


def test_tensors_become_one_entry(tmp_path: Path) -> None:
    entries = joined(tmp_path).entries
    assert list(entries) == ["a.weight"]
    assert entries["a.weight"].shape == (16, 64)
    assert entries["a.weight"].nbytes == 16 * 64 // 2 + 2 * 2 * 4 + 2 * 16 * 2 + 64 * 4


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"scales": None}, "tensor a.scales is missing"),
        ({"weight": torch.ones(16, 64)}, "tensor a.weight: a.qweight is there as well"),
        ({"qzeros": None}, "tensor a.qzeros is missing"),
        ({"g_idx": torch.zeros(63, dtype=torch.int32)}, "a.g_idx: shape [63], expected [64]"),
        ({"scales": torch.ones(2, 15)}, "do not fit GPTQ's format in 4 or 8 bits: a.qweight"),
        ({"qzeros": torch.zeros(2, 1, dtype=torch.int32)}, "do not fit GPTQ's format"),
        (
            {
                "g_idx": None,
                "scales": torch.ones(3, 16),
                "qzeros": torch.zeros(3, 2, dtype=torch.int32),
            },
            "3 groups do not divide 64 inputs",
        ),
        (
            {
                "g_idx": None,
                "scales": torch.ones(0, 16),
                "qzeros": torch.zeros(0, 2, dtype=torch.int32),
            },
            "0 groups do not divide 64 inputs",
        ),
        ({"scales": torch.ones(2, 16).int()}, "a.scales has dtype I32, supported are F32"),
        ({"qweight": torch.ones(8, 16)}, "a.qweight has dtype F32, supported are I32"),
        ({"qzeros": torch.ones(2, 2)}, "a.qzeros has dtype F32"),
        ({"g_idx": torch.zeros(64)}, "a.g_idx has dtype F32"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, changed: dict[str, torch.Tensor | None], complaint: str
) -> None:
    with pytest.raises(UnsupportedCheckpoint) as error:
        joined(tmp_path, **changed)
    assert complaint in error.value.message


@pytest.mark.parametrize("bad", [-1, 2])
def test_an_input_without_a_group_is_refused(tmp_path: Path, bad: int) -> None:
    """A negative group would be one of the last ones."""
    g_idx = torch.arange(64, dtype=torch.int32) // 32
    g_idx[5] = bad
    with joined(tmp_path, g_idx=g_idx) as checkpoint, pytest.raises(UnsupportedCheckpoint) as error:
        checkpoint.tensor("a.weight")
    assert "a.g_idx: a group is not one of the 2 in a.scales" in error.value.message


@pytest.mark.parametrize("values", [[1.0, torch.nan], [1.0, torch.inf], [0.0, 0.0]])
def test_scales_are_numbers(tmp_path: Path, values: list[float]) -> None:
    scales = torch.tensor(values)[:, None].repeat(1, 16)
    with joined(tmp_path, scales=scales) as checkpoint, pytest.raises(UnsupportedCheckpoint) as bad:
        checkpoint.tensor("a.weight")
    assert "a.scales: a scale is no finite number, or all are zero" in bad.value.message


def test_a_group_of_tiny_weights_may_have_a_zero_scale(tmp_path: Path) -> None:
    scales = torch.ones(2, 16).half()
    scales[1] = 0
    with joined(tmp_path, scales=scales) as checkpoint:
        assert checkpoint.tensor("a.weight").isfinite().all()


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"checkpoint_format": ["gptq"]}, "checkpoint_format ['gptq']"),
        ({"bits": 3}, "bits 3"),
        ({"bits": None}, "bits None"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"is_marlin_format": True}, "is_marlin_format"),
    ],
)
def test_other_schemes_are_refused_by_name(changed: dict[str, Any], complaint: str) -> None:
    assert parse_gptq({"bits": 4}) == Gptq(one_less=True)
    assert parse_gptq({"bits": 8, "checkpoint_format": "gptq_v2"}) == Gptq(one_less=False)
    with pytest.raises(UnsupportedCheckpoint) as error:
        parse_gptq({"bits": 4} | changed)
    assert f"(gptq): {complaint}" in error.value.message
