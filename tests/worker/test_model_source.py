"""Where a worker's model comes from, and how its card is named."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import ConfigError
from pdserve.worker.config import WorkerConfig
from pdserve.worker.model_source import CheckpointSource
from tests.worker.test_card import CAPABILITIES

if TYPE_CHECKING:
    from pathlib import Path


def ignore(stage: str, fraction: float | None) -> None:
    pass


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": []}))
    return folder


async def test_a_directory_is_served_under_its_own_name(checkpoint: Path) -> None:
    source = CheckpointSource(WorkerConfig(model=str(checkpoint)))
    found = await source.find(ignore)
    assert (found.path, found.name) == (checkpoint, "tiny")
    card = await source.describe(found, CAPABILITIES)
    assert (card.name, card.aliases, card.vocab_size) == ("tiny", (), 100)


async def test_configured_names_win(checkpoint: Path) -> None:
    config = WorkerConfig(model=str(checkpoint), served_model_name=("main", "alias"))
    source = CheckpointSource(config)
    card = await source.describe(await source.find(ignore), CAPABILITIES)
    assert (card.name, card.aliases) == ("main", ("alias",))


async def test_no_model_there_is_an_error_with_its_name(tmp_path: Path) -> None:
    source = CheckpointSource(WorkerConfig(model=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="none"):
        await source.find(ignore)


async def test_a_template_that_is_not_there_is_told_before_anything_is_loaded(
    checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.jinja"
    config = WorkerConfig(model=str(checkpoint), chat_template=str(file))
    with pytest.raises(ConfigError, match=r"--chat-template=.*mine\.jinja"):
        await CheckpointSource(config).find(ignore)
    file.write_text("mine")
    source = CheckpointSource(config)
    card = await source.describe(await source.find(ignore), CAPABILITIES)
    assert card.chat_template == "mine"
