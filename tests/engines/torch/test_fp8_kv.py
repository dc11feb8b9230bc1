"""KV in FP8: against transformers with a cache that rounds in the same way, and handed over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pdserve import accel
from pdserve.errors import ConfigError
from pdserve.messages.request import SamplingParams
from pdserve_engines.torch.executor import TorchExecutor
from pdserve_engines.torch.fp8_kv import FP8, round_rows, widen
from tests.engines.torch.checkpoints import TINY, build, checkpoint, oracle_logprobs
from tests.engines.torch.driver import Driver, loaded, spec
from tests.engines.torch.full_logprobs import full_logprobs
from tests.engines.torch.test_handoff import compare, engine_spec, prompt_of, request
from tests.support.disagg_pair import make_pair

if TYPE_CHECKING:
    from pathlib import Path

FP8_OPTION = {"kv_cache_dtype": "fp8_e4m3"}
SCALES = ((0.5, 0.03), (0.02, 2.0))
"""Of keys and values, for two layers; the small ones cut the largest numbers."""


def test_numbers_are_rounded_to_the_nearest_and_bounded() -> None:
    """Of one key head and one value head."""
    stored = torch.tensor([1.0, -1.06, 1.07, 447.0, 500.0, -torch.inf, torch.nan, 0.0016])
    rows = torch.stack((stored * 0.5, stored * 4.0)).view(1, 2, -1)
    found = round_rows(rows, (0.5, 4.0))
    assert found.dtype == torch.uint8
    expected = torch.tensor([1.0, -1.0, 1.125, 448.0, 448.0, -448.0, torch.nan, 2.0**-9])
    for part, scale in zip(found[0], (0.5, 4.0), strict=True):
        meant = widen(part, scale, torch.float32)
        assert torch.equal(meant.nan_to_num(7), (expected * scale).nan_to_num(7))
        assert widen(part, scale, torch.bfloat16).dtype == torch.bfloat16


class RoundedCache(transformers.DynamicCache):
    """Keys and values become FP8 numbers times a scale when they are stored."""

    def __init__(self, config: Any, scales: tuple[tuple[float, float], ...]) -> None:
        super().__init__(config=config)
        self._scales = scales

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (
            (part / scale).clamp(-448, 448).to(FP8).float() * scale
            for part, scale in zip((key_states, value_states), self._scales[layer_idx], strict=True)
        )
        return super().update(keys, values, layer_idx, *args, **kwargs)


@torch.inference_mode()
def rounded_logprobs(
    model: Any, prompt: list[int], scales: tuple[tuple[float, float], ...]
) -> torch.Tensor:
    cache = RoundedCache(model.config, scales)
    logits: torch.Tensor = model(torch.tensor([prompt]), past_key_values=cache).logits
    return logits[0, -1].float().log_softmax(-1)


KERNELS = ["torch", *(["native"] if accel.NATIVE else [])]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ["llama", "mistral_windowed", "gpt_oss", "gemma2"])
def test_logits_are_those_of_transformers_with_a_rounded_cache(name: str, kernels: str) -> None:
    """A number between two of FP8 may fall to either side, which moves a logit a little."""
    directory, model = checkpoint(name)
    prompt = prompt_of(40)
    found = full_logprobs(directory, prompt, options=FP8_OPTION | {"kernels": kernels})
    ones = ((1.0, 1.0),) * model.config.num_hidden_layers
    difference = (found - rounded_logprobs(model, prompt, ones)).abs()
    assert difference.max() < 0.03
    assert (found - oracle_logprobs(model, prompt)[-1]).abs().max() > 2 * difference.max()


def with_scales(directory: Path, scales: tuple[tuple[float, float], ...]) -> Any:
    """Write a model whose checkpoint has these scales of keys and values."""
    model = build(TINY["qwen3"])
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for layer, pair in enumerate(scales):
        for name, scale in zip("kv", pair, strict=True):
            stem = f"model.layers.{layer}.self_attn"
            tensors[f"{stem}.{name}_scale"] = torch.tensor([scale])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_checkpoints_scales_are_used(tmp_path: Path, kernels: str) -> None:
    model, prompt = with_scales(tmp_path, SCALES), prompt_of(40)
    found = full_logprobs(tmp_path, prompt, options=FP8_OPTION | {"kernels": kernels})
    expected = rounded_logprobs(model, prompt, SCALES)
    assert (found - expected).abs().max() < 0.03
    assert (expected - rounded_logprobs(model, prompt, SCALES[::-1])).abs().max() > 0.1
    plain = full_logprobs(tmp_path, prompt)
    assert (plain - oracle_logprobs(model, prompt)[-1]).abs().max() < 1e-4


def test_a_handoff_changes_no_token_and_takes_a_quarter_of_the_bytes() -> None:
    """Of those in float32; the tokens are those of one worker with KV in FP8."""
    directory, received = checkpoint("qwen3")[0], {}
    for kind in ("auto", "fp8_e4m3"):
        wanted = engine_spec(directory, "torch")
        wanted.options["kv_cache_dtype"] = kind
        pair = make_pair(TorchExecutor, wanted, p={"max_batch_tokens": 12, "max_sequences": 12})
        for length in (7, 16, 17, 45):
            compare(pair, request(prompt_of(length), temperature=1.0, seed=length))
        received[kind] = pair.d.stats.received_bytes
        assert received[kind] == pair.net.bytes_applied
        pair.close()
    assert received["auto"] == 4 * received["fp8_e4m3"] > 0


def hash_of(directory: Path, **fields: Any) -> tuple[str, int]:
    executor = TorchExecutor()
    info = executor.load(spec(directory, **fields), lambda stage, fraction: None)
    executor.close()
    return info.compat_hash, info.layout.block_bytes


def test_other_formats_and_scales_never_look_compatible(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    with_scales(one, SCALES)
    with_scales(other, SCALES[::-1])
    plain, full = hash_of(one)
    assert hash_of(other) == (plain, full), "without FP8 the scales mean nothing"
    half = hash_of(one, dtype="bfloat16")
    rounded = hash_of(one, options=FP8_OPTION)
    found = {plain, half[0], rounded[0], hash_of(other, options=FP8_OPTION)[0]}
    found.add(hash_of(one, dtype="bfloat16", options=FP8_OPTION)[0])
    assert len(found) == 5
    assert full == 2 * half[1] == 4 * rounded[1]


@pytest.mark.skipif(not accel.NATIVE, reason=accel.REASON)
def test_the_native_kernels_compute_it() -> None:
    directory, said = checkpoint("llama")[0], list[str]()
    executor = TorchExecutor()
    info = executor.load(
        spec(directory, options=FP8_OPTION), lambda stage, fraction: said.append(stage)
    )
    executor.close()
    assert any("kernels: native" in line for line in said)
    assert info.slow_kernels == ""


@pytest.mark.skipif(not accel.NATIVE, reason=accel.REASON)
def test_no_bit_depends_on_how_a_prompt_is_cut_or_on_its_company() -> None:
    executor = loaded(checkpoint("qwen3")[0], num_blocks=60, options=FP8_OPTION)
    driver, prompt = Driver(executor), prompt_of(45)
    found = []
    for chunk in (45, 1, 7, 16):
        made = driver.add(prompt, SamplingParams(max_tokens=9, temperature=0.0, logprobs=5))
        company = driver.add(prompt_of(5 + chunk))
        begin = len(driver.results)
        while made.num_output < 4:
            driver.advance([company, made], chunk)
        records = [r for result in driver.results[begin:] for r in result.logprobs if r]
        found.append([(record.token, record.top) for record in records])
        driver.finish([company, made], 9)
    assert len(found[0]) == 4
    assert all(each == found[0] for each in found)
    executor.close()


def test_a_sibling_has_the_same_scales(tmp_path: Path) -> None:
    with_scales(tmp_path, SCALES)
    owner = loaded(tmp_path, options=FP8_OPTION)
    sibling = owner.sibling()
    info = sibling.load(spec(tmp_path, options=FP8_OPTION), lambda stage, fraction: None)
    assert owner.info is not None
    assert info.compat_hash == owner.info.compat_hash
    sibling.allocate(8)
    assert sibling.pool is not None
    found = torch.tensor([sibling.pool.scales(layer) for layer in range(2)])
    assert torch.equal(found, torch.tensor(SCALES))
    sibling.close()
    with pytest.raises(ConfigError, match="kv_cache_dtype=auto: the core to share weights with"):
        owner.sibling().load(spec(tmp_path), lambda stage, fraction: None)
    owner.close()


def test_choices_share_blocks_and_copy_the_last_one() -> None:
    executor = loaded(checkpoint("llama")[0], options=FP8_OPTION)
    driver, prompt = Driver(executor), prompt_of(21)
    alone = driver.add(prompt)
    driver.finish([alone], 6)
    parent = driver.add(prompt)
    driver.advance([parent], 20)
    child = driver.fork(parent, 1)
    assert len(set(child.blocks) - set(parent.blocks)) == 1
    driver.finish([parent, child], 6, chunk=5)
    driver.preempt(parent)
    driver.finish([parent], 9, chunk=7)
    assert child.tokens == alone.tokens == parent.tokens[: len(alone.tokens)]
    executor.close()
