"""The safetensors container: what is read, and every way a file can be broken."""

from __future__ import annotations

import json
import os
import struct
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.safetensors_reader import Checkpoint

if TYPE_CHECKING:
    from pathlib import Path

NAME = "model.safetensors"


def write(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_tensors_are_those_that_were_saved(tmp_path: Path) -> None:
    saved = {
        "a": torch.randn(3, 5),
        "b": torch.randn(4).bfloat16(),
        "c": torch.randn(2, 2, 2).half(),
        "scalar": torch.tensor(3.0),
    }
    save_file(saved, tmp_path / NAME, metadata={"format": "pt"})
    with Checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.entries) == set(saved)
        for name, tensor in saved.items():
            found = checkpoint.tensor(name)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)


def test_reading_takes_no_copy(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4), "b": torch.zeros(4)}, tmp_path / NAME)
    with Checkpoint(tmp_path) as checkpoint:
        first = checkpoint.tensor("a").data_ptr()
        assert checkpoint.tensor("a").data_ptr() == first
        assert abs(checkpoint.tensor("b").data_ptr() - first) == 16


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with Checkpoint(tmp_path) as checkpoint:
        assert float(checkpoint.tensor("a").sum()) == 2
        assert set(checkpoint.entries) == {"a", "b"}


def test_identity_follows_content_and_not_the_cut_into_files(tmp_path: Path) -> None:
    whole, cut, other = (tmp_path / name for name in ("whole", "cut", "other"))
    for folder in (whole, cut, other):
        folder.mkdir()
    tensors = {"a": torch.arange(1000.0), "b": torch.arange(7.0)}
    save_file(tensors, whole / NAME)
    for name in tensors:
        save_file({name: tensors[name]}, cut / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in tensors}}
    (cut / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(tensors | {"a": tensors["a"] + 1}, other / NAME)
    digests = []
    for folder in (whole, cut, other):
        with Checkpoint(folder) as checkpoint:
            digests.append(checkpoint.identity(tensors))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("header", "data", "complaint"),
    [
        ({"a": entry()}, b"1234567", "truncated: tensor a ends at byte"),
        ({"a": entry(offsets=(0, 12))}, bytes(12), "offsets do not fit its shape"),
        ({"a": entry(offsets=(8, 0))}, bytes(8), "offsets do not fit its shape"),
        ({"a": entry(offsets=(-8, 0))}, bytes(8), "offsets do not fit its shape"),
        ({"a": entry(offsets=(0,))}, bytes(8), "tensor a: malformed entry"),
        ({"a": entry(shape="wide")}, bytes(8), "tensor a: malformed entry"),
        ({"a": 3}, bytes(8), "tensor a: malformed entry"),
        ({"a": entry(shape=(float("inf"),))}, bytes(8), "tensor a: malformed entry"),
        (b"[" * 200_000, b"", "the header is not valid: nested too deeply"),
        ([], b"", "not a JSON object"),
        (b"{oops", b"", "the header is not valid"),
        (b"\xff\xfe{}", b"", "the header is not valid"),
    ],
)
def test_a_broken_file_is_refused_with_what_is_wrong(
    tmp_path: Path, header: object, data: bytes, complaint: str
) -> None:
    write(tmp_path / NAME, header, data)
    with pytest.raises(UnsupportedCheckpoint) as error:
        Checkpoint(tmp_path)
    assert complaint in error.value.message
    assert NAME in error.value.message


@pytest.mark.parametrize("content", [b"", b"\x01", b"\xff" * 8, struct.pack("<Q", 50) + b"{}"])
def test_a_file_that_ends_in_its_header_is_torn(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(UnsupportedCheckpoint, match="truncated: the header is not complete"):
        Checkpoint(tmp_path)


def test_a_dtype_without_arithmetic_here_is_refused_when_read(tmp_path: Path) -> None:
    write(tmp_path / NAME, {"a": entry("F8_E5M2", (8,))}, bytes(8))
    with (
        Checkpoint(tmp_path) as checkpoint,
        pytest.raises(UnsupportedCheckpoint, match="F8_E5M2"),
    ):
        checkpoint.tensor("a")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="other weight formats are not supported"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedCheckpoint, match=r"pickled weights .* --engine=vllm serves it"):
        Checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(UnsupportedCheckpoint, match=r"gone\.safetensors"):
        Checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    with pytest.raises(UnsupportedCheckpoint, match=r"outside\.safetensors"):
        Checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "long" * 1000}}))
    with pytest.raises(UnsupportedCheckpoint, match=r"names longlong.*, which is not there"):
        Checkpoint(tmp_path)
    for text in ("{}", "[]", '{"weight_map": 3}', "nonsense", "[" * 200_000):
        index.write_text(text)
        with pytest.raises(UnsupportedCheckpoint, match="not a valid index"):
            Checkpoint(tmp_path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(UnsupportedCheckpoint, match="not a regular file"):
        Checkpoint(tmp_path)


def test_a_tensor_may_be_empty(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 0)}, tmp_path / NAME)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tensor("a").shape == (3, 0)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"a": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedCheckpoint, match=r"tensor a is in one\.safetensors as well"):
        Checkpoint(tmp_path)
