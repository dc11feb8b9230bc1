"""One suite over every engine behind the port: scripted, instant, with threads of its own, sim."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, ClassVar

import pytest

from pdserve.engine.client import CoreClient
from pdserve.messages.engine import EngineSpec
from pdserve.testing.engine_conformance import EngineConformance
from pdserve.testing.scripted import ENGINE
from pdserve.testing.thread_launcher import ThreadLauncher
from tests.conformance import threaded_engine

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.engine.port import Engine

SCRIPTED = EngineSpec(
    engine=ENGINE,
    model="",
    block_size=4,
    max_batch_tokens=32,
    max_sequences=8,
    options={"blocks": "64", "max_len": "120"},
)


class TestScriptedInAThread(EngineConformance):
    prompt = (17, 42, 8)

    def make_engine(self) -> Engine:
        return CoreClient(SCRIPTED, make_launcher=ThreadLauncher)


@pytest.mark.long(one_in=2)  # a process for each test
class TestScriptedInAProcess(EngineConformance):
    prompt = (17, 42, 8)

    def make_engine(self) -> Engine:
        return CoreClient(SCRIPTED)


def write_model(directory: Path) -> None:
    """The two files that the instant engine reads."""
    vocab = {f"word{chr(97 + i)}": i for i in range(26)}
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    config = {"model_type": "llama", "vocab_size": 64, "max_position_embeddings": 120}
    (directory / "config.json").write_text(json.dumps(config))


class TestInstant(EngineConformance):
    prompt = (17, 42, 8)
    options: ClassVar[dict[str, str]] = {}

    @pytest.fixture(autouse=True)
    def _model(self, tmp_path: Path) -> None:
        write_model(tmp_path)
        self.spec = EngineSpec(engine="instant", model=str(tmp_path), options=self.options)

    def make_engine(self) -> Engine:
        return CoreClient(self.spec, make_launcher=ThreadLauncher)


class TestInstantPaced(TestInstant):
    options: ClassVar[dict[str, str]] = {"tokens_per_second": "2000", "ttft_ms": "2"}


class TestThreaded(EngineConformance):
    """Only its wake-up makes the host take what its thread has computed."""

    prompt = (17, 42, 8)

    @pytest.fixture(autouse=True)
    def _model(self, tmp_path: Path) -> None:
        write_model(tmp_path)
        self.spec = EngineSpec(engine=threaded_engine.ENGINE, model=str(tmp_path))

    def make_engine(self) -> Engine:
        return CoreClient(self.spec, make_launcher=ThreadLauncher)


class TestSim(EngineConformance):
    prompt = (17, 42, 8)
    options: ClassVar[dict[str, str]] = {"slowdown": "0.1"}

    @pytest.fixture(autouse=True)
    def _model(self, tmp_path: Path) -> None:
        write_model(tmp_path)
        self.spec = EngineSpec(
            engine="sim",
            model=str(tmp_path),
            block_size=4,
            max_batch_tokens=32,
            max_sequences=8,
            options={"blocks": "64"} | self.options,
        )

    def make_engine(self) -> Engine:
        return CoreClient(self.spec, make_launcher=ThreadLauncher)


class TestSimWithContent(TestSim):
    options: ClassVar[dict[str, str]] = {"slowdown": "0", "content": "on", "noise": "0.3"}


class TestSimInStrides(TestSim):
    options: ClassVar[dict[str, str]] = {"slowdown": "0.1", "steps_at_once": "16"}


@pytest.mark.long(one_in=3)  # a process for each test
class TestSimInAProcess(TestSim):
    def make_engine(self) -> Engine:
        return CoreClient(self.spec)
