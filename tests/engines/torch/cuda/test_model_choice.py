"""Who computes a model on a GPU, by the option `kernels` and by what the kernels can do."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from pdserve import accel
from pdserve.errors import ConfigError
from pdserve_engines.torch import executor
from pdserve_engines.torch.cuda import kernel_check
from pdserve_engines.torch.cuda.invariant import invariance_check
from pdserve_engines.torch.cuda.invariant.invariant_model import InvariantModel
from pdserve_engines.torch.cuda.kernel_model import KernelModel
from pdserve_engines.torch.cuda.model_choice import make_gpu_model
from pdserve_engines.torch.executor import make_model
from pdserve_engines.torch.model_loader.config import parse_config
from pdserve_engines.torch.models.torch_model import TorchModel
from pdserve_engines.torch.settings import TorchSettings
from tests.engines.torch.cuda.test_kernel_model import LLAMA

CONFIG = parse_config(LLAMA)
CPU = torch.device("cpu")


def settings_of(kernels: str) -> TorchSettings:
    """Models are made on the CPU: the choice is the same."""
    return TorchSettings(CPU, torch.float32, 1, 600, kernels)


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What the comparison on the device finds; tests may change it."""
    found: list[str | None] = [None]
    monkeypatch.setattr(kernel_check, "failing_kernel", lambda config, settings: found[0])
    monkeypatch.setattr(invariance_check, "varying_kernel", lambda config, settings: found[-1])
    return found


@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_kernels_compute_what_they_can(kernels: str) -> None:
    model, why = make_gpu_model(CONFIG, settings_of(kernels))
    assert isinstance(model, KernelModel)
    assert why == ""
    assert model.kernels == "triton on cpu, 1 threads"


def test_invariant_kernels_compute_what_is_asked_of_them(checked: list[str | None]) -> None:
    model, why = make_gpu_model(CONFIG, settings_of("invariant"))
    assert isinstance(model, InvariantModel)
    assert why == ""
    assert model.exact.startswith("invariant ")
    assert isinstance(model.sibling(settings_of("invariant")), InvariantModel)
    checked.append("the kernel for products computes a row otherwise beside other rows")
    with pytest.raises(ConfigError, match=r"kernels=invariant: not possible, .* beside other rows"):
        make_gpu_model(CONFIG, settings_of("invariant"))
    assert isinstance(make_gpu_model(CONFIG, settings_of("auto"))[0], KernelModel)


def test_nothing_takes_the_place_of_invariant_kernels(checked: list[str | None]) -> None:
    with pytest.raises(ConfigError, match="kernels=invariant: not possible, they know no sinks"):
        make_gpu_model(replace(CONFIG, sinks=True), settings_of("invariant"))
    checked[0] = "the kernel for norm fails"
    with pytest.raises(ConfigError, match="kernels=invariant: not possible, the kernel for norm"):
        make_gpu_model(CONFIG, settings_of("invariant"))


def test_torch_computes_what_is_asked_of_it() -> None:
    model, why = make_gpu_model(CONFIG, settings_of("torch"))
    assert type(model) is TorchModel
    assert why == "they were not asked for"


def test_torch_computes_what_they_do_not_know_and_the_reason_is_named() -> None:
    config = replace(CONFIG, sinks=True)
    model, why = make_gpu_model(config, settings_of("auto"))
    assert type(model) is TorchModel
    assert why == "they know no sinks, which llama has"
    with pytest.raises(ConfigError, match="kernels=triton: not possible, they know no sinks"):
        make_gpu_model(config, settings_of("triton"))


def test_torch_computes_where_they_fail(checked: list[str | None]) -> None:
    checked[0] = "the kernel for norm fails"
    model, why = make_gpu_model(CONFIG, settings_of("auto"))
    assert type(model) is TorchModel
    assert why == "the kernel for norm fails"
    with pytest.raises(ConfigError, match="not possible, the kernel for norm fails"):
        make_gpu_model(CONFIG, settings_of("triton"))


def test_a_slower_library_is_named_unless_it_was_asked_for(
    checked: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_model = TorchModel(CONFIG, settings_of("torch"))
    on_gpu = partial(replace, device=torch.device("cuda", 0))
    monkeypatch.setattr(executor, "make_gpu_model", lambda *_: (torch_model, "norm fails"))
    _, slow = make_model(CONFIG, on_gpu(settings_of("auto")), lambda stage, fraction: None)
    assert "torch computes the model on cuda:0, slower" in slow
    assert "norm fails" in slow
    _, slow = make_model(CONFIG, on_gpu(settings_of("torch")), lambda stage, fraction: None)
    assert slow == ""
    _, slow = make_model(CONFIG, settings_of("auto"), lambda stage, fraction: None)
    assert slow == ""


def test_kernels_for_cpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="kernels=native: not possible, the device is cpu"):
        make_gpu_model(CONFIG, settings_of("native"))


def test_on_a_cpu_there_are_none() -> None:
    with pytest.raises(ConfigError, match="kernels=triton: not possible, the device is cpu"):
        make_model(CONFIG, settings_of("triton"), lambda stage, fraction: None)


@pytest.mark.skipif(not accel.NATIVE, reason=accel.REASON)
def test_on_a_cpu_the_native_ones_are_invariant_in_float32() -> None:
    wanted = settings_of("invariant")
    model, slow = make_model(CONFIG, wanted, lambda stage, fraction: None)
    assert model.exact.startswith("native ")
    assert slow == ""
    model.close()
    with pytest.raises(ConfigError, match=r"kernels=invariant: not possible, .* in float32 alone"):
        make_model(CONFIG, replace(wanted, dtype=torch.bfloat16), lambda stage, fraction: None)
    with pytest.raises(ConfigError, match=r"kernels=invariant: not possible, .* KV included"):
        make_model(CONFIG, replace(wanted, kv_cache_dtype="fp8_e4m3"), lambda *_: None)


def test_siblings_have_the_same_kernels() -> None:
    model, _ = make_gpu_model(CONFIG, settings_of("auto"))
    assert isinstance(model.sibling(settings_of("auto")), KernelModel)
