"""Resolves what the spec leaves open: device, dtype, threads, context length and kernels.

It only decides; nothing is loaded or allocated here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pdserve import accel
from pdserve.engine_core.kit import check_options
from pdserve.errors import ConfigError
from pdserve_engines.torch.cpus import available_cpus
from pdserve_engines.torch.fp8_kv import FP8
from pdserve_engines.torch.tensor_parallel.placement import place_ranks

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.messages.engine import EngineSpec
    from pdserve_engines.torch.model_loader.config import ModelConfig
    from pdserve_engines.torch.model_loader.kv_scales import KvScales
    from pdserve_engines.torch.tensor_parallel.placement import RankPlacement


_THREADS_BESIDE_GPU = 2
_RANK_TIMEOUT: Seconds = 8.0
"""Shorter than `--stall-timeout` by default, so that the error names the rank."""
_KV_CACHE_DTYPES = {"auto": "auto", "fp8_e4m3": "fp8_e4m3", "fp8": "fp8_e4m3"}
OPTIONS = (
    "kernels",
    "classifier_from_token",
    "rank_timeout",
    "async_scheduling",
    "kv_cache_dtype",
    "cuda_graphs",
)
"""Names of the engine's options."""


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """Settings by which one executor computes."""

    device: torch.device
    dtype: torch.dtype
    """Data type of weights and activations."""
    threads: int
    max_model_len: int
    kernels: str = "auto"
    """`auto`, `torch`, `triton`, `invariant`, `native`, or one of the native instruction sets.
    `invariant`: a row's result does not depend on the rest of the batch, or there is no start."""
    classifier_from_token: tuple[str, ...] = ()
    """Tokens of which the output layer's rows make a classification head; empty: none."""
    kv_cache_dtype: str = "auto"
    """`auto`: KV has the data type of the activations; `fp8_e4m3`: it is rounded to FP8."""
    kv_scales: KvScales = ()
    """The checkpoint's scales of keys and values, with `fp8_e4m3`."""
    rank_timeout: Seconds = _RANK_TIMEOUT
    """Longest time that a tensor-parallel rank waits for another within a step; then the engine
    ends."""
    async_scheduling: bool = False
    """True if a decode step begins before the tokens of the last one are read."""
    cuda_graphs: str = "auto"
    """`on`: decode steps are computed by CUDA graphs; `auto`: where that is possible; `off`."""

    @property
    def kv_dtype(self) -> torch.dtype:
        """Data type of KV."""
        return self.dtype if self.kv_cache_dtype == "auto" else FP8


def resolve_settings(spec: EngineSpec, config: ModelConfig) -> TorchSettings:
    """Resolve the settings. Raises `ConfigError` for one that is not possible."""
    max_model_len = spec.max_model_len or config.max_positions
    if max_model_len > config.max_positions:
        raise ConfigError(
            f"--max-model-len of {max_model_len} is over the checkpoint's limit of "
            f"{config.max_positions} tokens"
        )
    device = rank_placement(spec).devices[0]
    kernels = kernels_option(spec.options)
    kv_cache_dtype = kv_cache_option(spec.options)
    if spec.tensor_parallel > 1:
        _check_ranks(spec, kernels, kv_cache_dtype)
    threads = choose_threads(spec.threads or available_cpus(), device)
    return TorchSettings(
        device=device,
        dtype=choose_dtype(spec.dtype, config.dtype, device),
        threads=max(1, threads // spec.tensor_parallel) if device.type == "cpu" else threads,
        max_model_len=max_model_len,
        kernels=kernels,
        kv_cache_dtype=kv_cache_dtype,
        classifier_from_token=classifier_option(spec.options),
        rank_timeout=timeout_option(spec.options),
        async_scheduling=async_option(spec.options, device, spec.tensor_parallel),
        cuda_graphs=graphs_option(spec.options),
    )


def rank_placement(spec: EngineSpec) -> RankPlacement:
    """Where the ranks compute; without `--tp` there is one. Raises `ConfigError`."""
    device = choose_device(spec.device)
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return place_ranks(device, spec.tensor_parallel, gpus, visible)


def _check_ranks(spec: EngineSpec, kernels: str, kv_cache_dtype: str) -> None:
    """Raise `ConfigError` for what does not work with several ranks."""
    flag = f"--tp {spec.tensor_parallel}"
    if kernels not in ("auto", "torch"):
        raise ConfigError(
            f"{flag}: ranks compute with torch's kernels; leave out the engine option "
            f"kernels={kernels}"
        )
    if graphs_option(spec.options) == "on":
        raise ConfigError(
            f"{flag}: CUDA graphs do not hold what ranks add up; leave out the engine option "
            "cuda_graphs=on"
        )
    if kv_cache_dtype != "auto":
        raise ConfigError(
            f"{flag}: KV in FP8 works with one rank only; leave out the engine option "
            f"kv_cache_dtype={kv_cache_dtype}"
        )
    if spec.tiers is not None and spec.tiers.is_used:
        raise ConfigError(
            f"{flag}: KV tiers work with one rank only; leave out --host-kv and --disk-kv"
        )


def choose_threads(wanted: int, device: torch.device) -> int:
    """Compute threads: `wanted`, but few beside a GPU. There the host only prepares small arrays,
    and on one H100 machine 15 idle OpenMP threads spun through ten cores."""
    return wanted if device.type == "cpu" else min(wanted, _THREADS_BESIDE_GPU)


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where it works, else the CPU. Raises `ConfigError`."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not known to torch") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; cpu and cuda are")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r}: there are {torch.cuda.device_count()} CUDA devices")
    return device


def choose_dtype(name: str, stored: str | None, device: torch.device) -> torch.dtype:
    """`auto` is float32 on the CPU, else the checkpoint's (float16 becomes bfloat16)."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.float32 if stored == "float32" else torch.bfloat16
    if name not in dtypes:
        raise ConfigError(f"dtype {name!r} is not supported; auto, float32 and bfloat16 are")
    return dtypes[name]


def classifier_option(options: dict[str, str]) -> tuple[str, ...]:
    """The tokens that the option `classifier_from_token` names, one or two. Raises
    `ConfigError`."""
    value = options.get("classifier_from_token", "")
    tokens = tuple(value.split(",")) if value else ()
    if len(tokens) > 2 or not all(tokens) or len(set(tokens)) < len(tokens):
        raise ConfigError(
            f"engine option classifier_from_token={value!r}: give the token for relevant texts, or "
            "those for irrelevant and relevant ones, as in no,yes"
        )
    return tokens


def kv_cache_option(options: dict[str, str]) -> str:
    """The value of the option `kv_cache_dtype`, under vLLM's names. Raises `ConfigError`."""
    value = options.get("kv_cache_dtype", "auto")
    if value not in _KV_CACHE_DTYPES:
        raise ConfigError(f"engine option kv_cache_dtype={value!r}: give auto or fp8_e4m3")
    return _KV_CACHE_DTYPES[value]


def timeout_option(options: dict[str, str]) -> Seconds:
    """The value of the option `rank_timeout`. Raises `ConfigError`."""
    value = options.get("rank_timeout", str(_RANK_TIMEOUT))
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise ConfigError(f"engine option rank_timeout={value!r}: give 0.1 to 3600 seconds")
    return seconds


def async_option(options: dict[str, str], device: torch.device, ranks: int) -> bool:
    """The value of the option `async_scheduling`; `auto` is on where a device computes beside the
    host. Raises `ConfigError`."""
    value = options.get("async_scheduling", "auto")
    if value not in ("auto", "on", "off"):
        raise ConfigError(f"engine option async_scheduling={value!r}: give auto, on or off")
    if value == "on" and ranks > 1:
        raise ConfigError(
            f"--tp {ranks}: ranks take one step at a time; leave out the engine option "
            "async_scheduling=on"
        )
    return value == "on" or (value == "auto" and device.type == "cuda" and ranks == 1)


def graphs_option(options: dict[str, str]) -> str:
    """The value of the option `cuda_graphs`. Raises `ConfigError`."""
    value = options.get("cuda_graphs", "auto")
    if value not in ("auto", "on", "off"):
        raise ConfigError(f"engine option cuda_graphs={value!r}: give auto, on or off")
    return value


def kernels_option(options: dict[str, str]) -> str:
    """The value of the option `kernels`. Raises `ConfigError` for another value, and for options of
    other names than `OPTIONS`."""
    check_options("torch", options, OPTIONS)
    value = options.get("kernels", "auto")
    possible = ["auto", "torch", "triton", "invariant"]
    if accel.NATIVE:
        possible += ["native", *accel.native.cpu_kernel_sets()]
    if value not in possible:
        raise ConfigError(
            f"engine option kernels={value!r} is not possible here; {', '.join(possible)} are"
        )
    return value
