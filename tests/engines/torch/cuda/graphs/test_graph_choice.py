"""Graphs are there when they are possible and wanted, and it is said when they are not."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pdserve.clock import ManualClock
from pdserve.engine_core.engine_loader import load_core
from pdserve.errors import ConfigError
from pdserve_engines.torch import executor as executor_module
from pdserve_engines.torch.cuda.graphs import graph_choice
from pdserve_engines.torch.cuda.graphs.graph_choice import make_graphs
from pdserve_engines.torch.executor import TorchExecutor
from pdserve_engines.torch.model_loader.config import parse_config
from pdserve_engines.torch.models.torch_model import TorchModel
from pdserve_engines.torch.settings import TorchSettings
from tests.engines.torch.checkpoints import checkpoint
from tests.engines.torch.cuda.graphs.engines import KernelEngines
from tests.engines.torch.cuda.test_kernel_model import LLAMA
from tests.engines.torch.driver import loaded, spec

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTINGS = TorchSettings(torch.device("cpu"), torch.float32, 1, 600)


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchExecutor]:
    """With the kernels' model, on a device that captures nothing."""
    engines = KernelEngines(monkeypatch)
    monkeypatch.setattr(graph_choice, "graph_device", lambda device: engines._device(device))
    core = engines.core("llama", 9, graphs="off", ahead="off", max_sequences=4)
    made: Any = core._executor
    yield made
    gc.collect()  # what views the pool
    core.close()


def make(model: Any, wanted: str, device: str = "cpu") -> tuple[Any, str]:
    settings = replace(SETTINGS, cuda_graphs=wanted, device=torch.device(device))
    return make_graphs(model, settings, 4, 600)


def test_off_captures_none(executor: Any) -> None:
    assert executor._graphs is None
    assert make(executor._model, "off") == (None, "")


def test_auto_captures_what_the_kernels_compute(executor: Any) -> None:
    graphs, missing = make(executor._model, "auto")
    assert graphs.sizes == (1, 2, 4)
    assert missing == ""
    graphs.close()


def test_on_a_host_there_are_none_and_nothing_is_missing() -> None:
    made = loaded(checkpoint("llama")[0])
    assert made._graphs is None
    assert made.graphs_missing == ""
    made.close()


def test_a_host_refuses_graphs_that_are_asked_for() -> None:
    made = TorchExecutor()
    made.load(
        spec(checkpoint("llama")[0], options={"cuda_graphs": "on"}), lambda stage, fraction: None
    )
    with pytest.raises(ConfigError, match="cuda_graphs=on: not possible, the model is computed by"):
        made.allocate(9)
    made.close()


def test_models_of_others_say_why_they_have_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    plain = TorchModel(parse_config(LLAMA), SETTINGS)
    assert make(plain, "auto", "cuda") == (None, "")
    assert "launched without CUDA graphs: the model is computed by torch" in caplog.text


def test_an_engine_reports_that_it_could_not_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "make_graphs", lambda *args: (None, "no graphs: why"))
    core = load_core("torch", ManualClock())
    reported = core.load(spec(checkpoint("llama")[0], kv_memory=1 << 20), lambda progress: None)
    assert reported.slow_kernels == "no graphs: why"
    core.close()


def test_a_capture_that_fails_leaves_an_engine_without_graphs(
    executor: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[bool] = []

    class Broken:
        programs = 4

        def capture(self, launch: Any) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(graph_choice, "graph_device", lambda device: Broken())
    graphs, missing = make_graphs(
        executor._model, replace(SETTINGS, device=torch.device("cuda")), 4, 600
    )
    assert graphs is None
    assert closed == [True]
    assert "without CUDA graphs: capturing has failed: RuntimeError: operation not" in missing
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
