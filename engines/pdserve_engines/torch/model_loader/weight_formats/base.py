"""Finds the format of a checkpoint's quantised weights by `config.json`, and defines what a format
does.

A format turns the tensors that tools store for a matrix into that matrix. The matrices are
dequantised when they are loaded, so the model and its kernels know no formats. Activations are
never rounded, whatever the configuration says of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from pdserve_engines.torch.model_loader.config_keys import read_json
from pdserve_engines.torch.model_loader.text_part import text_part
from pdserve_engines.torch.model_loader.weight_formats.float8 import (
    parse_compressed_tensors,
    parse_fp8,
)
from pdserve_engines.torch.model_loader.weight_formats.gptq import parse_gptq

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pdserve_engines.torch.model_loader.config_keys import Json
    from pdserve_engines.torch.model_loader.safetensors_reader import Entry

__all__ = ["METHODS", "WeightFormat", "read_weight_format", "weight_format"]


class WeightFormat(Protocol):
    """One format of quantised weights, with the settings of a checkpoint."""

    @property
    def name(self) -> str:
        """The format, in words for the log."""
        ...

    def join(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """Replace the tensors of each quantised matrix by one entry, which has the name and the
        shape of the plain matrix. Raises `UnsupportedCheckpoint`."""
        ...


METHODS: Final[Mapping[str, Callable[[Json], WeightFormat]]] = {
    "compressed-tensors": parse_compressed_tensors,
    "fp8": parse_fp8,
    "gptq": parse_gptq,
}
"""By `quant_method` of a quantisation's configuration. Each raises `UnsupportedCheckpoint` for
settings that it does not read."""


def read_weight_format(directory: Path) -> WeightFormat | None:
    """The format of the checkpoint in `directory`, whose configuration `config.read_config` has
    accepted; None if no format here has to read it."""
    return weight_format(text_part(read_json(directory / "config.json")))


def weight_format(raw: Json) -> WeightFormat | None:
    """The format by the keys of `config.json`; None if no format here has to read it.

    Raises `UnsupportedCheckpoint` if a method of `METHODS` has settings that are not read.
    """
    written = raw.get("quantization_config")
    if not isinstance(written, dict):
        return None
    parse = METHODS.get(str(written.get("quant_method")))
    return None if parse is None else parse(written)
