"""Loads the package tensorrt_llm, and says what a machine lacks to run it.

The package needs an NVIDIA GPU and MPI as soon as it is imported, so nothing here imports it before
an engine loads. This is the only file that names its modules.
"""

from __future__ import annotations

import ctypes.util
import enum
import importlib
import importlib.util
import inspect
import platform
import sys
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve_engines.tensorrt_llm.options import Schema

__all__ = ["Package", "load_package", "missing", "read_package", "schema_of"]

_INSTALL = (
    "run pdserve in NVIDIA's container tensorrt-llm/release, or pip install 'pdserve[trtllm]' with "
    "NVIDIA's package index as an extra one"
)
_PYTHONS = ((3, 12),)
"""Releases of Python that its wheels are built for and pdserve runs with."""

_GENERATE = frozenset(
    {"inputs", "sampling_params", "streaming", "disaggregated_params", "cache_salt"}
)
"""Parameters of `generate_async` in every known release."""


@dataclass(frozen=True, slots=True)
class Package:
    """The names of tensorrt_llm that the adapter uses."""

    version: str
    llm: Callable[..., Any]
    sampling_params: Callable[..., Any]
    guided_decoding_params: Callable[..., Any]
    disaggregated_params: Callable[..., Any]
    arguments: Schema
    """Fields of the argument model of `LLM`."""
    sampling_fields: frozenset[str]
    disaggregated_fields: frozenset[str]
    generate_parameters: frozenset[str]
    """Parameters of `LLM.generate_async`."""


def missing() -> list[str]:
    """What this machine lacks to run the engine, in words; empty: nothing."""
    lacks = []
    if sys.platform != "linux":
        lacks.append(f"Linux: TensorRT-LLM does not run on {platform.system()}")
    if importlib.util.find_spec("tensorrt_llm") is None:
        lacks.append(f"the package tensorrt_llm: {_INSTALL}")
        if sys.version_info[:2] not in _PYTHONS:
            names = " or ".join(f"{major}.{minor}" for major, minor in _PYTHONS)
            lacks.append(f"Python {names}, for which its wheels are built")
    if not Path("/dev/nvidiactl").exists():
        lacks.append("an NVIDIA GPU and its driver: there is no /dev/nvidiactl")
    if ctypes.util.find_library("mpi") is None:
        lacks.append("an MPI library, such as Debian's libopenmpi-dev")
    return lacks


def load_package() -> Package:
    """Import tensorrt_llm. Raises `ConfigError`, which names the remedy."""
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise ConfigError(f"engine 'tensorrt_llm' needs the package tensorrt_llm: {_INSTALL}")
    try:
        return read_package(importlib.import_module)
    except ConfigError:
        raise
    except Exception as error:  # it looks for GPUs, MPI and libraries while it is imported
        lacks = "; ".join(missing()) or "nothing that pdserve knows of"
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"tensorrt_llm cannot be imported: {reason}. Missing here: {lacks}"
        ) from error


def read_package(module: Callable[[str], Any]) -> Package:
    """Collect the names; `module` imports a module by name. Raises `ConfigError` if the release
    lacks one."""
    try:
        package = module("tensorrt_llm")
        llmapi, arguments = module("tensorrt_llm.llmapi"), module("tensorrt_llm.llmapi.llm_args")
        return Package(
            version=str(getattr(package, "__version__", "")),
            llm=package.LLM,
            sampling_params=package.SamplingParams,
            guided_decoding_params=llmapi.GuidedDecodingParams,
            disaggregated_params=package.DisaggregatedParams,
            arguments=schema_of(arguments.TorchLlmArgs),
            sampling_fields=_field_names(package.SamplingParams),
            disaggregated_fields=_field_names(package.DisaggregatedParams),
            generate_parameters=_parameters(package.LLM.generate_async),
        )
    except AttributeError as error:
        raise ConfigError(
            f"this release of TensorRT-LLM lacks a name that pdserve uses: {error}; install one "
            "that pdserve knows (docs/engines.md)"
        ) from error


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Names of a function's parameters. A decorator may hide them: then it has those that all known
    releases have."""
    parameters = inspect.signature(function).parameters
    hidden = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return frozenset(parameters) | (_GENERATE if hidden else frozenset())


def schema_of(model: Any) -> Schema:
    """Fields of a pydantic model, with those of the models and enums in it."""
    return {name: _nested(field.annotation) for name, field in model.model_fields.items()}


def _nested(annotation: Any) -> Any:
    """Fields of a model, values of an enum; None for other types. Looks into unions."""
    for option in (annotation, *get_args(annotation)):
        if isinstance(option, type) and hasattr(option, "model_fields"):
            return schema_of(option)
        if isinstance(option, type) and issubclass(option, enum.Enum):
            return frozenset(str(member.value) for member in option)
    return None


def _field_names(kind: Any) -> frozenset[str]:
    if is_dataclass(kind):
        return frozenset(field.name for field in fields(kind))
    return frozenset(inspect.signature(kind).parameters)
