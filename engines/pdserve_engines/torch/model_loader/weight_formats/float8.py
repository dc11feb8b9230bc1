"""Reads weights in FP8 (E4M3): those of compressed-tensors, and of checkpoints that say `fp8`.

A matrix is stored as `weight`, with a scale for all of it, for each row, for groups of a row's
columns, or for blocks of rows and columns. A weight is its stored value times its scale, computed
in float32. Scales of activations and of the KV cache are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.quantization import refused_scheme
from pdserve_engines.torch.model_loader.safetensors_reader import (
    DTYPES,
    JoinedEntry,
    check_dtype,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from pdserve_engines.torch.model_loader.config_keys import Json
    from pdserve_engines.torch.model_loader.safetensors_reader import Entry

__all__ = ["Float8", "dequantise", "parse_compressed_tensors", "parse_fp8"]

Block = tuple[int, int]

_DTYPE: Final = "F8_E4M3"
_SCALES: Final = ("_scale", "_scale_inv")
"""What follows the name of a weight in that of its scale: of compressed-tensors, and of the method
`fp8`, which multiplies by it, too."""
_UNUSED: Final = (".input_scale", ".output_scale", ".q_scale")
"""Ends of names of other scales."""


@dataclass(frozen=True, slots=True)
class Float8:
    """Implements `base.WeightFormat`."""

    method: str
    block: Block | None
    """Rows and columns that share a scale, where scales are stored by block."""

    @property
    def name(self) -> str:
        return f"FP8 ({self.method})"

    def join(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        found = {name: entry for name, entry in entries.items() if not name.endswith(_UNUSED)}
        for name in [name for name, entry in found.items() if entry.dtype == _DTYPE]:
            scale = next((name + end for end in _SCALES if name + end in found), None)
            if scale is None:
                raise UnsupportedCheckpoint(f"tensor {name}: FP8 without a tensor {name}_scale")
            found[name] = self._matrix(found[name], found.pop(scale))
        return found

    def _matrix(self, weight: Entry, scale: Entry) -> JoinedEntry:
        check_dtype(scale, DTYPES)
        block = _scaled_block(weight.shape, scale.shape, self.block)
        if block is None:
            raise UnsupportedCheckpoint(
                f"tensor {scale.name}: shape {list(scale.shape)} does not fit a weight of shape "
                f"{list(weight.shape)}"
            )

        def read(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            if not (scales.isfinite() & (scales > 0)).all():
                raise UnsupportedCheckpoint(f"tensor {scale.name}: a scale is no positive number")
            return dequantise(values, scales, block)

        return JoinedEntry(weight.name, weight.shape, (*weight.stored, *scale.stored), read)


def dequantise(weight: torch.Tensor, scale: torch.Tensor, block: Block) -> torch.Tensor:
    """`[rows, columns]` FP8 to float32. `scale`: one for each `block` of rows and columns, in the
    order of the weights; the last blocks may be cut."""
    rows, columns = weight.shape
    values = weight.float()
    grid = scale.float().reshape(-(-rows // block[0]), -(-columns // block[1]))
    for index, factors in enumerate(grid):
        part = values[index * block[0] : (index + 1) * block[0]]
        part *= factors.repeat_interleave(block[1])[:columns]
    return values


def _scaled_block(
    weight: tuple[int, ...], scale: tuple[int, ...], block: Block | None
) -> Block | None:
    """Rows and columns that share one of the scales; None if the shapes do not fit."""
    if len(weight) != 2:
        return None
    rows, columns = weight
    if scale in ((), (1,), (1, 1)):
        return rows, columns
    if block is not None and scale == (-(-rows // block[0]), -(-columns // block[1])):
        return min(block[0], rows), min(block[1], columns)
    if scale == (rows,):
        return 1, columns
    if len(scale) == 2 and scale[0] == rows and scale[1] and columns % scale[1] == 0:
        return 1, columns // scale[1]
    return None


# ---------------------------------------------------------------- what config.json says


def parse_compressed_tensors(written: Json) -> Float8:
    """The format of a `quantization_config` of compressed-tensors.

    Raises `UnsupportedCheckpoint` unless all its weights are FP8 without further transformations.
    """
    method = "compressed-tensors"
    for problem in _problems(written):
        raise refused_scheme(method, problem)
    found = [_weights(group).get("block_structure") for _, group in _groups(written)]
    sizes = [block for block in found if block is not None]
    if any(not _is_block(block) or block != sizes[0] for block in sizes):
        raise refused_scheme(method, f"block_structure {sizes}")
    return Float8(method, (sizes[0][0], sizes[0][1]) if sizes else None)


def parse_fp8(written: Json) -> Float8:
    """The format of a `quantization_config` whose method is `fp8`, as transformers and vLLM write
    it. Raises `UnsupportedCheckpoint`."""
    kind, block = written.get("fmt") or "e4m3", written.get("weight_block_size")
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise refused_scheme("fp8", f"fmt {kind!r}")
    if block is None:
        return Float8("fp8", None)
    if not _is_block(block):
        raise refused_scheme("fp8", f"weight_block_size {block!r}")
    return Float8("fp8", (block[0], block[1]))


def _is_block(written: Any) -> bool:
    sizes = list(written) if isinstance(written, list | tuple) else []
    return len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)


_FORMATS: Final = ("float-quantized", "naive-quantized")


def _problems(written: Json) -> Iterator[str]:
    """What is not read, each in words."""
    if written.get("format") not in _FORMATS:
        yield f"format {written.get('format')!r}"
    sparsity = written.get("sparsity_config") or {}
    if not isinstance(sparsity, dict):
        yield f"sparsity_config {sparsity!r}"
    elif sparsity.get("format", "dense") != "dense":
        yield f"sparsity_config.format {sparsity['format']!r}"
    if written.get("transform_config"):
        yield "transform_config, which rotates weights and activations"
    for name, group in _groups(written):
        where = f"config_groups.{name}"
        if group.get("format") not in (None, *_FORMATS):
            yield f"{where}.format {group['format']!r}"
        if not _is_fp8(_weights(group)):
            yield f"{where}.weights: {_scheme(group.get('weights'))}"
        # Rounded activations save time on hardware for FP8 only, but a model whose integers
        # stand for ranges of its activations is another one.
        for key in ("input_activations", "output_activations"):
            if group.get(key) and not _is_fp8(group[key]):
                yield f"{where}.{key}: {_scheme(group[key])}"


def _groups(written: Json) -> list[tuple[str, Json]]:
    groups = written.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(each, dict) for each in groups.values()):
        raise refused_scheme("compressed-tensors", "config_groups is no object of objects")
    return list(groups.items())


def _weights(group: Json) -> Json:
    weights = group.get("weights")
    return weights if isinstance(weights, dict) else {}


def _is_fp8(scheme: Any) -> bool:
    return (
        isinstance(scheme, dict)
        and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
        and scheme.get("symmetric", True) is True
    )


def _scheme(scheme: Any) -> str:
    if not isinstance(scheme, dict):
        return repr(scheme)
    kind = "symmetric" if scheme.get("symmetric", True) else "asymmetric"
    return f"{scheme.get('num_bits')} bits of type {scheme.get('type')}, {kind}"
