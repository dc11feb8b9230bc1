"""The example engine passes the conformance suite, and a server finds it by its entry point."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pdserve.clock import ManualClock
from pdserve.engine.client import CoreClient
from pdserve.engine_core.engine_loader import load_core
from pdserve.errors import ConfigError, Overloaded
from pdserve.messages.engine import EngineSpec
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.engine_conformance import EngineConformance
from pdserve.testing.inline_engine import InlineEngine
from pdserve.testing.thread_launcher import ThreadLauncher
from pdserve.token_ids import token_ids
from tests.conformance.test_engines import write_model
from tests.e2e.server import serving

if TYPE_CHECKING:
    from pdserve.engine.port import Engine

FOLDER = Path(__file__).parents[2] / "examples" / "echo_engine"
ECHO = "examples.echo_engine.echo_engine:create"


class TestEcho(EngineConformance):
    prompt = (17, 42, 8)

    @pytest.fixture(autouse=True)
    def _model(self, tmp_path: Path) -> None:
        write_model(tmp_path)
        self.spec = EngineSpec(engine=ECHO, model=str(tmp_path), max_sequences=4)

    def make_engine(self) -> Engine:
        return CoreClient(self.spec, make_launcher=ThreadLauncher)


def request(prompt: list[int]) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=4)
    return GenerateRequest(request_id="r", model="m", prompt=token_ids(prompt), sampling=sampling)


def test_requests_beyond_the_limits_wait_and_then_are_refused(tmp_path: Path):
    write_model(tmp_path)
    spec = EngineSpec(engine=ECHO, model=str(tmp_path), max_sequences=1, max_waiting=2)
    with InlineEngine(load_core(ECHO, ManualClock()), spec) as engine:
        first, second = engine.submit(request([5, 6])), engine.submit(request([7]))
        refused = engine.submit(request([8]))
        engine.step()
        assert (first.tokens, second.tokens) == ([[5]], [[]])
        assert isinstance(refused.error, Overloaded)
        engine.run()
        assert (first.tokens, second.tokens) == ([[5, 6, 5, 6]], [[7, 7, 7, 7]])


def test_an_option_that_it_does_not_have_is_refused(tmp_path: Path):
    write_model(tmp_path)
    spec = EngineSpec(engine=ECHO, model=str(tmp_path), options={"speed": "1"})
    with pytest.raises(ConfigError, match="the echo engine has no option speed; it has none"):
        load_core(ECHO, ManualClock()).load(spec, lambda progress: None)


def test_a_server_finds_it_by_its_entry_point(tmp_path: Path):
    """As after `pip install examples/echo_engine`: the package's metadata is on the path."""
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text("utf-8"))["project"]
    (points,) = project["entry-points"].items()
    group, (line,) = points[0], [f"{name} = {target}" for name, target in points[1].items()]
    metadata = tmp_path / "pdserve_echo_engine-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{line}\n")
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    path = os.pathsep.join(map(str, (FOLDER, tmp_path)))
    with serving(None, "--engine", "echo", PYTHONPATH=path) as server:
        body = {"prompt": "hello there", "max_tokens": 12, "temperature": 0}
        (choice,) = server.post("/v1/completions", body)["choices"]
    assert choice["text"].startswith("hello therehello there")
    assert choice["finish_reason"] == "length"
