"""Adapters on disk: which files decide the revision, and what is refused, with the remedy."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import ConfigError
from pdserve.worker.lora import check_names, read_adapters

if TYPE_CHECKING:
    from pathlib import Path


def written(path: Path, weights: bytes = b"weights", **config: object) -> Path:
    """An adapter's directory."""
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8} | config))
    (path / "adapter_model.safetensors").write_bytes(weights)
    return path


def revision(path: Path, name: str = "poet") -> str:
    (adapter,) = read_adapters({name: str(path)})
    return adapter.revision


def test_an_adapter_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "poet", rank_pattern={"q_proj": 16}, target_modules=["q_proj"])
    (adapter,) = read_adapters({"poet": str(path)})
    assert (adapter.name, adapter.path, adapter.rank) == ("poet", str(path), 16)
    assert adapter.id == f"poet@{adapter.revision}"


def test_the_revision_is_of_the_files_that_count_and_of_no_others(tmp_path: Path) -> None:
    path = written(tmp_path / "poet")
    before = revision(path)
    moved = shutil.copytree(path, tmp_path / "elsewhere")
    (moved / "README.md").write_text("trained on a Tuesday")
    assert revision(moved, "another name") == before
    changed = {before}
    for file, content in (
        ("adapter_model.safetensors", b"weightS"),
        ("adapter_config.json", b'{"r": 4}'),
        ("new_embeddings.safetensors", b""),
    ):
        (path / file).write_bytes(content)
        changed.add(revision(path))
    assert len(changed) == 4


def test_weights_larger_than_a_piece_are_read_whole(tmp_path: Path) -> None:
    body = bytes(3 << 20)
    one, other = written(tmp_path / "a", body + b"1"), written(tmp_path / "b", body + b"2")
    assert revision(one) != revision(other)


def test_what_is_no_adapter_is_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path / "poet")
    (path / "adapter_config.json").write_text("{")
    (tmp_path / "empty").mkdir()
    bare = written(tmp_path / "bare")
    (bare / "adapter_model.safetensors").unlink()
    for where, why in (
        (tmp_path / "missing", "there is no directory .*missing.*downloaded first"),
        (tmp_path / "empty", "has no adapter_config.json"),
        (bare, "has no adapter_model.safetensors"),
        (path, "adapter_config.json is not valid"),
        (written(tmp_path / "ia3", peft_type="IA3"), "describes a IA3 adapter, only LORA"),
    ):
        with pytest.raises(ConfigError, match=f"lora 'poet': .*{why}"):
            read_adapters({"poet": str(where)})


def test_a_name_of_the_model_is_no_name_for_an_adapter() -> None:
    check_names({"poet": "/x"}, ("tiny", "default"))
    with pytest.raises(ConfigError, match="the model itself is served under this name"):
        check_names({"default": "/x"}, ("tiny", "default"))
