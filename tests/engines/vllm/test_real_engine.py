"""The suite of engines over the real vLLM, and what ends with its process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pdserve
from pdserve.engine.client import CoreClient
from pdserve.testing.thread_launcher import ThreadLauncher
from tests.engines.vllm import real
from tests.engines.vllm.suite import VllmConformance

if TYPE_CHECKING:
    from pdserve.engine.port import Engine

real.require_vllm()
pytestmark = real.MARKS
engines_of_this_file = real.keeps(real.MAIN)


def test_the_checkout_is_what_is_tested() -> None:
    assert Path(pdserve.__file__).parents[1] == Path(__file__).parents[3]


class TestVllm(VllmConformance):
    prompt = (17, 42, 8)

    def make_engine(self) -> Engine:
        return CoreClient(real.MAIN, make_launcher=ThreadLauncher)
