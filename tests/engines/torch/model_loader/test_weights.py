"""Checkpoints whose tensors do not fit, and how loading reports itself."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.executor import TorchExecutor
from tests.engines.torch.checkpoints import NAMES, TINY, checkpoint, oracle_generate
from tests.engines.torch.driver import Driver, loaded, spec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Tensors = dict[str, torch.Tensor]


def changed(name: str, tmp_path: Path, change: Callable[[Tensors], None]) -> Path:
    """A copy of a tiny checkpoint with its tensors edited."""
    directory = tmp_path / "changed"
    shutil.copytree(checkpoint(name)[0], directory)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def load(directory: Path) -> TorchExecutor:
    executor = TorchExecutor()
    executor.load(spec(directory), lambda stage, fraction: None)
    return executor


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            "model.layers.1.mlp.up_proj.weight is missing",
        ),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}),
            "model.layers.0.self_attn.q_proj.bias is not part of a llama model",
        ),
        (
            lambda t: t.update({"vision_tower.weight": torch.zeros(4)}),
            "vision_tower.weight is not part of a llama model",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(47)}),
            "model.norm.weight has shape [47], expected [48]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(48, dtype=torch.float64)}),
            "model.norm.weight has dtype F64",
        ),
        (lambda t: [t.pop(name) for name in list(t)[:9]], "and 5 more"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, change: Callable[[Tensors], None], complaint: str
) -> None:
    directory = changed("llama", tmp_path, change)
    with pytest.raises(UnsupportedCheckpoint) as error:
        load(directory)
    assert complaint in error.value.message


def test_more_layers_than_tensors_are_refused_before_they_are_listed(tmp_path: Path) -> None:
    directory = changed("llama", tmp_path, lambda tensors: None)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 9999}))
    with pytest.raises(UnsupportedCheckpoint, match=r"9999 layers .* and 21 tensors in all"):
        load(directory)


def test_leftovers_of_older_tools_are_ignored(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)

    load(changed("qwen2", tmp_path, add)).close()


@pytest.mark.parametrize("stem", ["", "language_model.model.", "model.language_model."])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_the_names_may_begin_otherwise(tmp_path: Path, name: str, stem: str) -> None:
    """As embedding models are saved, and the text part of multimodal ones."""

    def rename(tensors: Tensors) -> None:
        for key in list(tensors):
            if key.startswith("model."):
                tensors[stem + key.removeprefix("model.")] = tensors.pop(key)
        if stem:
            tensors["vision_tower.patch.weight"] = torch.zeros(3)
            tensors["multi_modal_projector.weight"] = torch.zeros(3)

    hashes, outputs = [], []
    for directory in (checkpoint(name)[0], changed(name, tmp_path, rename)):
        executor = loaded(directory)
        assert executor.info is not None
        hashes.append(executor.info.compat_hash)
        driver = Driver(executor)
        sequence = driver.add([3, 1, 4, 1, 5])
        driver.finish([sequence], 3)
        outputs.append(sequence.output)
        executor.close()
    assert outputs[0] == outputs[1]
    assert hashes[0] == hashes[1]


def test_of_a_multimodal_model_the_text_part_is_served(tmp_path: Path) -> None:
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=TINY["gemma3"].config().to_dict(), vision_config=vision, mm_tokens_per_image=4
    )
    torch.manual_seed(0)
    whole: Any = transformers.Gemma3ForConditionalGeneration(config).eval()
    whole.model.language_model.load_state_dict(checkpoint("gemma3")[1].model.state_dict())
    whole.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("vision_tower.") for name in names)
    executor = loaded(tmp_path)
    driver = Driver(executor)
    prompt = list(range(20))
    sequence = driver.add(prompt)
    driver.finish([sequence], 8, chunk=7)
    executor.close()
    assert sequence.output == oracle_generate(checkpoint("gemma3")[1], prompt, 8)
    assert sequence.output == oracle_generate(whole, prompt, 8)


NEWER = {"model.visual.": "visual.", "model.language_model.": "model."}
MISTRAL3 = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.": "",
}


@pytest.mark.parametrize(
    ("name", "older"),
    [("qwen2_5_vl", NEWER), ("qwen3_vl", NEWER), ("mistral3", MISTRAL3)],
)
def test_parts_that_see_are_skipped_under_their_older_names(
    name: str, older: dict[str, str], tmp_path: Path
) -> None:
    """As the first published checkpoints have them. The table's own have the newer names."""

    def rename(tensors: Tensors) -> None:
        for key in list(tensors):
            begin = next((begin for begin in older if key.startswith(begin)), None)
            if begin is not None:
                tensors[older[begin] + key.removeprefix(begin)] = tensors.pop(key)
        assert any(key.startswith(("visual.", "vision_tower.")) for key in tensors)

    executor = loaded(changed(name, tmp_path, rename))
    driver = Driver(executor)
    sequence = driver.add([3, 1, 4, 1, 5])
    driver.finish([sequence], 4)
    executor.close()
    assert sequence.output == oracle_generate(checkpoint(name)[1], [3, 1, 4, 1, 5], 4)


def test_stacked_experts_may_have_a_row_per_input(tmp_path: Path) -> None:
    """As they are published; tools of today write a row per output."""

    def turn(tensors: Tensors) -> None:
        stacked = [name for name in tensors if ".experts." in name]
        assert len(stacked) == 2
        for name in stacked:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()

    executor = loaded(changed("qwen3_vl_moe", tmp_path, turn))
    driver = Driver(executor)
    sequence = driver.add([3, 1, 4, 1, 5])
    driver.finish([sequence], 4)
    executor.close()
    model = checkpoint("qwen3_vl_moe")[1]
    assert sequence.output == oracle_generate(model, [3, 1, 4, 1, 5], 4)


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("phi3", "model.layers.1.self_attn.qkv_proj.weight"),
        ("phi3", "model.layers.0.mlp.gate_up_proj.weight"),
        ("olmo2", "model.layers.0.self_attn.q_norm.weight"),
        ("glm4", "model.layers.1.post_self_attn_layernorm.weight"),
        ("gemma2", "model.layers.0.pre_feedforward_layernorm.weight"),
        ("cohere2", "model.layers.0.input_layernorm.weight"),
        ("qwen3_vl", "lm_head.weight"),
    ],
)
def test_a_lost_tensor_of_any_family_is_named(name: str, lost: str, tmp_path: Path) -> None:
    def lose(tensors: Tensors) -> None:
        del tensors[lost]

    with pytest.raises(UnsupportedCheckpoint, match=f"{lost} is missing"):
        load(changed(name, tmp_path, lose))


def test_a_quantised_tensor_is_called_that(tmp_path: Path) -> None:
    def quantise(tensors: Tensors) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    with pytest.raises(UnsupportedCheckpoint, match=r"up_proj\.weight of dtype F8_E4M3: FP8"):
        load(changed("llama", tmp_path, quantise))


def test_loading_reports_bytes_from_start_to_end() -> None:
    seen: list[tuple[str, float | None]] = []
    executor = TorchExecutor()
    directory, _ = checkpoint("llama")
    info = executor.load(spec(directory), lambda stage, part: seen.append((stage, part)))
    fractions = [part for _, part in seen if part is not None]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert len(fractions) > 10
    assert any(stage.startswith("kernels: ") for stage, _ in seen)
    size = (directory / "model.safetensors").stat().st_size
    assert size * 0.9 < info.weight_bytes < size * 1.2  # packing pads to whole panels
    executor.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_sharded_checkpoint_computes_the_same(name: str, tmp_path: Path) -> None:
    directory, model = checkpoint(name)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    outputs, hashes = [], []
    for folder in (directory, tmp_path):
        executor = loaded(folder)
        driver = Driver(executor)
        sequence = driver.add([3, 1, 4, 1, 5])
        driver.finish([sequence], 4)
        outputs.append(sequence.output)
        assert executor.info is not None
        hashes.append(executor.info.compat_hash)
        executor.close()
    assert outputs[0] == outputs[1]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_checkpoint_is_computed_in_float32(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    def halve(tensors: Tensors) -> None:
        for key, tensor in tensors.items():
            tensors[key] = tensor.to(dtype)

    executor = loaded(changed("llama", tmp_path, halve))
    assert executor.info is not None
    assert executor.info.dtype == "float32"
    driver = Driver(executor)
    sequence = driver.add([3, 1, 4, 1, 5])
    driver.finish([sequence], 2)
    executor.close()
