"""An engine that computes no adapters refuses them, at once or when it has loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

import pdserve
from pdserve.engine.client import CoreClient
from pdserve.engine_core.loras import check_loras
from pdserve.errors import ConfigError, NoWorker
from pdserve.messages.engine import EngineSpec
from pdserve.messages.lora import LoraAdapter
from pdserve.testing.inline_engine import InlineEngine
from pdserve.testing.scripted import ENGINE, ScriptedExecutor
from pdserve.testing.sinks import CheckingSink
from pdserve.testing.thread_launcher import ThreadLauncher
from pdserve_engines.sim import SimExecutor
from tests.engines.sim.driver import request, spec

BUNDLED = Path(pdserve.__file__).parent / "bundled"
POET = LoraAdapter(name="poet", path="/adapters/poet", revision="1")
REFUSAL = "computes no LoRA adapters, but --lora names 'poet'"


def test_an_engine_without_adapters_is_not_asked() -> None:
    check_loras(EngineSpec(engine="x", model=""), able=False)
    check_loras(EngineSpec(engine="x", model="", loras=(POET,)), able=True)


def test_an_executor_that_computes_none_does_not_even_load() -> None:
    class Loading(ScriptedExecutor):
        def load(self, *args):
            raise AssertionError("it has begun to load")

    wanted = EngineSpec(engine=ENGINE, model="", loras=(POET,))
    with pytest.raises(ConfigError, match=REFUSAL):
        InlineEngine.of(Loading(), wanted)


@pytest.mark.parametrize("engine", ["instant", "examples.echo_engine.echo_engine:create"])
async def test_a_core_of_its_own_that_knows_of_none_is_refused(engine: str) -> None:
    wanted = EngineSpec(engine=engine, model=str(BUNDLED), loras=(POET,))
    client = CoreClient(wanted, make_launcher=ThreadLauncher)
    with pytest.raises(ConfigError, match=REFUSAL):
        await client.start()


async def test_a_request_for_an_adapter_that_was_not_loaded_is_for_another_worker() -> None:
    """Its card is that of an earlier life, whose adapter had other files."""
    client = CoreClient(spec(loras=(POET,)), make_launcher=ThreadLauncher)
    await client.start()
    try:
        capabilities = client.capabilities
        assert capabilities is not None
        assert "lora" in capabilities.features
        with pytest.raises(NoWorker, match="no adapter 'poet@0'"):
            CheckingSink(client, request(lora="poet@0"))
        sink = CheckingSink(client, request(lora="poet@1"))
        assert len((await sink.wait()).tokens[0]) == 8
    finally:
        await client.stop()
    with InlineEngine.of(SimExecutor(), spec()) as bare:
        assert "lora" not in bare.capabilities.features
