"""Maps the tensors of a checkpoint's safetensors files, without copying.

Reads the container format only (https://huggingface.co/docs/safetensors): which tensors exist and
where their bytes are. It knows no architecture. The loader owns a `Checkpoint` and closes it.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.architectures import VLLM_SERVES_IT
from pdserve_engines.torch.model_loader.config_keys import parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path
    from types import TracebackType

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
BYTES = {"U8": torch.uint8}
"""Of MXFP4."""
_QUANTISED = {"F8_E4M3": torch.float8_e4m3fn, "I32": torch.int32}
"""Of `weight_formats`."""

_HEADER_LIMIT = 100 << 20
"""Most bytes of the JSON header; the reference implementation refuses more."""

_SAMPLE = 64
"""Bytes read at the head, middle and tail of each tensor for the checkpoint's identity."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: bytes `[begin, end)` of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        """The tensors in files that it is made of: itself."""
        return (self,)


@dataclass(frozen=True, slots=True)
class JoinedEntry:
    """A float32 tensor that is computed from several stored ones."""

    name: str
    shape: tuple[int, ...]
    stored: tuple[TensorEntry, ...]
    """What it is computed from, in the order that `read` takes."""
    read: Callable[..., torch.Tensor]
    """Computes it from the stored tensors, to which it must not write."""

    @property
    def dtype(self) -> str:
        return "F32"

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return sum(entry.nbytes for entry in self.stored)


Entry = TensorEntry | JoinedEntry


class Checkpoint:
    """Every tensor of a directory by name. Holds one private mapping per file it has read from."""

    def __init__(self, directory: Path) -> None:
        """Read the headers. Raises `UnsupportedCheckpoint` with the file and what is wrong."""
        self._maps: dict[Path, mmap.mmap] = {}
        self.entries: dict[str, Entry] = {}
        files: dict[str, str] = {}
        for file in _files(directory):
            for entry in read_header(file):
                if other := files.get(entry.name):
                    raise UnsupportedCheckpoint(
                        f"{file}: tensor {entry.name} is in {other} as well"
                    )
                files[entry.name] = file.name
                self.entries[entry.name] = entry

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor, backed by the file's pages unless it is computed. Valid until `close`; never
        write to it."""
        entry = self.entries[name]
        if isinstance(entry, JoinedEntry):
            return entry.read(*map(self._stored, entry.stored))
        return self._stored(entry)

    def _stored(self, entry: TensorEntry) -> torch.Tensor:
        dtype = (DTYPES | BYTES | _QUANTISED).get(entry.dtype)
        if dtype is None:
            raise UnsupportedCheckpoint(
                f"{entry.file}: tensor {entry.name} has dtype {entry.dtype}; "
                f"only {', '.join(DTYPES)} are supported"
            )
        count = math.prod(entry.shape)
        if not count:  # torch makes no tensor of no bytes
            return torch.empty(entry.shape, dtype=dtype)
        flat = torch.frombuffer(
            self._mapping(entry.file), dtype=dtype, count=count, offset=entry.begin
        )
        return flat.view(entry.shape)

    def identity(self, names: Iterable[str]) -> bytes:
        """A digest of names, dtypes, shapes and sampled bytes; the split into files does not
        matter.

        It is cheap, a few pages per tensor. It tells different models apart; it is no integrity
        check.
        """
        digest = hashlib.sha256()
        for name in sorted(names):
            stored = self.entries[name].stored
            for part, entry in enumerate(stored):
                label = f"{name}.{part}" if part else name
                digest.update(repr((label, entry.dtype, entry.shape)).encode())
                mapping = self._mapping(entry.file)
                middle = entry.begin + entry.nbytes // 2
                for start in (entry.begin, middle, max(entry.begin, entry.end - _SAMPLE)):
                    digest.update(mapping[start : min(start + _SAMPLE, entry.end)])
        return digest.digest()

    def close(self) -> None:
        """Drop the mappings; their pages are freed once no tensor views them. Idempotent."""
        self._maps.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _mapping(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as handle:
                # Copy-on-write, because torch needs a writable buffer; nothing writes, so the
                # pages stay the page cache's and no memory is taken twice.
                self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]


def check_dtype(entry: Entry, wanted: Iterable[str]) -> None:
    """Raise `UnsupportedCheckpoint` unless the tensor has one of these dtypes."""
    if entry.dtype not in wanted:
        raise UnsupportedCheckpoint(
            f"tensor {entry.name} has dtype {entry.dtype}, supported are {', '.join(wanted)}"
        )


def read_header(file: Path) -> list[TensorEntry]:
    """The tensors of one safetensors file, checked against the file's size."""
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):  # to open a pipe would wait for its writer
            raise UnsupportedCheckpoint(f"{file}: not a regular file")
        size = found.st_size
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > min(_HEADER_LIMIT, size - 8):
                raise UnsupportedCheckpoint(f"{file}: truncated: the header is not complete")
            header = parse_json(handle.read(length))
    except OSError as error:
        raise UnsupportedCheckpoint(f"{file}: {error.strerror or error}") from error
    except ValueError as error:
        raise UnsupportedCheckpoint(f"{file}: the header is not valid: {error}") from error
    if not isinstance(header, dict):
        raise UnsupportedCheckpoint(f"{file}: the header is not a JSON object")
    header.pop("__metadata__", None)
    return [_entry(file, name, fields, 8 + length, size) for name, fields in header.items()]


_ITEMSIZE = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4} | {
    name: 2 for name in ("F16", "BF16", "I16", "U16")
}


def _entry(file: Path, name: str, fields: Any, base: int, size: int) -> TensorEntry:
    try:
        dtype, shape = str(fields["dtype"]), tuple(int(n) for n in fields["shape"])
        begin, end = (base + int(n) for n in fields["data_offsets"])
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise UnsupportedCheckpoint(f"{file}: tensor {name}: malformed entry") from error
    expected = math.prod(shape) * _ITEMSIZE.get(dtype, 1)
    if (
        begin < base
        or end < begin
        or (dtype in DTYPES | BYTES | _QUANTISED and end - begin != expected)
    ):
        raise UnsupportedCheckpoint(f"{file}: tensor {name}: its offsets do not fit its shape")
    if end > size:
        raise UnsupportedCheckpoint(
            f"{file}: truncated: tensor {name} ends at byte {end}, the file at {size}"
        )
    return TensorEntry(name, dtype, shape, file, begin, end)


def _files(directory: Path) -> list[Path]:
    """The safetensors files: those the index names, or the single one."""
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if not index.exists():
        if single.exists():
            return [single]
        other = "other weight formats are not supported by the torch engine"
        if any(directory.glob("pytorch_model*.bin")):
            other = f"pickled weights are not supported by the torch engine; {VLLM_SERVES_IT}"
        raise UnsupportedCheckpoint(
            f"{directory}: neither model.safetensors nor model.safetensors.index.json is there; "
            f"{other}"
        )
    try:
        shards = parse_json(index.read_bytes())["weight_map"]
        files = [directory / name for name in sorted(set(shards.values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedCheckpoint(f"{index}: not a valid index: {error!r}") from error
    for file in files:
        if file.parent != directory or not _exists(file):
            raise UnsupportedCheckpoint(f"{index}: names {file.name}, which is not there")
    return files


def _exists(file: Path) -> bool:
    try:
        return file.exists()
    except OSError:  # as for a name that no file system takes
        return False
