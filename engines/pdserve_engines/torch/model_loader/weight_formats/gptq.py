"""Reads weights in GPTQ's format: integers of four or eight bits in groups of inputs.

A matrix of `[out, in]` is stored transposed. `qweight` packs the codes of successive inputs into
words of 32 bits, `qzeros` the zero points of successive outputs, the first in the low bits, and
`g_idx` names each input's group, because inputs may be quantised in another order (`desc_act`). A
weight is its group's scale times (code - zero point). The format `gptq` stores zero points less
one, `gptq_v2` as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.quantization import refused_scheme
from pdserve_engines.torch.model_loader.safetensors_reader import (
    DTYPES,
    JoinedEntry,
    check_dtype,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve_engines.torch.model_loader.config_keys import Json
    from pdserve_engines.torch.model_loader.safetensors_reader import Entry

__all__ = ["Gptq", "dequantise", "parse_gptq"]

_BITS: Final = (4, 8)
_WORD: Final = 32
_CODES: Final = ("I32",)
"""Dtypes of what is packed, and of indices."""
_ONE_LESS: Final[Mapping[str, bool]] = {"gptq": True, "gptq_v2": False}
"""By `checkpoint_format`: whether zero points are stored less one."""


@dataclass(frozen=True, slots=True)
class Gptq:
    """Implements `base.WeightFormat`. Bits and groups are read from the shapes of each matrix,
    since tools may choose them for each."""

    one_less: bool
    """Whether zero points are stored less one."""

    @property
    def name(self) -> str:
        return "GPTQ"

    def join(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        found = dict(entries)
        for name in [name for name in found if name.endswith(".qweight")]:
            stem = name.removesuffix(".qweight")
            if f"{stem}.weight" in found:
                raise UnsupportedCheckpoint(f"tensor {stem}.weight: {name} is there as well")
            found[f"{stem}.weight"] = self._matrix(stem, found)
        return found

    def _matrix(self, stem: str, entries: dict[str, Entry]) -> JoinedEntry:
        """The matrix of a module, whose tensors are taken out of `entries`."""
        names = [f"{stem}.{part}" for part in ("qweight", "qzeros", "scales")]
        for name in names:
            if name not in entries:
                raise UnsupportedCheckpoint(f"tensor {name} is missing: {stem} is in GPTQ's format")
        qweight, qzeros, scales = (entries.pop(name) for name in names)
        groups = entries.pop(f"{stem}.g_idx", None)
        bits = _bits(qweight, qzeros, scales)
        inputs = qweight.shape[0] * _WORD // bits
        _check_groups(groups, inputs, scales)

        def read(*tensors: torch.Tensor) -> torch.Tensor:
            _check_values(stem, *tensors[2:])
            return dequantise(bits, *tensors, one_less=self.one_less)

        stored = [*qweight.stored, *qzeros.stored, *scales.stored]
        stored += [] if groups is None else groups.stored
        shape = (qweight.shape[1], inputs)
        return JoinedEntry(f"{stem}.weight", shape, tuple(stored), read)


def dequantise(
    bits: int,
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None = None,
    *,
    one_less: bool,
) -> torch.Tensor:
    """`[out, in]` float32. `g_idx`: None if the groups follow each other."""
    if one_less:
        # The writer subtracts one from every field of a word by one subtraction, which may borrow
        # from the next field; so the whole words are added up, too, and may wrap around.
        qzeros = qzeros + torch.tensor(_ones(bits), dtype=torch.int32)
    codes, zeros = _unpacked(qweight.T, bits), _unpacked(qzeros, bits)
    if g_idx is None:
        size = codes.shape[1] // len(scales)
        g_idx = torch.arange(codes.shape[1]) // size
    group = g_idx.long()
    weights = codes.float()
    weights -= zeros.T.float()[:, group]
    weights *= scales.T.float()[:, group]
    return weights


def _ones(bits: int) -> int:
    """A word with a one in each field."""
    return sum(1 << shift for shift in range(0, _WORD, bits))


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The fields of the last dimension's words, as bytes: `[n, m]` to `[n, m * 32 / bits]`."""
    mask = (1 << bits) - 1
    fields = [(words >> shift & mask).to(torch.uint8) for shift in range(0, _WORD, bits)]
    return torch.stack(fields, dim=-1).flatten(-2)


def _bits(qweight: Entry, qzeros: Entry, scales: Entry) -> int:
    """Bits of a code. Raises `UnsupportedCheckpoint` if dtypes or shapes fit none that is read."""
    for entry, dtypes in ((qweight, _CODES), (qzeros, _CODES), (scales, DTYPES)):
        check_dtype(entry, dtypes)
    if all(len(entry.shape) == 2 for entry in (qweight, qzeros, scales)):
        outputs, (groups, words) = qweight.shape[1], qzeros.shape
        for bits in _BITS:
            if scales.shape == (groups, outputs) and words * _WORD == outputs * bits:
                return bits
    shapes = ", ".join(f"{entry.name} {list(entry.shape)}" for entry in (qweight, qzeros, scales))
    raise UnsupportedCheckpoint(f"tensors do not fit GPTQ's format in 4 or 8 bits: {shapes}")


def _check_groups(groups: Entry | None, inputs: int, scales: Entry) -> None:
    """Raise `UnsupportedCheckpoint` unless each input has a group. `groups`: the `g_idx`."""
    if groups is not None:
        check_dtype(groups, _CODES)
        if groups.shape != (inputs,):
            raise UnsupportedCheckpoint(
                f"tensor {groups.name}: shape {list(groups.shape)}, expected [{inputs}]"
            )
    elif not scales.shape[0] or inputs % scales.shape[0]:
        raise UnsupportedCheckpoint(
            f"tensor {scales.name}: {scales.shape[0]} groups do not divide {inputs} inputs, "
            "and there is no g_idx"
        )


def _check_values(stem: str, scales: torch.Tensor, g_idx: torch.Tensor | None = None) -> None:
    """Raise `UnsupportedCheckpoint` for values that no tool writes.

    A single scale may be zero: weights below float16's smallest number have such a group.
    """
    if not scales.isfinite().all() or not scales.any():
        raise UnsupportedCheckpoint(
            f"tensor {stem}.scales: a scale is no finite number, or all are zero"
        )
    if g_idx is not None and not ((g_idx >= 0) & (g_idx < len(scales))).all():
        raise UnsupportedCheckpoint(
            f"tensor {stem}.g_idx: a group is not one of the {len(scales)} in {stem}.scales"
        )


def parse_gptq(written: Json) -> Gptq:
    """The format of a `quantization_config` of GPTQ. Raises `UnsupportedCheckpoint`."""
    bits, kind = written.get("bits"), written.get("checkpoint_format") or "gptq"
    if bits not in _BITS:
        raise refused_scheme("gptq", f"bits {bits!r}")
    if not isinstance(kind, str) or kind not in _ONE_LESS:
        raise refused_scheme("gptq", f"checkpoint_format {kind!r}")
    if written.get("is_marlin_format"):
        raise refused_scheme("gptq", "is_marlin_format")
    return Gptq(_ONE_LESS[kind])
